"""Measures points on the real kernel, within a budget. Every rank runs it, and all take the same decisions."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor
from tqdm import tqdm

from mok_megatron.bench import measure
from mok_megatron.bench.layers import MokLayer
from mok_megatron.bench.problem import Problem
from mok_megatron.config import MokConfig
from mok_megatron.tune.points import MACROBATCHES, Point, default_point, settings
from mok_megatron.tuned import Milliseconds

ITERATIONS = 10
WARMUP = 3
ROUNDS = 3
"""The default and the best are measured in turns this many times at the end."""
SEARCH_SHARE = 0.8
"""Of the budget; the rest is for those turns."""
NOISE = 0.005
"""A gain below this share of the default's time is none."""


@dataclass(frozen=True)
class Reading:
    """What one point took; `same`: all results equal those of the default to the bit."""

    times: Milliseconds
    same: bool


@dataclass
class Found:
    """The outcome of a search."""

    readings: dict[Point, Reading] = field(default_factory=dict)
    left_out: list[Point] = field(default_factory=list)
    """Promising, and the budget was over."""
    config: MokConfig = field(default_factory=MokConfig)
    """The settings to keep: the best point's, or the default's."""
    default: Milliseconds = Milliseconds(0.0, 0.0)
    tuned: Milliseconds = Milliseconds(0.0, 0.0)

    @property
    def different(self) -> list[Point]:
        """Points whose results differ from the default's: a fault of the kernel."""
        return [point for point, reading in self.readings.items() if not reading.same]


