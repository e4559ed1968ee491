"""Runs at the end of every `import torch` (entry point group `torch.backends`).

It only arranges for `register.py` to be imported when Megatron's modules are: a program without Megatron pays for the
import of this file and of `wrapt`, and nothing else changes.
"""

from __future__ import annotations

import importlib

# The modules of Megatron that have something to patch; register.py says what and why.
PATCHED_MODULES = (
    "megatron.core.transformer.transformer_config",
    "megatron.core.transformer.moe.moe_layer",
    "megatron.training.arguments",
    "megatron.training.training",
)

_hooked = False


def autoload() -> None:
    """Patch each of `PATCHED_MODULES` as soon as it is imported, at once if it has been. Idempotent."""
    global _hooked
    if _hooked:
        return
    import wrapt

    for name in PATCHED_MODULES:
        wrapt.register_post_import_hook(_patch, name)
    _hooked = True


def _patch(module: object) -> None:
    # Imported late: register.py and what it needs are of no use before Megatron is there.
    register = importlib.import_module("mok_megatron.megatron.register")
    register.patch_module(module)
