"""Makes `--moe-token-dispatcher-type mok` known to an unmodified Megatron Core.

Every name of Megatron that is changed stands in `PATCHES`, with the reason. Each change does nothing unless the
dispatcher type is `mok`.
"""

from __future__ import annotations

import functools
import typing
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from mok_megatron.config import add_flags
from mok_megatron.megatron import autoload

DISPATCHER = "mok"
"""The value of `--moe-token-dispatcher-type` that selects this package."""


@dataclass(frozen=True)
class Patch:
    """One change to Megatron."""

    module: str
    name: str
    reason: str
    apply: Callable[[ModuleType], None]


def register() -> None:
    """Make Megatron Core accept `moe_token_dispatcher_type="mok"`. Idempotent.

    An installed package does this by itself through torch's autoload; call it where that is off
    (TORCH_DEVICE_BACKEND_AUTOLOAD=0) or where the package is only on the path.
    """
    autoload.autoload()


def patch_module(module: Any) -> None:
    """Apply the patches of one imported Megatron module, once."""
    for patch in PATCHES:
        if patch.module == module.__name__ and not _is_applied(module, patch):
            patch.apply(module)
            module.__dict__.setdefault("_mok_megatron_patches", set()).add(patch.name)


def _is_applied(module: ModuleType, patch: Patch) -> bool:
    return patch.name in module.__dict__.get("_mok_megatron_patches", ())


def _add_dispatcher_choice(module: ModuleType) -> None:
    # Subclasses of the dataclass share the Field object, so they see the choice too.
    entry = module.TransformerConfig.__dataclass_fields__["moe_token_dispatcher_type"]
    choices = typing.get_args(entry.type)
    entry.type = typing.Literal[(*choices, DISPATCHER)]  # type: ignore[valid-type]
    module.TransformerConfig.__annotations__["moe_token_dispatcher_type"] = entry.type


def _check_config_first(module: ModuleType) -> None:
    original = module.TransformerConfig.__post_init__

    @functools.wraps(original)
    def __post_init__(self: Any) -> None:
        if self.moe_token_dispatcher_type == DISPATCHER:
            from mok_megatron.megatron.validate import prepare_config

            prepare_config(self)
        original(self)

    module.TransformerConfig.__post_init__ = __post_init__


def _build_mok_layer(module: ModuleType) -> None:
    base = module.MoELayer

    def __new__(cls: type, config: Any = None, *args: Any, **kwargs: Any) -> Any:
        if cls is base and getattr(config, "moe_token_dispatcher_type", None) == DISPATCHER:
            from mok_megatron.megatron.layer import MokMoELayer

            cls = MokMoELayer
        return object.__new__(cls)

    base.__new__ = staticmethod(__new__)


def _add_mok_flags(module: Any) -> None:
    original = module.add_megatron_arguments

    @functools.wraps(original)
    def add_megatron_arguments(parser: Any) -> Any:
        return add_flags(original(parser))

    module.add_megatron_arguments = add_megatron_arguments


PATCHES = (
    Patch(
        "megatron.core.transformer.transformer_config",
        "TransformerConfig.moe_token_dispatcher_type",
        "Megatron makes the choices of --moe-token-dispatcher-type from this field's type.",
        _add_dispatcher_choice,
    ),
    Patch(
        "megatron.core.transformer.transformer_config",
        "TransformerConfig.__post_init__",
        "Refuses what cannot work in one message, before Megatron's own checks, which do not know `mok`.",
        _check_config_first,
    ),
    Patch(
        "megatron.core.transformer.moe.moe_layer",
        "MoELayer.__new__",
        "All of Megatron's layer specs name MoELayer; which class is built must depend on the configuration.",
        _build_mok_layer,
    ),
    Patch(
        "megatron.training.arguments",
        "add_megatron_arguments",
        "Adds the --mok-* flags.",
        _add_mok_flags,
    ),
)
"""Checked against Megatron Core 0.19.2; `mok_megatron.versions.MEGATRON_CORE` is the supported range."""
