"""All settings of mok_megatron in one dataclass, and their `--mok-*` flags."""

from __future__ import annotations

import argparse
import dataclasses
import os
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from mok_megatron.errors import MokConfigError, Problems

BACKENDS = ("auto", "megakernel", "reference")
FORMATS = ("bf16", "mxfp8", "blockwise")
PRODUCT_TYPES = ("bf16", "fp8")
GRADIENT_TYPES = ("e4m3", "e5m2")
SCALE_KINDS = ("power_of_two", "fp32")

TILE_ROWS = 128
"""Rows of one tile of the expert products. Segments of the schedule are padded to it, and every sum over
rows runs tile by tile: it is part of the numerics, so it is a constant and not a setting."""

TIMEOUT_ENV = "MOK_TIMEOUT_S"
MAX_TIMEOUT_S = 1_000_000
"""Eleven days; in nanoseconds it fits the kernel's 64 bits."""
INT32_MAX = 2**31 - 1
_TYPE_NAMES = {int: "give a whole number", float: "give a number", str: "give text"}


def _setting(default: Any, help_text: str, **flag: Any) -> Any:
    return field(default=default, metadata={"help": help_text, "flag": flag})


def _chosen_by_megatron(default: Any, help_text: str) -> Any:
    """A setting that follows from Megatron's own flags, and has none of its own beside them."""
    return field(default=default, metadata={"help": help_text, "flag": None})


