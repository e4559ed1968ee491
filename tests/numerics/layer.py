"""One layer for both backends, with values put into it that are not finite, and what must come of them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mok_megatron import MokConfig, SharedExpert, mok_moe
from mok_megatron.selftest.problem import DEVICE, Problem, Result, VirtualRanks, kernel_config, plain

NAN, INF = float("nan"), float("inf")

TOKENS, HIDDEN, INNER, SHARED, EXPERTS, TOPK = 250, 320, 192, 64, 6, 2
LONELY, EMPTY = 4, 5
"""An expert with a single row, so that the rest of its tile is padding, and one without rows."""
TOKEN, DROPPED = 17, 30
"""A token with two routes, and one whose first route was dropped."""
BUSY = 1
"""An expert with many rows; TOKEN is one of them."""


def make_layer(seed: int = 0, hidden: int = HIDDEN, inner: int = INNER) -> Problem:
    """Random bf16 operands on the CPU: [T 250, H 320, I 192, Is 64, E 6, K 2], a gated shared expert."""
    g = torch.Generator().manual_seed(seed)

    def normal(*shape: int, std: float = 1.0) -> Tensor:
        return (torch.randn(shape, generator=g) * std).bfloat16()

    ids = torch.rand(TOKENS, LONELY, generator=g).argsort(1)[:, :TOPK].int()
    ids[TOKEN] = torch.tensor([BUSY, 2])
    ids[LONELY_TOKEN] = torch.tensor([LONELY, 0])
    ids[DROPPED, 0] = -1
    return Problem(
        x=normal(TOKENS, hidden),
        ids=ids,
        weights=torch.rand(TOKENS, TOPK, generator=g) + 0.1,
        w1=normal(EXPERTS, 2 * inner, hidden, std=hidden**-0.5),
        w2=normal(EXPERTS, hidden, inner, std=inner**-0.5),
        dy=normal(TOKENS, hidden),
        shared=(normal(2 * SHARED, hidden, std=hidden**-0.5), normal(hidden, SHARED, std=SHARED**-0.5)),
        scale=torch.rand(TOKENS, generator=g) + 0.1,
    )


LONELY_TOKEN = 40

Fault = Callable[[Problem, float], None]


def _at(name: str, *index: int | slice) -> Fault:
    def put(problem: Problem, value: float) -> None:
        getattr(problem, name)[index] = value

    return put


def _shared_at(number: int, *index: int) -> Fault:
    def put(problem: Problem, value: float) -> None:
        problem.shared[number][index] = value

    return put


def _all_of(expert: int) -> Fault:
    def put(problem: Problem, value: float) -> None:
        problem.w1[expert], problem.w2[expert] = value, value

    return put


FAULTS: dict[str, Fault] = {
    "one element of a token": _at("x", TOKEN, 5),
    "the token of an expert with one row": _at("x", LONELY_TOKEN, 5),
    "all tokens of one rank": _at("x", slice(TOKENS // 2, None)),
    "a gate weight": _at("w1", BUSY, 7, 3),
    "an up weight": _at("w1", BUSY, -7, 3),
    "a gate weight beside padding": _at("w1", LONELY, 7, 3),
    "an up weight beside padding": _at("w1", LONELY, -7, 3),
    "a down weight": _at("w2", BUSY, 9, 11),
    "a down weight beside padding": _at("w2", LONELY, 9, 11),
    "one whole expert": _all_of(BUSY),
    "an expert without rows": _all_of(EMPTY),
    "one element of dY": _at("dy", TOKEN, 9),
    "dY beside padding": _at("dy", LONELY_TOKEN, 9),
    "a router weight": _at("weights", TOKEN, 1),
    "the weight of a dropped route": _at("weights", DROPPED, 0),
    "a gate weight of the shared expert": _shared_at(0, 3, 4),
    "a down weight of the shared expert": _shared_at(1, 5, 6),
    "an up weight of the shared expert": _shared_at(0, -3, 4),
    "a shared expert's gate": _at("scale", TOKEN),
}
NOWHERE = ("an expert without rows", "the weight of a dropped route")
"""Faults in what nothing is computed from."""


def with_fault(name: str, value: float, layer: Problem | None = None) -> Problem:
    """`layer`, or `make_layer()`, with `value` where the fault `name` puts it."""
    problem = copy(layer or make_layer())
    FAULTS[name](problem, value)
    return problem


def one_token(problem: Problem) -> Problem:
    """Only LONELY_TOKEN of the problem: every tile is padding but for one row."""
    part = slice(LONELY_TOKEN, LONELY_TOKEN + 1)
    cut = {name: getattr(problem, name)[part] for name in ("x", "ids", "weights", "dy", "scale")}
    return replace(problem, **cut)


def copy(problem: Problem, device: torch.device | str = "cpu") -> Problem:
    """The problem in memory of its own on `device`."""
    moved = {f.name: getattr(problem, f.name) for f in fields(problem)}
    tensors = {n: v.to(device, copy=True) for n, v in moved.items() if isinstance(v, Tensor)}
    shared = None if problem.shared is None else tuple(w.to(device, copy=True) for w in problem.shared)
    return replace(problem, **tensors, shared=shared)


def exact(problem: Problem) -> Result:
    """The layer in float64: every expert on its own rows and on nothing else; weights of dropped routes unread."""
    return plain(replace(problem, weights=problem.weights.masked_fill(problem.ids < 0, 0)), torch.float64)


def reference(problem: Problem, group: dist.ProcessGroup | None = None, **settings: Any) -> Result:
    """mok_moe on the reference backend; with a `group`, this rank's share of tokens and experts."""
    rank, ranks = (0, 1) if group is None else (group.rank(), group.size())
    x, ids, weights, dy = (t.tensor_split(ranks)[rank] for t in (problem.x, problem.ids, problem.weights, problem.dy))
    w1, w2 = (w.chunk(ranks)[rank] for w in (problem.w1, problem.w2))
    named = {"x": x, "weights": weights, "w1": w1, "w2": w2}
    if problem.shared is not None and problem.scale is not None:
        named |= dict(zip(("shared_w1", "shared_w2"), problem.shared, strict=True))
        named["scale"] = problem.scale.tensor_split(ranks)[rank]
    leaves = {name: t.clone().requires_grad_() for name, t in named.items()}
    shared = None
    if problem.shared is not None:
        shared = SharedExpert(leaves["shared_w1"], leaves["shared_w2"], leaves["scale"])
    config = MokConfig(backend="reference", minibatch_size=128, **settings)
    y = mok_moe(leaves["x"], ids, leaves["weights"], leaves["w1"], leaves["w2"], group, config, shared)
    grads = torch.autograd.grad(y, list(leaves.values()), dy)
    return {"y": y.detach(), **{"d" + name: grad for name, grad in zip(leaves, grads, strict=True)}}