class Bench:
    """One layer that is called with one setting after another.

    Args:
        problem: tensors of this rank.
        group: the expert-parallel group; None for one rank.
        iterations: measured calls a reading.
        started: `time.monotonic()` at which the budget began.
        budget_s: seconds.
    """

    def __init__(
        self, problem: Problem, group: dist.ProcessGroup | None, iterations: int, started: float, budget_s: float
    ) -> None:
        self.problem, self.group, self.iterations = problem, group, iterations
        self.started, self.budget_s = started, budget_s
        self.layer = MokLayer(problem, group, MokConfig())
        self.expected: dict[str, Tensor] | None = None

    def read(self, config: MokConfig) -> Reading:
        """Results against those of the first call of this method, and times."""
        self.layer.config = config
        try:
            results = measure.run_once(self.layer, self.problem)
            if self.expected is None:
                self.expected = {name: value.clone() for name, value in results.items()}
            same = self.agreed(all(same_bits(results[name], value) for name, value in self.expected.items()))
            return Reading(self._times(), same)
        finally:
            self._release()

    def _times(self) -> Milliseconds:
        times = measure.measure(self.layer, self.problem, self.group, self.iterations, WARMUP)
        return Milliseconds(times.forward, times.backward)

    def in_turns(self, first: MokConfig, second: MokConfig) -> tuple[Milliseconds, Milliseconds]:
        """Medians over ROUNDS readings of each, taken in turns: the clocks of a GPU drift."""
        rounds: tuple[list[Milliseconds], list[Milliseconds]] = ([], [])
        for _ in range(ROUNDS):
            for config, times in zip((first, second), rounds, strict=True):
                self.layer.config = config
                times.append(self._times())
        self._release()
        return _median(rounds[0]), _median(rounds[1])

    def over(self, share: float) -> bool:
        """Whether `share` of the budget is spent on any rank."""
        return not self.agreed(time.monotonic() - self.started < share * self.budget_s)

    def agreed(self, mine: bool) -> bool:
        """Whether it holds on every rank."""
        if self.group is None:
            return mine
        flag = torch.tensor([int(mine)], device=self.problem.x.device)
        dist.all_reduce(flag, op=dist.ReduceOp.MIN, group=self.group)
        return bool(flag.item())

    def _release(self) -> None:
        # The ranks have met after their last launch: `measure` ends with an exchange of the times.
        if self.problem.x.is_cuda:
            from mok_megatron.megakernel.workspace import release_workspaces

            release_workspaces()
            torch.cuda.empty_cache()


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equality of the bytes: NaN equals itself, 0 and -0 differ."""
    return a.dtype == b.dtype and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def search(bench: Bench, points: Sequence[Point], base: MokConfig, progress: bool) -> Found:
    """Reads `points`, the default first, until the budget ends; then macrobatches around the best; then compares.

    Args:
        points: from `promising`.
        progress: draw a progress bar on stderr, if that is a terminal.
    """
    found = Found(config=base)
    queue = list(points)
    assert queue[0] == default_point(base)
    bar = tqdm(total=len(queue) + len(MACROBATCHES), unit="point", disable=None if progress else True)
    with bar:
        for point in queue:
            if found.readings and bench.over(SEARCH_SHARE):
                found.left_out.append(point)
                continue
            _read(bench, found, point, base, bar)
        forward, backward, best = best_of(found.readings, default_point(base))
        for factor in MACROBATCHES:
            point = Point(best.comm_sms, best.minibatch, _macrobatch(bench.problem, best, factor, base))
            if bench.over(SEARCH_SHARE):
                found.left_out.append(point)
                continue
            _read(bench, found, point, base, bar)
    macrobatch = _best_macrobatch(found.readings, best)
    chosen = settings(base, forward, backward, best.minibatch, macrobatch)
    found.default = found.tuned = found.readings[queue[0]].times
    if chosen != base:
        found.default, found.tuned = bench.in_turns(base, chosen)
        if _total(found.tuned) < (1 - NOISE) * _total(found.default):
            found.config = chosen
        else:
            found.tuned = found.default
    return found


def _read(bench: Bench, found: Found, point: Point, base: MokConfig, bar: tqdm) -> None:
    reading = bench.read(point.config(base))
    found.readings[point] = reading
    bar.set_postfix_str(f"{_total(reading.times):.3f} ms", refresh=False)
    bar.update()


def best_of(readings: dict[Point, Reading], default: Point) -> tuple[int, int, Point]:
    """Communication SMs of forward and backward, and the point with the best minibatch (and the forward's SMs).

    Only points with the default's macrobatch and bits count. The default stays unless another is faster by more than
    NOISE.
    """
    good = {p: r.times for p, r in readings.items() if r.same and p.macrobatch == default.macrobatch}
    best = (default.comm_sms, default.comm_sms, default)
    shortest = (1 - NOISE) * _total(good[default])
    for size in sorted({point.minibatch for point in good}):
        row = {point.comm_sms: times for point, times in good.items() if point.minibatch == size}
        forward = min(row, key=lambda sms: row[sms].forward)
        backward = min(row, key=lambda sms: row[sms].backward)
        total = row[forward].forward + row[backward].backward
        if total < shortest:
            shortest, best = total, (forward, backward, Point(forward, size, default.macrobatch))
    return best


def _macrobatch(problem: Problem, best: Point, factor: float, base: MokConfig) -> int:
    """`factor` x the default's rows, in whole minibatches."""
    rows = best.config(base).macrobatch_rows(problem.shape.tokens * problem.shape.topk)
    return max(1, round(factor * rows / best.minibatch)) * best.minibatch


def _best_macrobatch(readings: dict[Point, Reading], best: Point) -> int | None:
    own = readings[best].times
    others = {
        point.macrobatch: reading.times
        for point, reading in readings.items()
        if point.macrobatch != best.macrobatch
        and reading.same
        and (point.comm_sms, point.minibatch) == (best.comm_sms, best.minibatch)
    }
    shortest = min(others, key=lambda rows: _total(others[rows]), default=None)
    if shortest is not None and _total(others[shortest]) < (1 - NOISE) * _total(own):
        return shortest
    return best.macrobatch


def _total(times: Milliseconds) -> float:
    return times.forward + times.backward


def _median(rounds: list[Milliseconds]) -> Milliseconds:
    middle: Callable[[str], float] = lambda name: statistics.median(getattr(times, name) for times in rounds)  # noqa: E731
    return Milliseconds(middle("forward"), middle("backward"))
