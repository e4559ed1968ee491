"""``mok-megatron doctor``: will this work here, and what to do if not.

`facts.gather` collects what this machine is (also `nvml` and, in processes of their own, `probes`). The modules
`software`, `compiler` and `gpu` judge those facts: small functions from `Facts` to checks, which tests feed with
machines that do not exist. `report` prints.
"""
