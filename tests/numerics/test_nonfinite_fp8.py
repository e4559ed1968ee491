"""NaN and infinity with FP8 operands: they spread over the block of a scale, and not to another token or expert."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from mok_megatron.selftest.problem import Problem, Result
from tests.numerics.layer import FAULTS, INF, NAN, exact, make_layer, megakernel, reference, with_fault

FORMATS = ("blockwise", "mxfp8")
KERNELS: dict[str, dict[str, Any]] = {
    "megakernel": {},
    "megakernel-two-ranks": {"ranks": 2},
    "megakernel-evicting": {"ranks": 2, "ring": 128},
}
BACKENDS = {f"reference-{form}": functools.partial(reference, format=form) for form in FORMATS}
ON_GPU = {
    f"{name}-{form}": functools.partial(megakernel, format=form, **how)
    for form in FORMATS
    for name, how in KERNELS.items()
}
ROUTED = [fault for fault in FAULTS if "shared" not in fault]
"""The shared expert computes in bf16 here too, and has its own operands."""


@functools.cache
def layer() -> Problem:
    """H and I are multiples of 128."""
    return make_layer(hidden=384, inner=256)


@functools.cache
def clean(backend: str) -> Result:
    return (BACKENDS | ON_GPU)[backend](layer())


@functools.cache
def wanted(fault: str, value: float) -> Result:
    return exact(with_fault(fault, value, layer()))


@pytest.mark.parametrize("backend", [*BACKENDS, *(pytest.param(name, marks=pytest.mark.gpu) for name in ON_GPU)])
@pytest.mark.parametrize("value", [NAN, INF], ids=str)
@pytest.mark.parametrize("fault", ROUTED)
def test_a_value_that_is_not_finite_stays_with_its_token_or_expert(fault: str, value: float, backend: str) -> None:
    """By token (rows of y, dx and of router weights' gradients) and by expert: those of float64, and the others keep
    their bits."""
    found = (BACKENDS | ON_GPU)[backend](with_fault(fault, value, layer()))
    for name, right in wanted(fault, value).items():
        whole = "shared" in name  # one gradient from all tokens
        here, bad, same = (
            t.reshape(1 if whole else len(t), -1)
            for t in (~found[name].isfinite(), ~right.isfinite(), found[name] == clean(backend)[name])
        )
        assert torch.equal(here.any(1), bad.any(1)), name
        assert same[~bad.any(1)].all(), name
