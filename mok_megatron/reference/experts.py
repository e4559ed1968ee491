"""The arithmetic of the experts, tile by tile, in the order and with the roundings that define the operator.

`products.py` multiplies; here a value is rounded to the storage dtype wherever the kernel stores it: gate
and up after FC1, hidden before FC2, each output row, and their counterparts in the backward.
A tile is at most `TILE_ROWS` consecutive rows of one expert; because an expert has the same tiles at every EP size
and macrobatch size, every product has the same shape and every sum over rows the same order. That matters to the
last bit: matrix libraries choose their order of summation by the shape.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mok_megatron.config import TILE_ROWS
from mok_megatron.ops.schedule import Schedule
from mok_megatron.reference.products import Products, Rows, wide


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


def gate_up_of(products: Products[Any], x: Rows, expert: int, dtype: torch.dtype) -> Tensor:
    """FC1: x [n, H] to [n, 2I] in the storage dtype, before the activation."""
    return products.gate_up(x, expert).to(dtype)


def swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate) * up of [n, 2I], in the accumulation dtype: [n, I]."""
    gate, up = wide(gate_up).chunk(2, dim=-1)
    return F.silu(gate) * up


def output_of(products: Products[Any], gate_up: Tensor, expert: int) -> Tensor:
    """SwiGLU and FC2: gate_up [n, 2I] to [n, H], in its dtype."""
    return products.down(swiglu(gate_up).to(gate_up.dtype), expert).to(gate_up.dtype)


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


def expert_backward(
    products: Products[Any],
    expert: int,
    dy: Rows,
    weight: Tensor,
    x: Rows,
    gate_up: Tensor,
    rows: int | None = None,
) -> RowGradients:
    """Gradients of `weight * down(swiglu(gate_up(x)))` for one tile.

    Args:
        products: hold the weights.
        expert: local number.
        dy: [n, H] gradient of the layer's output for each row's token, before the router weight.
        weight: [n] router weight of each row, in the accumulation dtype.
        x: [n, H] of the forward.
        gate_up: [n, 2I] of the forward, in the storage dtype.
        rows: the first `rows` of the tile are rows, the others padding; None: all are.
    """
    gate, up = wide(gate_up).chunk(2, dim=-1)
    sigmoid = torch.sigmoid(gate)
    silu = gate * sigmoid
    hidden = silu * up
    dhidden = products.dhidden(dy, expert)
    # <dy, down(hidden)> without the forward's output: sum over I of hidden * (dy @ w2).
    dweight = (hidden * dhidden).sum(dim=-1)
    dhidden = dhidden * weight.unsqueeze(-1)
    dgate = dhidden * up * (sigmoid + silu * (1 - sigmoid))
    dgate_up = torch.cat((dgate, dhidden * silu), dim=-1).to(gate_up.dtype)
    weighted_hidden = (hidden * weight.unsqueeze(-1)).to(gate_up.dtype)
    if rows is not None:
        # Padding is zero, but its products with infinite weights are NaN, which no sum over rows may meet.
        dgate_up[rows:] = 0
        weighted_hidden[rows:] = 0
    return RowGradients(
        dx=products.dx(dgate_up, expert).to(gate_up.dtype),
        dweight=dweight,
        dw1=products.dw1(dgate_up, x),
        dw2=products.dw2(dy, weighted_hidden),
    )
