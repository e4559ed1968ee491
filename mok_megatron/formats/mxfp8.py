"""MXFP8: FP8 values with one E8M0 scale for 32 consecutive values (OCP Microscaling Formats v1.0).

A scale is a byte b that stands for 2^(b - 127); 255 is NaN, and there is neither zero nor Inf (section 5.4.1). A
block whose scale is NaN is NaN throughout (section 5.1).

    block                  scale                               values
    finite                 from its largest magnitude, below   x / scale to nearest even, saturated
    all zero               byte 0 (2^-127)                     zeros that keep their sign
    below about 2^-118     byte 0, the smallest there is       multiples of 2^-136; what is smaller rounds to zero
    (E5M2: 2^-111)                                             (E5M2: 2^-143)
    Inf or NaN anywhere    byte 255 (NaN)                      NaN, so that no overflow passes unseen

Section 6.3 leaves the conversion of Inf and NaN open; the last line is our choice.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from mok_megatron.errors import MokInputError
from mok_megatron.formats.tensor import E4M3, Axis, BlockScaled, Element, source_blocks, to_fp8

MXFP8_LENGTH = 32
"""Values that share a scale, in every concrete format of the specification."""

NAN_SCALE = 255

type ScaleRounding = Literal["up", "floor"]


def quantize_mxfp8(
    x: Tensor, axis: Axis = -1, scale_rounding: ScaleRounding = "up", element: Element = E4M3
) -> BlockScaled:
    """Quantise `x` [..., R, C] (bf16, fp16, fp32) in blocks of 32 along `axis` (-1 row-wise, -2 column-wise).

    Args:
        scale_rounding: with amax the largest magnitude of a block,
            "up": 2^ceil(log2(amax / 448)), the smallest scale under which nothing saturates. Transformer Engine's
                rule and that of Blackwell's conversion instruction (`cvt.rp.satfinite.ue8m0x2.f32` of amax / 448).
            "floor": 2^(floor(log2(amax)) - 8), the rule that section 6.3 of the specification gives; values above
                448 of their scale saturate, an error of up to 1/8 of the value.
        element: the type of the values. For E5M2 read 57344 for 448 and 15 for 8 above.

    Returns:
        scales are float8_e8m0fnu: [..., R, C / 32] row-wise, [..., R / 32, C] column-wise.

    Raises:
        MokInputError: see `source_blocks`; also an `axis` or `scale_rounding` that is not listed here.
    """
    if scale_rounding not in ("up", "floor"):
        raise MokInputError(f"scale_rounding is {scale_rounding!r}; pass 'up' or 'floor'")
    if axis == "both":
        raise MokInputError("axis is 'both'; MXFP8 has no square blocks, pass -1 for row-wise or -2 for column-wise")
    blocks, amax = source_blocks(x, axis, MXFP8_LENGTH)
    scale_bytes = torch.where(amax.isfinite(), finite_scale_bytes(amax, scale_rounding, element), NAN_SCALE)
    values = to_fp8(blocks, reciprocal(scale_bytes), element)
    return BlockScaled(values, scale_bytes.to(torch.uint8).view(torch.float8_e8m0fnu), axis, MXFP8_LENGTH)


def finite_scale_bytes(amax: Tensor, scale_rounding: ScaleRounding, element: Element) -> Tensor:
    """The E8M0 bytes, as int32, for finite magnitudes `amax` fp32: exact, on the bits, without a logarithm.

    amax / max = (1.m / 1.75) * 2^(e - max_exponent), so rounding up adds one to the exponent if and only if 1.m > 1.75.
    """
    bits = amax.view(torch.int32)
    exponent, mantissa = bits >> 23, bits & 0x7FFFFF
    above = (mantissa > 0x600000).int() if scale_rounding == "up" else 0
    return (exponent - element.max_exponent + above).clamp(min=0)


def reciprocal(scale_bytes: Tensor) -> Tensor:
    """1 / scale in fp32, exact: 2^(127 - b), NaN for 255. `scale_bytes` is int32; 254 does not occur."""
    powers = ((254 - scale_bytes) << 23).view(torch.float32)
    return torch.where(scale_bytes == NAN_SCALE, torch.nan, powers)
