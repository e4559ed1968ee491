"""CPU host mode: Megatron Core on a machine without a GPU.

Megatron Core assumes CUDA in a few dozen names. :mod:`mok_megatron.host.replacements` lists each one with its CPU
stand-in and the reason; :mod:`mok_megatron.host.mode` puts them in place and takes them out again. Only this
project's own entry points and tests use it, never the plugin, and it refuses to start where a GPU is present.
"""

from mok_megatron.host.mode import HostModeError, active, cpu_host_mode, disable, enable

__all__ = ["HostModeError", "active", "cpu_host_mode", "disable", "enable"]
