"""Subnormal, large and overflowing values: what float64 gives, rounded to bf16, on both backends."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from mok_megatron.selftest.problem import Problem, relative_error
from tests.numerics.layer import exact, make_layer
from tests.numerics.test_nonfinite import BACKENDS, on_all_backends

LIMIT, SUBNORMAL_LIMIT = 0.01, 0.1
"""||found - float64|| / ||float64||. bf16 keeps 8 bits: about 0.003 for a chain of three roundings. Of a subnormal
number it keeps fewer, about 5 in the problems here; where a subnormal counts as zero, the error is 1."""
SMALLEST_NORMAL = torch.finfo(torch.bfloat16).tiny


def _scaled(**powers: int) -> Callable[[], Problem]:
    """`make_layer()` with operands multiplied by powers of two, and without a shared expert."""

    def make() -> Problem:
        layer = replace(make_layer(), shared=None, scale=None)
        scaled = {name: getattr(layer, name).double() * 2.0**power for name, power in powers.items()}
        return replace(layer, **{name: value.to(getattr(layer, name).dtype) for name, value in scaled.items()})

    return make


def _subnormal_tokens() -> Problem:
    # Small multiples of bf16's smallest number, 2^-133: all subnormal, and none of them rounded.
    layer = _scaled(w1=125, dy=6)()
    x = torch.randint(-7, 8, layer.x.shape, generator=torch.Generator().manual_seed(1)) * 2.0**-133
    return replace(layer, x=x.bfloat16())


def _one_sided_gates() -> Problem:
    """Gates up to 2^11 of either sign: the sigmoid is 0 or 1 to the last bit, and exp(-gate) overflows."""
    layer = _scaled()()
    w1 = layer.w1.clone()
    w1[:, : w1.shape[1] // 2] *= 2.0**10
    return replace(layer, w1=w1)


# A problem, and which of its operands and results are at the edge of the format that its name says.
PROBLEMS: dict[str, tuple[Callable[[], Problem], tuple[str, ...]]] = {
    "subnormal tokens": (_subnormal_tokens, ("x", "dw1")),
    "subnormal output": (_scaled(w2=-60, weights=-66, dy=20), ("y",)),
    "subnormal gradients of tokens": (_scaled(x=60, w1=-60, dy=-68), ("dx",)),
    "subnormal gradients of weights": (_scaled(x=-60, w1=60, dy=-71), ("dw1",)),
    "subnormal dY": (_scaled(w2=60, dy=-129), ("dy", "dw2")),
    "large tokens": (_scaled(x=120, w1=-118, dy=-2), ("x", "dw1")),
    "large weights": (_scaled(x=-118, w1=122, dy=-4), ("w1", "dx")),
    "large output": (_scaled(w2=120, dy=-110), ("w2", "y")),
    "large gradients": (_scaled(dy=118), ("dy", "dx", "dw1", "dw2")),
    "gates of either sign, far out": (_one_sided_gates, ()),
}


@on_all_backends
@pytest.mark.parametrize("name", PROBLEMS)
def test_values_at_the_edges_are_those_of_float64(name: str, backend: str) -> None:
    make, edges = PROBLEMS[name]
    problem = make()
    right = exact(problem)
    for edge in edges:
        size = (right[edge] if edge in right else getattr(problem, edge)).abs().double()
        if "subnormal" in name:
            assert (size[size > 0] < SMALLEST_NORMAL).float().mean() > 0.5, edge
        else:
            assert size.max() > 2.0**115, edge
    found = BACKENDS[backend](problem)
    errors = {k: relative_error(found[k], v) for k, v in right.items()}
    limits = {k: SUBNORMAL_LIMIT if k in edges and "subnormal" in name else LIMIT for k in right}
    assert all(error < limits[k] for k, error in errors.items()), errors


@on_all_backends
def test_what_does_not_fit_becomes_infinite_and_no_more(backend: str) -> None:
    """Outputs around bf16's largest number: those above it are infinite, those below are right."""
    problem = _scaled(w2=128, dy=-127)()
    right = exact(problem)
    found = BACKENDS[backend](problem)
    largest = torch.finfo(torch.bfloat16).max
    largest = torch.finfo(torch.bfloat16).max
    over, under = right["y"].abs() > 2 * largest, right["y"].abs() < largest / 4
    assert over.any() and not found["y"][over].isfinite().any()
    # Of two routes, one can overflow although the sum of both does not: only tokens with one route are so simple.
    one = ((problem.ids >= 0).sum(1) == 1)[:, None] & under
    rows = right["y"] / problem.weights.double().sum(1, keepdim=True)
    one &= rows.abs() < largest / 4
    assert one.any() and relative_error(found["y"][one], right["y"][one]) < LIMIT
    for name in ("dx", "dweights", "dw1", "dw2"):
        assert relative_error(found[name], right[name]) < LIMIT, name