@dataclass(frozen=True)
class MokConfig:
    """Settings of the fused MoE layer.

    `format` and the `fp8_*` settings say what is computed (docs/formats.md). None of the others changes a result, not
    even its last bit; they trade time against memory.

    Raises:
        MokConfigError: at construction, listing every value that cannot work.
    """

    backend: str = _setting(
        "auto",
        "Who computes the layer: 'megakernel' (one persistent kernel a direction), 'reference' (plain torch, "
        "any device), or 'auto': the megakernel on GPUs, the reference on a machine without one.",
        choices=BACKENDS,
    )
    format: str = _chosen_by_megatron(
        "bf16", "What the expert products multiply: bf16, or FP8 with scales ('mxfp8', 'blockwise'): --fp8-recipe."
    )
    fp8_gradients: str = _chosen_by_megatron(
        "e4m3", "The FP8 type of gradients: 'e4m3', or 'e5m2' for --fp8-format hybrid."
    )
    fp8_scales: str = _chosen_by_megatron(
        "power_of_two",
        "Block scales: 'power_of_two', or 'fp32' where Transformer Engine's NVTE_FP8_BLOCK_SCALING_FP32_SCALES is 1.",
    )
    fp8_wgrad: str = _setting(
        "bf16",
        "With an FP8 format, what the products of the weight gradients multiply: 'bf16', or 'fp8' from column-wise "
        "copies.",
        choices=PRODUCT_TYPES,
    )
    fp8_shared: str = _setting(
        "bf16",
        "With an FP8 format, what the shared expert's products multiply where it is part of the operator: 'bf16' or "
        "'fp8'.",
        choices=PRODUCT_TYPES,
    )
    minibatch_size: int = _setting(
        1024,
        f"Routed rows a minibatch: the granularity at which communication and computation overlap. "
        f"A multiple of {TILE_ROWS}.",
        type=int,
    )
    macrobatch_size: int | None = _setting(
        None,
        "Routed rows of activations that a layer keeps for its backward, a multiple of --mok-minibatch-size. "
        "Rows beyond it are dispatched and multiplied again in the backward, so memory is bounded whatever the "
        "imbalance. Default: 1.25 times the rows of a balanced routing.",
        type=int,
    )
    fwd_comm_sms: int = _setting(
        0,
        "SMs that only move tokens during the forward; 0: idle warps of the other SMs move them, which is faster "
        "on Hopper.",
        type=int,
    )
    bwd_comm_sms: int = _setting(
        0,
        "SMs that only move tokens during the backward; 0: idle warps of the other SMs move them, which is faster "
        "on Hopper.",
        type=int,
    )
    num_sms: int | None = _setting(
        None, "SMs that the kernel may take, communication included. Default: all of the device.", type=int
    )
    reserved_sms: int | None = _setting(
        None,
        "SMs that the kernel leaves to others which run at the same time, where --mok-num-sms is not given. "
        "Default: 8 where Megatron overlaps gradient reduction or parameter gathering of several replicas with "
        "computation, else 0.",
        type=int,
    )
    max_tokens: int | None = _setting(
        None,
        "Tokens a rank at most, in one call of the layer: the workspace is laid out for it. Default: the most that any "
        "rank of the group brings to the first call.",
        type=int,
    )
    capacity_rows: int | None = _setting(
        None,
        f"Routed rows, padding included, that a rank's schedule can hold; a multiple of {TILE_ROWS}. "
        "Default: what no routing can exceed; it costs 8 bytes a row.",
        type=int,
    )
    timeout_s: float = _setting(
        None,
        f"Seconds a wait on a peer may take before the step stops with an error. Default: {TIMEOUT_ENV}, else 120.",
        type=float,
    )

    def __post_init__(self) -> None:
        problems = Problems()
        if self.timeout_s is None:
            object.__setattr__(self, "timeout_s", _timeout_from_environment(problems))
        mistyped = _check_types(self, problems)
        settings: Any = self
        if mistyped:  # the others are checked all the same, beside defaults
            values = {entry.name: getattr(self, entry.name) for entry in dataclasses.fields(self)}
            settings = SimpleNamespace(**values | mistyped)
        _check_values(settings, problems)
        _check_format(settings, problems)
        problems.raise_if_any(MokConfigError, "MokConfig cannot work:")

    def macrobatch_rows(self, balanced_rows: int) -> int:
        """Rows of the ring buffers: the setting, or 1.25 x `balanced_rows` in whole minibatches, rounded up."""
        if self.macrobatch_size is not None:
            return self.macrobatch_size
        minibatches = -(-balanced_rows * 5 // (4 * self.minibatch_size))
        return max(1, minibatches) * self.minibatch_size


def flag_name(field_name: str) -> str:
    """The command-line flag of a MokConfig field."""
    return "--mok-" + field_name.replace("_", "-")


def add_flags(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the `--mok-*` flags to `parser`: one a field of MokConfig that Megatron has no flag for.

    Their dest is `mok_<field>`, None where not given.
    """
    group = parser.add_argument_group("mok", "Fused MoE layer (--moe-token-dispatcher-type mok)")
    for entry in dataclasses.fields(MokConfig):
        if entry.metadata["flag"] is None:
            continue
        group.add_argument(
            flag_name(entry.name),
            dest=f"mok_{entry.name}",
            default=None,
            help=entry.metadata["help"],
            **entry.metadata["flag"],
        )
    return parser


def config_from_args(args: argparse.Namespace) -> MokConfig:
    """MokConfig from parsed `--mok-*` flags; what was not given keeps its default.

    Raises:
        MokConfigError: listing every value that cannot work.
    """
    given = {entry.name: getattr(args, f"mok_{entry.name}", None) for entry in dataclasses.fields(MokConfig)}
    return MokConfig(**{name: value for name, value in given.items() if value is not None})


def _check_types(config: MokConfig, problems: Problems) -> dict[str, Any]:
    """The fields whose value is of a type, or of a size, that no check can compare, with their defaults."""
    mistyped = {}
    for entry in dataclasses.fields(config):
        value, kind = getattr(config, entry.name), (entry.metadata["flag"] or {}).get("type", str)
        name = flag_name(entry.name) if entry.metadata["flag"] else entry.name
        if value is None and entry.default is None:
            continue
        if isinstance(value, bool) or not isinstance(value, (int, float) if kind is float else kind):
            problems.add(f"{name} is {value!r}, a {type(value).__name__}", _TYPE_NAMES[kind])
        elif isinstance(value, int) and abs(value) > INT32_MAX:
            problems.add(f"{name} is beyond 32 bits", f"give at most {INT32_MAX}")
        else:
            continue
        mistyped[entry.name] = 1.0 if kind is float else entry.default
    return mistyped


def _check_values(settings: Any, problems: Problems) -> None:
    problems.require(
        settings.backend in BACKENDS,
        f"--mok-backend {settings.backend!r} is unknown",
        f"choose one of {', '.join(BACKENDS)}",
    )
    _require_multiple(problems, "--mok-minibatch-size", settings.minibatch_size, TILE_ROWS)
    if settings.macrobatch_size is not None:
        unit = settings.minibatch_size if _is_multiple(settings.minibatch_size, TILE_ROWS) else TILE_ROWS
        _require_multiple(problems, "--mok-macrobatch-size", settings.macrobatch_size, unit)
    if settings.capacity_rows is not None:
        _require_multiple(problems, "--mok-capacity-rows", settings.capacity_rows, TILE_ROWS)
    if settings.max_tokens is not None:
        problems.require(settings.max_tokens >= 1, f"--mok-max-tokens is {settings.max_tokens}", "give at least 1")
    for name in ("fwd_comm_sms", "bwd_comm_sms"):
        value = getattr(settings, name)
        problems.require(value >= 0, f"{flag_name(name)} is {value}", "give 0 or more")
    if settings.num_sms is not None:
        most = max(settings.fwd_comm_sms, settings.bwd_comm_sms)
        problems.require(
            settings.num_sms > most,
            f"--mok-num-sms {settings.num_sms} leaves no SM for the products beside {most} that communicate",
            f"give at least {most + 1}, or fewer communication SMs",
        )
    problems.require(
        (settings.reserved_sms or 0) >= 0, f"--mok-reserved-sms is {settings.reserved_sms}", "give 0 or more"
    )
    # Neither NaN nor infinity: no wait is unbounded.
    problems.require(
        0 < settings.timeout_s <= MAX_TIMEOUT_S,
        f"--mok-timeout-s ({TIMEOUT_ENV}) is {settings.timeout_s}",
        f"give a positive, finite number of seconds, at most {MAX_TIMEOUT_S}",
    )


def _check_format(settings: Any, problems: Problems) -> None:
    for name, value, known in (
        ("format", settings.format, FORMATS),
        ("fp8_gradients", settings.fp8_gradients, GRADIENT_TYPES),
        ("fp8_scales", settings.fp8_scales, SCALE_KINDS),
        ("--mok-fp8-wgrad", settings.fp8_wgrad, PRODUCT_TYPES),
        ("--mok-fp8-shared", settings.fp8_shared, PRODUCT_TYPES),
    ):
        problems.require(value in known, f"{name} {value!r} is unknown", f"choose one of {', '.join(known)}")
    problems.require(
        (settings.format, settings.fp8_scales, settings.fp8_wgrad) != ("blockwise", "fp32", "fp8"),
        "--mok-fp8-wgrad fp8 with fp32 block scales (NVTE_FP8_BLOCK_SCALING_FP32_SCALES=1) would round x and dy "
        "to FP8 twice",
        "pass --mok-fp8-wgrad bf16, or keep scales at powers of two, with which the second rounding is exact",
    )


def _timeout_from_environment(problems: Problems) -> float:
    text = os.environ.get(TIMEOUT_ENV, "120")
    try:
        return float(text)
    except ValueError:
        problems.add(f"{TIMEOUT_ENV}={text!r} is not a number", "set it to seconds, such as 120")
        return 120.0


def _is_multiple(value: int, unit: int) -> bool:
    return value > 0 and value % unit == 0


def _require_multiple(problems: Problems, flag: str, value: int, unit: int) -> None:
    problems.require(
        _is_multiple(value, unit),
        f"{flag} {value} is not a positive multiple of {unit}",
        f"the nearest that works is {max(1, (2 * value + unit) // (2 * unit)) * unit}",
    )
