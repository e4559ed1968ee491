"""``mok-megatron tune``: the fastest settings of the fused layer for a shape, an EP and a GPU.

- `points`: what can be set, and what the simulation expects of it.
- `search`: measures the promising points on the real kernel, within a time budget.
- `report`: table, tuned file (see `mok_megatron.tuned`) and record; `draw`: the surface as a picture.
"""
