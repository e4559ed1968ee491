"""`mok-megatron simulate`: a discrete-event model of one launch of the megakernel in each direction.

It walks the same list of tiles as the kernel, in the same order, with the kernel's waits, and takes rates as input.
Main path: `order` (the lists, as in kernels/scheduler/tile.cuh) and `rates` (how long each thing takes) -> `engine`
(who waits for what) -> `layer` (one layer, both directions) -> `command`.
"""
