"""The megakernel over random sizes, routings and settings: the right numbers, and the same bits however it is cut."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mok_megatron.selftest.problem import (
    Problem,
    Result,
    VirtualRanks,
    kernel_config,
    make_problem,
    plain,
    reference,
    relative_error,
)
from tests.properties.cases import FACTOR

pytestmark = pytest.mark.gpu

CASES = 60 * FACTOR
"""Not among those of test_count.py, which CI runs."""
LIMITS = {"bf16": 0.02, "blockwise": 0.03, "mxfp8": 0.03}
"""||found - right|| / ||right||, of bf16 against float64, of FP8 against the reference backend in FP8. Problems are
small, so one value that is carried across a rounding counts."""
BY_ROW = ("y", "dx", "dweights", "dscale", "dw1", "dw2")
"""Have the same bits at every EP; the shared expert's gradients are a sum over ranks."""


@dataclass(frozen=True)
class Case:
    """A layer, in numbers, and how it is cut."""

    sizes: tuple[int, int, int, int, int]
    """T, H, I, E, K."""
    shared: int
    scale: bool
    routing: str
    seed: int
    format: str
    ranks: int
    cuts: tuple[float, ...]
    """Where ranks begin, as parts of T."""
    minibatch: int
    ring: int | None
    """In minibatches; None: nothing is evicted."""
    comm: tuple[int, int]
    main_grad: bool

    def problem(self) -> Problem:
        tokens, hidden, inner, experts, topk = self.sizes
        made = make_problem(tokens, hidden, inner, experts, 1, self.shared, self.scale and self.shared > 0, self.seed)
        g = torch.Generator("cuda").manual_seed(self.seed)

        def numbers(low: int, high: int) -> torch.Tensor:
            return torch.randint(low, high, (tokens, topk), generator=g, device="cuda", dtype=torch.int32)

        ids = numbers(-1, experts)  # a token may have an expert twice
        if self.routing == "one expert":
            ids = torch.full_like(ids, self.seed % experts)
        elif self.routing == "few":
            ids = torch.where(numbers(0, 20) == 0, ids, -1)
        return replace(made, ids=ids, weights=torch.rand(tokens, topk, generator=g, device="cuda") + 0.1)

    def run(self, problem: Problem) -> Result:
        """As the case says, after another problem's NaN in all buffers."""
        ring = None if self.ring is None else self.ring * self.minibatch
        fwd, bwd = self.comm
        config = kernel_config(
            minibatch_size=self.minibatch, macrobatch_size=ring, format=self.format, fwd_comm_sms=fwd, bwd_comm_sms=bwd
        )
        edges = [0, *sorted(int(cut * len(problem.x)) for cut in self.cuts[: self.ranks - 1]), len(problem.x)]
        splits = [after - before for before, after in itertools.pairwise(edges)]
        run = VirtualRanks(problem, self.ranks, config, splits)
        run.poison(problem)
        return run.run(problem, torch.float32 if self.main_grad else None)

    def alone(self, problem: Problem) -> Result:
        """On one rank with default settings."""
        run = VirtualRanks(problem, 1, kernel_config(format=self.format))
        return run.run(problem, torch.float32 if self.main_grad else None)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    format = draw(st.sampled_from(["bf16", "bf16", "blockwise", "mxfp8"]))
    unit, ranks = 128 if format == "blockwise" else 64, draw(st.sampled_from([1, 2, 2, 3, 4]))

    def multiple(most: int, of: int = unit) -> int:
        return of * draw(st.integers(1, most // of))

    return Case(
        sizes=(
            draw(st.one_of(st.integers(0, 3), st.integers(0, 700))),
            multiple(768),
            multiple(512),
            ranks * draw(st.integers(1, 5)),
            draw(st.sampled_from([1, 2, 3, 8])),
        ),
        shared=draw(st.sampled_from([0, 0, 64, 192])),
        scale=draw(st.booleans()),
        routing=draw(st.sampled_from(["any", "any", "one expert", "few"])),
        seed=draw(st.integers(0, 2**31)),
        format=format,
        ranks=ranks,
        cuts=tuple(draw(st.lists(st.floats(0, 1), min_size=3, max_size=3))),
        minibatch=draw(st.sampled_from([128, 256, 512])),
        ring=draw(st.sampled_from([None, 1, 2, 3])),
        comm=draw(st.tuples(st.sampled_from([0, 1, 3]), st.sampled_from([0, 1, 3]))),
        main_grad=draw(st.booleans()),
    )


def right(case: Case, problem: Problem) -> Result:
    """Routes that are left out have no weight."""
    if case.format == "bf16":
        return plain(replace(problem, weights=problem.weights.masked_fill(problem.ids < 0, 0)), torch.float64)
    return reference(problem, kernel_config(format=case.format))


def assert_close(found: Result, case: Case, problem: Problem) -> None:
    for name, value in right(case, problem).items():
        ones = case.main_grad and name.startswith(("dw1", "dw2", "dshared"))
        got: Any = found[name].double() - 1 if ones else found[name].double()
        error, size = (got - value.double()).norm().item(), value.double().norm().item()
        if name in ("dweights", "dscale"):  # single products of two rows, which may cancel
            size = max(size, 0.3 * problem.dy.double().norm().item())
        # Into main_grad, in fp32, something is added to ones.
        assert error <= LIMITS[case.format] * size + 1e-6 * got.numel() ** 0.5, (name, error, size)


@settings(max_examples=CASES)
@given(cases())
def test_right_numbers_and_the_same_bits_however_it_is_cut(case: Case) -> None:
    problem = case.problem()
    alone = case.alone(problem)
    assert_close(alone, case, problem)
    found = case.run(problem)
    for name, value in found.items():
        if name in BY_ROW or case.ranks == 1:
            assert torch.equal(value, alone[name]), (name, relative_error(value, alone[name]))
        else:
            assert not value.isnan().any(), name
