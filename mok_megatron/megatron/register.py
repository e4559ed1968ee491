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
        parser = add_flags(original(parser))
        parser.add_argument_group("mok logging").add_argument(
            "--log-mok",
            action="store_true",
            help="At each log interval, write rows a rank, imbalance, evicted rows and kernel times of every fused MoE "
            "layer to TensorBoard and W&B, and their sums to the log; under mok_megatron.pretrain, to the log also the "
            "time of whole MoE layers, whatever the dispatcher.",
        )
        return parser

    module.add_megatron_arguments = add_megatron_arguments


def _log_layers(module: Any) -> None:
    original = module.training_log

    @functools.wraps(original)
    def training_log(
        loss_dict: Any, total_loss_dict: Any, learning_rate: Any, iteration: int, *args: Any, **kw: Any
    ) -> Any:
        result = original(loss_dict, total_loss_dict, learning_rate, iteration, *args, **kw)
        settings = module.get_args()
        if settings.moe_token_dispatcher_type == DISPATCHER:
            from mok_megatron.megakernel import check_errors

            check_errors()
            if settings.log_mok and (iteration % settings.log_interval == 0 or kw.get("is_first_iteration", False)):
                from mok_megatron.megatron import metrics

                line = metrics.report(settings, iteration, module.get_tensorboard_writer(), module.get_wandb_writer())
                if line is not None:
                    module.print_rank_last(line)
        return result

    module.training_log = training_log


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
        "Adds the --mok-* flags and --log-mok.",
        _add_mok_flags,
    ),
    Patch(
        "megatron.training.training",
        "training_log",
        "Raises what a replayed CUDA graph's kernels recorded, and writes what --log-mok asks for.",
        _log_layers,
    ),
)
"""Checked against Megatron Core 0.19.2; `mok_megatron.versions.MEGATRON_CORE` is the supported range."""
