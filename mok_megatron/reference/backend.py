"""The reference backend: dispatch, products and combine one after another, forward and backward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mok_megatron.config import TILE_ROWS
from mok_megatron.ops.backend import Routing
from mok_megatron.ops.inputs import MoeGradients, MoeInputs, SharedExpert
from mok_megatron.ops.main_grad import store_gradient
from mok_megatron.ops.schedule import Schedule
from mok_megatron.reference.exchange import RowExchange, agree, gather_routes, schedules_of_all_ranks
from mok_megatron.reference.experts import expert_backward, gate_up_of, output_of, tiles
from mok_megatron.reference.products import Products, Rows, products_of, products_of_shared, wide


@dataclass(frozen=True)
class Activations:
    """What a macrobatch leaves behind for the backward."""

    x: Rows
    """[rows, H] dispatched tokens, as they travelled."""
    gate_up: Tensor
    """[rows, 2I] FC1's output, before the activation."""


@dataclass(frozen=True)
class Saved:
    """What the forward keeps: the routing, and the activations of the last macrobatch only."""

    schedules: list[Schedule]
    macrobatch_rows: int
    products: Products[Any]
    """With the weights as the forward had them."""
    last: Activations
    shared_products: Products[Any] | None
    shared_gate_up: Tensor | None


class ReferenceBackend:
    """The operator in plain torch; see the module's docstring."""

    name = "reference"

    def forward(self, call: MoeInputs) -> tuple[Tensor, Saved]:
        """y [T, H] and what the backward needs."""
        agreement = agree(call)
        schedules = schedules_of_all_ranks(call, gather_routes(call, agreement))
        mine = schedules[call.ep_rank]
        products = products_of(call)
        x = products.of_x(call.x)
        slots = call.x.new_zeros((call.topk_ids.numel(), call.x.shape[1]))
        last = Activations(call.x.new_empty(0, 0), call.x.new_empty(0, 0))
        for first, end in macrobatches(schedules, agreement.macrobatch_rows):
            exchange = RowExchange(call, schedules, first, end)
            last = _dispatch_and_fc1(call, products, x, mine, exchange, first, end)
            rows = call.x.new_zeros(exchange.rows, call.x.shape[1])
            for tile in tiles(mine, first, end):
                rows[tile.rows] = output_of(products, last.gate_up[tile.rows], tile.expert)
            exchange.to_sources(rows, slots)

        y = sum_over_k(slots, call.topk_weights.masked_fill(call.topk_ids < 0, 0))
        shared_products, shared_gate_up = None, None
        if call.shared is not None:
            shared_products = products_of_shared(call, call.shared)
            shared_y, shared_gate_up = _shared_forward(call.x, shared_products)
            y = y + wide(shared_y) * _scale(call.shared, call.x).unsqueeze(-1)
        return y.to(call.x.dtype), Saved(
            schedules, agreement.macrobatch_rows, products, last, shared_products, shared_gate_up
        )

    def routing(self, call: MoeInputs, saved: Saved) -> Routing:
        """What the forward found."""
        mine = saved.schedules[call.ep_rank]
        return Routing(mine.rows_per_expert, mine.expert_offsets[-1], saved.macrobatch_rows)

    def backward(self, call: MoeInputs, saved: Saved, dy: Tensor, into_main_grad: bool) -> MoeGradients:
        """Gradients for dy [T, H]; activations of all macrobatches but the last are computed again."""
        mine, products = saved.schedules[call.ep_rank], saved.products
        x, quantized_dy = products.of_x(call.x), products.of_dy(dy)
        dx_slots = call.x.new_zeros((call.topk_ids.numel(), call.x.shape[1]))
        dweight_slots = torch.zeros_like(call.topk_weights).reshape(-1)
        dw1, dw2 = torch.zeros_like(wide(call.w1)), torch.zeros_like(wide(call.w2))
        ranges = macrobatches(saved.schedules, saved.macrobatch_rows)
        for first, end in ranges:
            exchange = RowExchange(call, saved.schedules, first, end)
            is_kept = (first, end) == ranges[-1]
            kept = saved.last if is_kept else _dispatch_and_fc1(call, products, x, mine, exchange, first, end)
            dy_rows = exchange.rows_to_experts(quantized_dy)
            weights = exchange.to_experts(call.topk_weights.reshape(-1), per_route=True)
            dx_rows = dy.new_zeros(exchange.rows, dy.shape[1])
            dweight_rows = torch.zeros_like(weights)
            for tile in tiles(mine, first, end):
                r, e = tile.rows, tile.expert
                tile_grads = expert_backward(products, e, dy_rows[r], weights[r], kept.x[r], kept.gate_up[r])
                dx_rows[r], dweight_rows[r] = tile_grads.dx, tile_grads.dweight
                dw1[e] += tile_grads.dw1
                dw2[e] += tile_grads.dw2
            exchange.to_sources(dx_rows, dx_slots)
            exchange.to_sources(dweight_rows, dweight_slots)

        dx = sum_over_k(dx_slots, torch.ones_like(call.topk_weights))
        grads = MoeGradients(
            x=dx,
            topk_weights=dweight_slots.view_as(call.topk_weights),
            w1=store_gradient(call.w1, dw1, into_main_grad),
            w2=store_gradient(call.w2, dw2, into_main_grad),
        )
        if call.shared is not None:
            _shared_backward(call.x, call.shared, saved, dy, grads, into_main_grad)
        grads.x = grads.x.to(call.x.dtype)
        return grads


