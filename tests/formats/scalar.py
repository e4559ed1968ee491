"""Both formats again, one number at a time and from their definitions: what the package is compared with.

Python floats (fp64) hold every fp32 number, every E4M3 value times a scale and every midpoint of two, so what is
written here without numpy is exact.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

E4M3 = [
    (1 + code % 8 / 8) * 2.0 ** (code // 8 - 7) if code >= 8 else code / 8 * 2.0**-6  # normal; subnormal
    for code in range(127)
]
"""The finite, non-negative values by code; 127 is NaN."""

E8M0 = [2.0 ** (byte - 127) for byte in range(255)]
"""The scales by byte; 255 is NaN."""


def e4m3_code(x: float) -> int:
    """The code nearest to `x`, ties to the even code, saturated."""
    magnitude = min(abs(x), 448.0)
    above = bisect_left(E4M3, magnitude)
    below = above if E4M3[above] == magnitude else above - 1
    middle = (E4M3[below] + E4M3[above]) / 2
    nearest = below if magnitude < middle or (magnitude == middle and below % 2 == 0) else above
    return nearest + (128 if math.copysign(1.0, x) < 0 else 0)


def mxfp8_scale_byte(amax: float, rounding: str) -> int:
    """up: the first scale with amax <= 448 * scale. floor: the last one with 256 * scale <= amax, or the first."""
    if rounding == "up":
        return bisect_left(E8M0, amax, key=lambda scale: 448 * scale)
    return max(bisect_right(E8M0, amax, key=lambda scale: 256 * scale) - 1, 0)


def mxfp8_block(block: list[float], rounding: str) -> tuple[int, list[int]]:
    """Scale byte and codes."""
    if not all(map(math.isfinite, block)):
        return 255, [127] * len(block)
    byte = mxfp8_scale_byte(max(map(abs, block)), rounding)
    return byte, [e4m3_code(x / E8M0[byte]) for x in block]


def blockwise_block(block: list[float], source_max: float, kind: str) -> tuple[np.float32, list[int]]:
    """Scale and codes; `source_max` is the largest finite number of the source's dtype."""
    if not all(map(math.isfinite, block)):
        return np.float32("nan"), [127] * len(block)
    amax = np.float32(max(map(abs, block)))
    if amax == 0:
        multiplier = np.float32(1)
    else:
        with np.errstate(over="ignore"):
            multiplier = np.float32(448) / amax
        if np.isinf(multiplier):
            multiplier = np.float32(source_max)
        if kind == "power_of_two":
            multiplier = np.float32(2.0 ** (math.frexp(float(multiplier))[1] - 1))
    return np.float32(1) / multiplier, [e4m3_code(float(np.float32(x) * multiplier)) for x in block]


def codes(values: Tensor) -> Tensor:
    """The bytes of E4M3 values or E8M0 scales."""
    return values.contiguous().view(torch.uint8)


@st.composite
def matrices(draw: st.DrawFn, rows: int, columns: int, dtypes: tuple[torch.dtype, ...] | None = None) -> Tensor:
    """[rows, columns] finite numbers of all magnitudes: random bits with exponents of a drawn range, and insertions."""
    dtype = draw(st.sampled_from(dtypes or (torch.bfloat16, torch.float16, torch.float32)))
    first, last = (100, 143) if dtype == torch.float16 else (0, 254)
    low = draw(st.integers(first, last))
    high = min(low + draw(st.sampled_from((0, 3, 12, 254))), last)
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    bits = random.integers(0, 1 << 23, (rows, columns), dtype=np.int64)
    bits |= random.integers(low, high + 1, bits.shape) << 23 | random.integers(0, 2, bits.shape) << 31
    x = torch.from_numpy(bits.astype(np.uint32).view(np.float32))
    finite = st.floats(width=32, allow_nan=False, allow_infinity=False)
    for _ in range(draw(st.integers(0, 3))):
        x[draw(st.integers(0, rows - 1)), draw(st.integers(0, columns - 1))] = draw(finite)
    limit = torch.finfo(dtype).max
    return x.clamp(-limit, limit).to(dtype)
