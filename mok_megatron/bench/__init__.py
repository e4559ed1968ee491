"""``mok-megatron bench``: one MoE layer, after routing, against other implementations of it.

- `problem`: a shape and its tensors on each rank, the same for every implementation.
- `layers`: what an implementation is, ours, and the list of those that can be measured;
  `nccl_layer` is the plain baseline, `megatron_layers` are Megatron's own dispatchers.
- `measure`: errors against the reference, times, and `floor`: what the hardware alone would take.
- `report`: table and JSON.
"""
