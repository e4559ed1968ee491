"""`mok-megatron plan`: what a training run on a given cluster will look like, before any GPU is used.

From a model and a cluster description: parallel sizes that fit memory, where each rank goes, the command lines,
bytes over NVLink and network, memory of each GPU, and predicted times with their formulas. Main path: `search`
(which sizes) -> `memory` and `timing` (what they cost) -> `launch` (how to start) -> `report` and `draw`.
"""