def macrobatches(schedules: list[Schedule], rows: int) -> list[tuple[int, int]]:
    """Ranges of padded rows [first, end), as many as the busiest rank needs; all ranks walk them together."""
    most = max(int(s.expert_offsets[-1]) for s in schedules)
    return [(first, first + rows) for first in range(0, most, rows)]


def sum_over_k(slots: Tensor, factors: Tensor) -> Tensor:
    """sum over k of factors[t, k] * slots[t * K + k], in the accumulation dtype, in the order of k: [T, H]."""
    tokens, topk = factors.shape
    by_k = slots.unflatten(0, (tokens, topk))
    total = torch.zeros(tokens, by_k.shape[2], dtype=wide(slots).dtype, device=slots.device)
    for k in range(topk):
        total += factors[:, k, None] * wide(by_k[:, k])
    return total


def _dispatch_and_fc1(
    call: MoeInputs, products: Products[Any], x: Rows, schedule: Schedule, exchange: RowExchange, first: int, end: int
) -> Activations:
    rows = exchange.rows_to_experts(x)
    gate_up = call.x.new_zeros(exchange.rows, call.w1.shape[1])
    for tile in tiles(schedule, first, end):
        gate_up[tile.rows] = gate_up_of(products, rows[tile.rows], tile.expert, call.x.dtype)
    return Activations(rows, gate_up)


def _scale(shared: SharedExpert, x: Tensor) -> Tensor:
    return wide(x).new_ones(x.shape[0]) if shared.scale is None else shared.scale


def _whole_tiles(rows: Tensor) -> tuple[Tensor, ...]:
    # Zero rows fill up the last tile. A token's place in a tile depends on EP here, unlike a routed row's, so a last
    # tile of fewer rows would round differently.
    padded = rows.new_zeros(-(-rows.shape[0] // TILE_ROWS) * TILE_ROWS, *rows.shape[1:])
    padded[: rows.shape[0]] = rows
    return padded.split(TILE_ROWS)


def _shared_forward(x: Tensor, products: Products[Any]) -> tuple[Tensor, Tensor]:
    """The shared expert's output [T, H], before its scale, and its gate and up [T in whole tiles, 2Is]."""
    gate_up = [gate_up_of(products, products.of_x(tile), 0, x.dtype) for tile in _whole_tiles(x)]
    y = [output_of(products, tile, 0) for tile in gate_up]
    return torch.cat(y)[: x.shape[0]], torch.cat(gate_up)


def _shared_backward(
    x: Tensor, shared: SharedExpert, saved: Saved, dy: Tensor, grads: MoeGradients, into_main_grad: bool
) -> None:
    """Adds the shared expert's share to `grads.x` and fills in its own gradients."""
    products, gate_up, scale = saved.shared_products, saved.shared_gate_up, _scale(shared, x)
    assert products is not None and gate_up is not None
    dx, dscale = [], []
    dw1, dw2 = torch.zeros_like(wide(shared.w1)), torch.zeros_like(wide(shared.w2))
    by_tile = (_whole_tiles(dy), _whole_tiles(scale), _whole_tiles(x), gate_up.split(TILE_ROWS))
    for i, (tile_dy, tile_scale, tile_x, tile_gate_up) in enumerate(zip(*by_tile, strict=True)):
        operands = products.of_dy(tile_dy), tile_scale, products.of_x(tile_x), tile_gate_up
        tile_grads = expert_backward(products, 0, *operands, rows=min(TILE_ROWS, x.shape[0] - i * TILE_ROWS))
        dx.append(tile_grads.dx)
        dscale.append(tile_grads.dweight)
        dw1 += tile_grads.dw1
        dw2 += tile_grads.dw2
    grads.x += wide(torch.cat(dx)[: x.shape[0]])
    grads.shared_w1 = store_gradient(shared.w1, dw1, into_main_grad)
    grads.shared_w2 = store_gradient(shared.w2, dw2, into_main_grad)
    grads.shared_scale = None if shared.scale is None else torch.cat(dscale)[: x.shape[0]]
