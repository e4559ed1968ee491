"""The routed experts' weights as the kernels read them in FP8 with block scales."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from mok_megatron.formats import CACHE, quantize_128x128

_KEY = "megakernel: 128x128, powers of two, both ways round"


class ScaledWeight(NamedTuple):
    """A weight [E_local, R, C] in E4M3, one scale for 128x128 values, and its transpose: FP8 tensor cores read both
    operands along the dimension that they sum over."""

    values: Tensor
    """[E_local, R, C] float8_e4m3fn."""
    scales: Tensor
    """[E_local, R / 128, C / 128] fp32, powers of two."""
    values_t: Tensor
    """[E_local, C, R]."""
    scales_t: Tensor
    """[E_local, C / 128, R / 128]."""


def scaled_weights(w1: Tensor, w2: Tensor) -> list[Tensor]:
    """Both weights' tensors in the order of the C struct `MokScaledWeights`; made anew where a weight has changed.

    Args:
        w1, w2: [E_local, 2I, H] and [E_local, H, I] bf16: the parameters themselves, see `formats.CACHE`.
    """
    first, second = (CACHE.get(w, _KEY, _scaled) for w in (w1, w2))
    return [*first[:2], *second[:2], *first[2:], *second[2:]]


def _scaled(weight: Tensor) -> ScaledWeight:
    experts, rows, columns = weight.shape
    values = weight.new_empty(experts, rows, columns, dtype=torch.float8_e4m3fn)
    scales = weight.new_empty(experts, rows // 128, columns // 128, dtype=torch.float32)
    for expert in range(experts):  # one at a time: quantising takes several copies in fp32
        block = quantize_128x128(weight[expert])
        values[expert], scales[expert] = block.values, block.scales
    return ScaledWeight(values, scales, values.mT.contiguous(), scales.mT.contiguous())
