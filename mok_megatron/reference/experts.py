"""The arithmetic of the experts, tile by tile, in the order and with the roundings that define the operator.

Products accumulate in fp32 (fp64 for fp64 inputs) and a value is rounded to the storage dtype wherever the
kernel stores it: gate and up after FC1, hidden before FC2, each output row, and their counterparts in the backward.
A tile is at most `TILE_ROWS` consecutive rows of one expert; because an expert has the same tiles at every EP size
and macrobatch size, every product has the same shape and every sum over rows the same order. That matters to the
last bit: matrix libraries choose their order of summation by the shape.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from mok_megatron.config import TILE_ROWS
from mok_megatron.ops.schedule import Schedule


@dataclass(frozen=True)
class Tile:
    """Consecutive routed rows of one expert, without padding."""

    expert: int
    rows: slice
    """Rows of the macrobatch's buffers."""


def tiles(schedule: Schedule, first: int, end: int) -> Iterator[Tile]:
    """The tiles of a schedule's padded rows [first, end), in order, as slices relative to `first`."""
    starts = schedule.expert_offsets.tolist()
    counts = schedule.rows_per_expert.tolist()
    for expert, count in enumerate(counts):
        for begin in range(starts[expert], starts[expert] + count, TILE_ROWS):
            if first <= begin < end:
                tile_end = min(begin + TILE_ROWS, starts[expert] + count)
                yield Tile(expert, slice(begin - first, tile_end - first))


def wide(tensor: Tensor) -> Tensor:
    """`tensor` in the dtype that products accumulate in: fp32, or fp64 if it is fp64."""
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def gate_up_product(x: Tensor, w1: Tensor) -> Tensor:
    """FC1: x [n, H] and w1 [2I, H] to [n, 2I] in x's dtype, before the activation."""
    return (wide(x) @ wide(w1).t()).to(x.dtype)


def swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate) * up of [n, 2I], in the accumulation dtype: [n, I]."""
    gate, up = wide(gate_up).chunk(2, dim=-1)
    return F.silu(gate) * up


def down_product(hidden: Tensor, w2: Tensor) -> Tensor:
    """FC2: hidden [n, I] and w2 [H, I] to [n, H] in hidden's dtype."""
    return (wide(hidden) @ wide(w2).t()).to(hidden.dtype)


@dataclass(frozen=True)
class RowGradients:
    """The backward of one tile."""

    dx: Tensor
    """[n, H], in the storage dtype."""
    dweight: Tensor
    """[n], the gradient of the row's router weight, in the accumulation dtype."""
    dw1: Tensor
    """[2I, H], this tile's share of the weight gradient, in the accumulation dtype."""
    dw2: Tensor
    """[H, I], likewise."""


def expert_backward(dy: Tensor, weight: Tensor, x: Tensor, gate_up: Tensor, w1: Tensor, w2: Tensor) -> RowGradients:
    """Gradients of `weight * down(swiglu(gate_up(x)))` for one tile.

    Args:
        dy: [n, H] gradient of the layer's output for each row's token, before the router weight.
        weight: [n] router weight of each row, in the accumulation dtype.
        x, gate_up: [n, H] and [n, 2I] of the forward.
        w1, w2: [2I, H] and [H, I] of the expert.
    """
    gate, up = wide(gate_up).chunk(2, dim=-1)
    sigmoid = torch.sigmoid(gate)
    silu = gate * sigmoid
    hidden = silu * up
    dhidden = wide(dy) @ wide(w2)
    # <dy, down(hidden)> without the forward's output: sum over I of hidden * (dy @ w2).
    dweight = (hidden * dhidden).sum(dim=-1)
    dhidden = dhidden * weight.unsqueeze(-1)
    dgate = dhidden * up * (sigmoid + silu * (1 - sigmoid))
    dgate_up = torch.cat((dgate, dhidden * silu), dim=-1).to(x.dtype)
    weighted_hidden = (hidden * weight.unsqueeze(-1)).to(x.dtype)
    return RowGradients(
        dx=(wide(dgate_up) @ wide(w1)).to(x.dtype),
        dweight=dweight,
        dw1=wide(dgate_up).t() @ wide(x),
        dw2=wide(dy).t() @ wide(weighted_hidden),
    )
