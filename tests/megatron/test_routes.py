"""Routes from the router's dense map, against the plainest way to say it."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from mok_megatron.megatron.dispatcher import routes_from_map


def naive(routing_map: Tensor, probs: Tensor, topk: int) -> tuple[list[list[int]], list[list[float]]]:
    ids, weights = [], []
    for chosen, row in zip(routing_map.tolist(), probs.tolist(), strict=True):
        experts = [expert for expert, is_chosen in enumerate(chosen) if is_chosen]
        best = sorted(sorted(experts, key=lambda expert: -row[expert])[:topk])
        ids.append(best + [-1] * (topk - len(best)))
        weights.append([row[expert] for expert in best] + [0.0] * (topk - len(best)))
    return ids, weights


@st.composite
def routings(draw: st.DrawFn) -> tuple[Tensor, Tensor, int]:
    """A map with at most K experts a token, possibly none, and distinct probabilities."""
    tokens, experts = draw(st.integers(0, 6)), draw(st.integers(1, 9))
    topk = draw(st.integers(1, experts))
    picked = [draw(st.sets(st.integers(0, experts - 1), max_size=topk)) for _ in range(tokens)]
    routing_map = torch.zeros(tokens, experts, dtype=torch.bool)
    for token, chosen in enumerate(picked):
        routing_map[token, sorted(chosen)] = True
    order = draw(st.permutations(range(1, experts + 1)))
    probs = torch.tensor(order, dtype=torch.float32).repeat(tokens, 1) / (experts + 1)
    return routing_map, probs * routing_map, topk


@given(routings())
def test_against_naive(routing: tuple[Tensor, Tensor, int]) -> None:
    routing_map, probs, topk = routing
    probs.requires_grad_()
    ids, weights = routes_from_map(routing_map, probs, topk)
    assert ids.dtype == torch.int32 and weights.dtype == torch.float32
    assert (ids.tolist(), weights.tolist()) == naive(routing_map, probs.detach(), topk)
    # Each route's gradient reaches its own probability, and nothing else.
    weights.backward(torch.ones_like(weights))
    assert torch.equal(probs.grad, routing_map.float())


@given(routings(), st.data())
def test_padding_to_capacity_keeps_the_real_routes(routing: tuple[Tensor, Tensor, int], data: st.DataObject) -> None:
    """Megatron's padding adds experts of probability 0 beyond K; they may only fill places that are free."""
    routing_map, probs, topk = routing
    padded = routing_map.clone()
    for token in range(padded.shape[0]):
        for expert in data.draw(st.sets(st.integers(0, padded.shape[1] - 1))):
            padded[token, expert] = True
    ids, weights = routes_from_map(padded, probs, topk, pads=True)
    dense = torch.zeros_like(probs)
    for token, (experts, values) in enumerate(zip(ids.tolist(), weights.tolist(), strict=True)):
        real = [expert for expert in experts if expert >= 0]
        assert real == sorted(set(real))
        for expert, value in zip(experts, values, strict=True):
            if expert >= 0:
                dense[token, expert] = value
    assert torch.equal(dense, probs)


def test_three_operations_where_every_token_keeps_its_routes() -> None:
    """The same routes, and nothing that the host need not enqueue."""
    scores = torch.rand(9, 6, generator=torch.Generator().manual_seed(0))
    chosen = torch.zeros(9, 6, dtype=torch.bool).scatter(1, scores.topk(3, dim=1).indices, True)
    probs = (scores * chosen).requires_grad_()
    expected = routes_from_map(chosen, probs, 3)
    with Operations() as seen:
        found = routes_from_map(chosen, probs, 3, drops=False)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert seen.names == ["where", "topk", "gather"]


class Operations(TorchDispatchMode):
    """Names of the operations that torch dispatches."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def test_rounds_nothing_but_fp64() -> None:
    probs = torch.tensor([[0.1, 0.7, 0.2]])
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        _, weights = routes_from_map(probs > 0.15, probs.to(dtype), 2)
        assert weights.dtype == torch.float32
        assert torch.equal(weights, probs.to(dtype)[:, 1:].float())
