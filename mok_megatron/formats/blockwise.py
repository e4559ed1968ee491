"""Block scales: FP8 values with one fp32 scale for 1x128 values (activations, gradients) or 128x128 (weights).

The blocks are those of DeepSeek-V3 (technical report, section 3.3.2); the scale follows Transformer Engine's
`blockwise` recipe (`compute_scale_from_amax` in its `recipe_common.cuh`), step by step in fp32:

    multiplier = max / amax, rounded to nearest; if that is Inf, the largest finite number of the source's dtype
    power_of_two: clear the multiplier's mantissa, so that it becomes the power of two below
    values     = x * multiplier, rounded to fp32, then to FP8 to nearest even, saturated at +-max
    scale      = 1 / multiplier, rounded to nearest: what a value is multiplied by afterwards

with max the largest finite FP8 number, 448 or 57344. A block of zeros has multiplier and scale 1. A block with Inf or
NaN has scale NaN and NaN values, so that no overflow passes unseen; Transformer Engine takes the scale 1 there and
saturates Inf.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from mok_megatron.errors import MokInputError
from mok_megatron.formats.tensor import E4M3, Axis, BlockScaled, Element, source_blocks, to_fp8

BLOCKWISE_LENGTH = 128
"""Values that share a scale, along one dimension or both."""

FP32_WITHOUT_MANTISSA = -(1 << 23)
"""As a mask of int32: sign and exponent of an fp32 number."""

type ScaleKind = Literal["power_of_two", "fp32"]
"""power_of_two is the recipe's default; fp32 is what NVTE_FP8_BLOCK_SCALING_FP32_SCALES=1 chooses there."""


def quantize_1x128(
    x: Tensor, axis: Axis = -1, scale: ScaleKind = "power_of_two", element: Element = E4M3
) -> BlockScaled:
    """Quantise `x` [..., R, C] (bf16, fp16, fp32) in blocks of 128 along `axis` (-1 row-wise, -2 column-wise).

    Returns:
        scales are float32: [..., R, C / 128] row-wise, [..., R / 128, C] column-wise.

    Raises:
        MokInputError: see `source_blocks`; also an `axis` or `scale` that is not listed here.
    """
    if axis == "both":
        raise MokInputError("axis is 'both'; pass -1 for row-wise or -2 for column-wise, or call quantize_128x128")
    return _quantize(x, axis, scale, element)


def quantize_128x128(x: Tensor, scale: ScaleKind = "power_of_two", element: Element = E4M3) -> BlockScaled:
    """Quantise `x` [..., R, C] (bf16, fp16, fp32) in square blocks: `transposed()` is the quantised transpose.

    Returns:
        scales are float32 [..., R / 128, C / 128].

    Raises:
        MokInputError: see `source_blocks`; also a `scale` that is not listed here.
    """
    return _quantize(x, "both", scale, element)


def _quantize(x: Tensor, axis: Axis, scale: ScaleKind, element: Element) -> BlockScaled:
    if scale not in ("power_of_two", "fp32"):
        raise MokInputError(f"scale is {scale!r}; pass 'power_of_two' or 'fp32'")
    blocks, amax = source_blocks(x, axis, BLOCKWISE_LENGTH)
    multiplier = _finite_multiplier(amax, x.dtype, scale, element).masked_fill(~amax.isfinite(), torch.nan)
    scales = torch.div(torch.ones_like(multiplier), multiplier)
    scales = scales.masked_fill(scales.isnan(), torch.nan)  # one NaN: devices differ in its bits
    return BlockScaled(to_fp8(blocks, multiplier, element), scales, axis, BLOCKWISE_LENGTH)


def _finite_multiplier(amax: Tensor, source_dtype: torch.dtype, scale: ScaleKind, element: Element) -> Tensor:
    """What the values of a block are multiplied by before they are rounded; fp32, for finite `amax` fp32."""
    multiplier = torch.div(torch.full_like(amax, element.max), amax)
    multiplier = multiplier.masked_fill(multiplier.isinf(), torch.finfo(source_dtype).max)
    if scale == "power_of_two":
        multiplier = (multiplier.view(torch.int32) & FP32_WITHOUT_MANTISSA).view(torch.float32)
    return multiplier.masked_fill(amax == 0, 1.0)
