"""The routed experts' weights as the kernels read them in FP8: block scales, and MXFP8 as bf16 numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from mok_megatron.formats import CACHE, quantize_128x128, quantize_mxfp8

_KEY = "megakernel: 128x128, powers of two, both ways round"
_MX_KEY = "megakernel: MXFP8 as bf16, row-wise and column-wise"


def weights_in_format(form: str, w1: Tensor, w2: Tensor) -> Sequence[Tensor]:
    """What the kernels read beside, or instead of, w1 [E_local, 2I, H] and w2 [E_local, H, I] bf16, the parameters
    themselves (see `formats.CACHE`), in the format `form`; made anew where a weight has changed."""
    if form == "blockwise":
        return scaled_weights(w1, w2)
    return mx_weights(w1, w2) if form == "mxfp8" else ()


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


class MxWeights(NamedTuple):
    """The bf16 numbers that MXFP8 has of both weights, exactly; the fields are those of `MokScaledWeights`."""

    w1: Tensor
    """[E_local, 2I, H], blocks of 32 along H, for the forward."""
    w2: Tensor
    """[E_local, H, I], blocks along I, for the forward."""
    w1_t: Tensor
    """[E_local, 2I, H], blocks along 2I, for the gradients of the inputs."""
    w2_t: Tensor
    """[E_local, H, I], blocks along H, likewise."""


def mx_weights(w1: Tensor, w2: Tensor) -> MxWeights:
    """Both weights, each row-wise and column-wise from the parameter. 4 bytes a weight."""
    first, second = (CACHE.get(w, _MX_KEY, _mx_values) for w in (w1, w2))
    return MxWeights(first[0], second[0], first[1], second[1])


def _mx_values(weight: Tensor) -> tuple[Tensor, Tensor]:
    rowwise, columnwise = weight.new_empty(weight.shape), weight.new_empty(weight.shape)
    for expert in range(len(weight)):  # one at a time: quantising takes several copies in fp32
        rowwise[expert] = quantize_mxfp8(weight[expert], axis=-1).dequantize(weight.dtype)
        columnwise[expert] = quantize_mxfp8(weight[expert], axis=-2).dequantize(weight.dtype)
    return rowwise, columnwise


def _scaled(weight: Tensor) -> ScaledWeight:
    experts, rows, columns = weight.shape
    values = weight.new_empty(experts, rows, columns, dtype=torch.float8_e4m3fn)
    scales = weight.new_empty(experts, rows // 128, columns // 128, dtype=torch.float32)
    for expert in range(experts):  # one at a time: quantising takes several copies in fp32
        block = quantize_128x128(weight[expert])
        values[expert], scales[expert] = block.values, block.scales
    return ScaledWeight(values, scales, values.mT.contiguous(), scales.mT.contiguous())
