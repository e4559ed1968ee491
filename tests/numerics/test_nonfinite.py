"""NaN and infinity appear where mathematics puts them, and touch no other token, expert or rank, and no padding."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.distributed as dist

from mok_megatron.reference import backend as reference_backend
from mok_megatron.reference.exchange import RowExchange
from mok_megatron.selftest.problem import Result
from tests.numerics.layer import (
    BUSY,
    FAULTS,
    INF,
    NAN,
    NOWHERE,
    TOKEN,
    assert_placed,
    exact,
    fill_with_nan,
    make_layer,
    megakernel,
    one_token,
    reference,
    with_fault,
)
from tests.ranks import run_on_ranks

# How the kernel is run: arguments of `megakernel`.
KERNELS = {
    "megakernel": {},
    "megakernel-two-ranks": {"ranks": 2},
    "megakernel-evicting": {"ranks": 2, "ring": 128},
}
BACKENDS = {"reference": reference} | {name: functools.partial(megakernel, **how) for name, how in KERNELS.items()}
on_all_backends = pytest.mark.parametrize(
    "backend", ["reference", *(pytest.param(name, marks=pytest.mark.gpu) for name in KERNELS)]
)


@functools.cache
def clean(backend: str) -> Result:
    return BACKENDS[backend](make_layer())


@functools.cache
def wanted(fault: str, value: float) -> Result:
    return exact(with_fault(fault, value))


@on_all_backends
@pytest.mark.parametrize("value", [NAN, INF], ids=str)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_value_that_is_not_finite_stays_where_it_belongs(fault: str, value: float, backend: str) -> None:
    problem = with_fault(fault, value)
    assert_placed(BACKENDS[backend](problem), clean(backend), wanted(fault, value))


@pytest.mark.parametrize("fault", FAULTS)
def test_what_is_expected_is_neither_nothing_nor_everything(fault: str) -> None:
    """The oracle itself: else the tests here could pass with a layer that spreads everything, or nothing."""
    places = {name: ~value.isfinite() for name, value in wanted(fault, NAN).items()}
    assert any(bad.any() for bad in places.values()) != (fault in NOWHERE)
    if "shared" not in fault:
        assert not places["y"].all() and not places["dw1"].all() and not places["dx"].all()
    if fault == "one element of a token":
        assert places["y"].any(1).nonzero().tolist() == [[TOKEN]] == places["dx"].any(1).nonzero().tolist()
        assert places["dw1"].flatten(1).any(1).tolist() == [expert in (BUSY, 2) for expert in range(6)]


# Where a row is alone with its infinity, nothing adds infinities of both signs up.
DEFINITE = (
    "an up weight beside padding",
    "a down weight beside padding",
    "an up weight of the shared expert",
    "a down weight of the shared expert",
)


@on_all_backends
@pytest.mark.parametrize("fault", DEFINITE)
def test_infinity_stays_infinity_beside_padding(fault: str, backend: str) -> None:
    """A padding row is zero, and zero times infinity is NaN: it must not be part of any sum."""
    problem = one_token(with_fault(fault, INF))
    found, right = BACKENDS[backend](problem), exact(problem)
    weights = ("dshared_w1", "dshared_w2") if "shared" in fault else ("dw1", "dw2")
    for name in ("y", *weights):
        infinite = right[name].isinf()
        assert infinite.any() or (name.endswith("w2") and "down" in fault)
        assert torch.equal(found[name][infinite], right[name][infinite].to(found[name].dtype)), name


@on_all_backends
def test_padding_rows_never_leak(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = clean(backend)
    if backend == "reference":
        original, filled = RowExchange.to_experts, []

        def with_nan_in_padding(self: RowExchange, values: torch.Tensor, per_route: bool = False) -> torch.Tensor:
            rows = original(self, values, per_route)
            padding = torch.ones(rows.shape[0], dtype=torch.bool).index_fill(0, self._filled, False)
            rows[padding] = NAN
            filled.append(int(padding.sum()))
            return rows

        monkeypatch.setattr(RowExchange, "to_experts", with_nan_in_padding)
        monkeypatch.setattr(reference_backend.RowExchange, "to_experts", with_nan_in_padding)
        found = reference(make_layer())
        assert sum(filled) > 500
    else:
        fill_with_nan(**KERNELS[backend])
        found = BACKENDS[backend](make_layer())
    for name, value in before.items():
        assert torch.equal(found[name], value), name


def _faults_on_two_ranks(rank: int) -> dict[str, Result]:
    results = {fault: reference(with_fault(fault, NAN), dist.group.WORLD) for fault in FAULTS}
    return results | {"": reference(make_layer(), dist.group.WORLD)}


def test_no_fault_reaches_a_rank_or_an_expert_of_another() -> None:
    by_rank = run_on_ranks(2, _faults_on_two_ranks, timeout_s=60)

    def joined(fault: str) -> Result:
        # Each rank holds the shared expert; its gradient is the sum over ranks.
        parts = [results[fault] for results in by_rank]
        return {
            name: sum(p[name].float() for p in parts)
            if name.startswith("dshared")
            else torch.cat([p[name] for p in parts])
            for name in parts[0]
        }

    for fault in FAULTS:
        assert_placed(joined(fault), joined(""), wanted(fault, NAN))