@functools.cache
def _virtual_ranks(
    ranks: int, ring: int | None, shared: bool, tokens: int, hidden: int, inner: int, format: str
) -> VirtualRanks:
    layer = make_layer(hidden=hidden, inner=inner)
    layer = copy(layer if tokens > 1 else one_token(layer), DEVICE)
    evicting = {} if ring is None else {"minibatch_size": 128, "macrobatch_size": ring}
    config = kernel_config(format=format, **evicting)
    return VirtualRanks(layer if shared else replace(layer, shared=None, scale=None), ranks, config)


def megakernel(problem: Problem, ranks: int = 1, ring: int | None = None, format: str = "bf16") -> Result:
    """The kernel on virtual ranks of one GPU that stay the same from call to call, as a layer's do; on the CPU.

    `ring`: rows of a macrobatch; rows beyond it are dispatched again in the backward.
    """
    shared, (tokens, hidden), inner = problem.shared is not None, problem.x.shape, problem.w2.shape[2]
    run = _virtual_ranks(ranks, ring, shared, tokens, hidden, inner, format)
    found = run.run(copy(problem, DEVICE))
    return {name: value.cpu() for name, value in found.items()}


def fill_with_nan(ranks: int = 1, ring: int | None = None) -> None:
    """Leave NaN in every row of every buffer that outlives a launch, also where the next launch has padding."""
    bad = copy(make_layer())
    for tensor in (bad.x, bad.dy, bad.weights, bad.scale, *(bad.shared or ())):
        tensor.fill_(NAN)
    # All 500 rows to one expert, then to one of the other rank: the layer itself has five blocks of 128 rows, of
    # which four are more than half full.
    for expert in (0, EXPERTS - 1):
        bad.ids.fill_(expert)
        megakernel(bad, ranks, ring)


def assert_placed(found: Result, clean: Result, wanted: Result) -> None:
    """`found` is not finite exactly where `wanted` is not, and everywhere else it has the bits of `clean`."""
    assert found.keys() == clean.keys() == wanted.keys()
    wrong = {}
    for name, value in wanted.items():
        bad = ~value.isfinite()
        here = ~found[name].isfinite()
        if not torch.equal(here, bad):
            wrong[name] = f"{int((here & ~bad).sum())} too many, {int((bad & ~here).sum())} too few of {int(bad.sum())}"
        elif not torch.equal(found[name][~bad], clean[name][~bad]):
            wrong[name] = f"{int((found[name] != clean[name])[~bad].sum())} finite values changed"
    assert not wrong, wrong
