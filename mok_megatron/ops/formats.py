"""Which backend can compute in which format, and on which GPU: one table."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mok_megatron.config import GRADIENT_TYPES, PRODUCT_TYPES, SCALE_KINDS, MokConfig
from mok_megatron.errors import Problems


@dataclass(frozen=True)
class Support:
    """What a backend can do within one format; the defaults are everything that the settings know."""

    gradients: tuple[str, ...] = GRADIENT_TYPES
    scales: tuple[str, ...] = SCALE_KINDS
    wgrad: tuple[str, ...] = PRODUCT_TYPES
    shared: tuple[str, ...] = PRODUCT_TYPES


EVERY_DEVICE = None

SUPPORT: dict[str, dict[tuple[int, int] | None, dict[str, Support]]] = {
    "reference": {EVERY_DEVICE: {"bf16": Support(), "mxfp8": Support(), "blockwise": Support()}},
    "megakernel": {
        (9, 0): {
            "bf16": Support(),
            "mxfp8": Support(wgrad=("bf16",), shared=("bf16",)),
            "blockwise": Support(gradients=("e4m3",), scales=("power_of_two",), wgrad=("bf16",), shared=("bf16",)),
        },
        (10, 0): {"bf16": Support()},
        (10, 3): {"bf16": Support()},
    },
}
"""Backend -> compute capability -> format -> what of it."""


def check_format(config: MokConfig, backend: str, device: torch.device, problems: Problems) -> None:
    """Notes what stops `backend` from computing in the format of `config` on `device`."""
    of_backend = SUPPORT[backend]
    capability = EVERY_DEVICE if EVERY_DEVICE in of_backend else torch.cuda.get_device_capability(device)
    formats = of_backend.get(capability, {})
    support = formats.get(config.format)
    where = f"the {backend}" if capability is None else f"the {backend} on compute capability {_dotted(capability)}"
    if support is None:
        problems.add(
            f"{where} does not compute in {config.format}",
            f"it has {', '.join(formats) or 'no format'}: change --fp8-format and --fp8-recipe, or pass "
            "--mok-backend reference, much slower",
        )
        return
    if config.format == "bf16":
        return
    for value, known, what, remedy in (
        (config.fp8_gradients, support.gradients, "gradients", "pass --fp8-format e4m3"),
        (config.fp8_scales, support.scales, "scales", "unset NVTE_FP8_BLOCK_SCALING_FP32_SCALES"),
        (config.fp8_wgrad, support.wgrad, "weight gradients", f"pass --mok-fp8-wgrad {support.wgrad[0]}"),
        (config.fp8_shared, support.shared, "shared expert", f"pass --mok-fp8-shared {support.shared[0]}"),
    ):
        problems.require(value in known, f"{where} has no {value} {what} in {config.format}", remedy)


def _dotted(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))
