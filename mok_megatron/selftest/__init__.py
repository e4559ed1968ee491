"""``mok-megatron selftest``: whether the layer computes what it should on this machine, in under a minute.

- :mod:`problem`: a layer's operands, its values in plain torch, and the kernel on virtual ranks of one GPU.
- :mod:`checks`: what is checked, in the order in which a first run on new hardware should look.
- :mod:`command`: runs them and prints a table.

The tests of the megakernel stand on the same `problem`.
"""
