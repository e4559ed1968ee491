"""mok_megatron: a Mixture-of-Experts layer for Megatron Core as one deterministic persistent kernel a direction.

`mok_moe` is the operator, `MokConfig` its settings, `register()` makes `--moe-token-dispatcher-type mok` known to
Megatron Core (an installed package does so by itself). Importing the package imports neither torch nor Megatron.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    __version__: str

    from mok_megatron.config import MokConfig
    from mok_megatron.megatron.register import register
    from mok_megatron.ops import SharedExpert, mok_moe

__all__ = ["MokConfig", "SharedExpert", "__version__", "mok_moe", "register"]

_HOME = {
    "MokConfig": "mok_megatron.config",
    "SharedExpert": "mok_megatron.ops",
    "mok_moe": "mok_megatron.ops",
    "register": "mok_megatron.megatron.register",
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("mok-megatron")
    if name not in _HOME:
        raise AttributeError(f"module 'mok_megatron' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOME[name]), name)
