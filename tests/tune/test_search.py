"""The search itself: on made-up times, and on the reference backend of two ranks."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import pytest
import torch

from mok_megatron.bench.problem import Shape, make_problem
from mok_megatron.config import MokConfig
from mok_megatron.configs import load_cluster
from mok_megatron.tune import points, search
from mok_megatron.tune.points import Expected, Point
from mok_megatron.tune.search import Bench, Found, Reading, best_of, same_bits
from mok_megatron.tuned import Milliseconds
from tests.ranks import run_on_ranks

BASE = MokConfig()
DEFAULT = points.default_point(BASE)
SHAPE = Shape(64, 64, 64, 4, 2)


class MadeUp(Bench):
    """A bench whose times are a function of the settings; `wrong` settings change a result."""

    def __init__(self, cost: Any, wrong: Any = lambda config: False, budget_s: float = 1e9) -> None:
        problem = make_problem(SHAPE, 0, 1, torch.device("cpu"), torch.float32)
        super().__init__(problem, None, 1, time.monotonic(), budget_s)
        self.cost, self.wrong = cost, wrong
        self.asked: list[MokConfig] = []

    def read(self, config: MokConfig) -> Reading:
        self.asked.append(config)
        return Reading(Milliseconds(*self.cost(config)), not self.wrong(config))

    def _times(self) -> Milliseconds:
        return Milliseconds(*self.cost(self.layer.config))


def run(bench: Bench, minibatches: tuple[int, ...] = (128,)) -> Found:
    queue = points.candidates(SHAPE, (4, 8), minibatches, BASE)
    return search.search(bench, points.promising(queue, {}, DEFAULT), BASE, progress=False)


def test_each_direction_gets_its_own_sms() -> None:
    def cost(config: MokConfig) -> tuple[float, float]:
        return 5.0 - (config.fwd_comm_sms == 8), 9.0 - (config.bwd_comm_sms == 4) - (config.minibatch_size == 128)

    found = run(MadeUp(cost))
    kept = found.config
    assert (kept.fwd_comm_sms, kept.bwd_comm_sms, kept.minibatch_size, kept.macrobatch_size) == (8, 4, 128, None)
    assert found.default == Milliseconds(5.0, 9.0) and found.tuned == Milliseconds(4.0, 7.0)


def test_a_gain_within_the_noise_is_none() -> None:
    found = run(MadeUp(lambda config: (5.0 - 0.01 * (config.fwd_comm_sms == 8), 9.0)))
    assert found.config == BASE and found.tuned == found.default


def test_a_gain_that_does_not_last_is_none() -> None:
    bench = MadeUp(lambda config: (5.0, 9.0))
    bench.cost = lambda config: (5.0 - (len(bench.asked) == 2), 9.0)  # one lucky reading
    assert run(bench).config == BASE


def test_a_point_that_changes_a_result_is_never_kept() -> None:
    found = run(MadeUp(lambda config: (5.0 - (config.fwd_comm_sms == 8), 9.0), lambda config: config.fwd_comm_sms == 8))
    assert found.config == BASE
    assert {point.comm_sms for point in found.different} == {8}


def test_a_macrobatch_is_kept_if_it_is_faster() -> None:
    bench = MadeUp(lambda config: (5.0, 9.0 - (config.macrobatch_size == 2048)))
    assert run(bench).config == dataclasses.replace(BASE, macrobatch_size=2048)


def test_the_budget_ends_the_search_after_the_default() -> None:
    bench = MadeUp(lambda config: (5.0, 9.0), budget_s=0.0)
    found = run(bench)
    assert list(found.readings) == [DEFAULT] and bench.asked == [BASE]
    assert len(found.left_out) == 5 + len(points.MACROBATCHES)


def test_best_of_ignores_other_macrobatches() -> None:
    readings = {DEFAULT: Reading(Milliseconds(2, 2), True), Point(4, 1024, 512): Reading(Milliseconds(1, 1), True)}
    assert best_of(readings, DEFAULT) == (0, 0, DEFAULT)


@pytest.mark.parametrize(
    ("a", "b", "same"), [([0.0], [-0.0], False), ([float("nan")], [float("nan")], True), ([1.0], [1.0], True)]
)
def test_bits_are_compared_and_not_values(a: list[float], b: list[float], same: bool) -> None:
    assert same_bits(torch.tensor(a), torch.tensor(b)) is same
    assert not same_bits(torch.tensor(a), torch.tensor(a).double())


def test_the_prediction_chooses_what_is_measured() -> None:
    guesses: dict[Point, Expected | str] = {
        DEFAULT: Expected(9.0, 9.0),
        Point(4, 1024): Expected(2.0, 9.0),
        Point(8, 1024): Expected(2.4, 9.0),
        Point(0, 512): Expected(2.2, 4.0),
        Point(4, 512): "refused",
    }
    queue = points.promising(list(guesses), guesses, DEFAULT)
    assert queue == [DEFAULT, Point(0, 512), Point(4, 1024)]


def test_points_and_clusters() -> None:
    found = points.candidates(Shape(1024, 1024, 512, 8, 2), (4,), (512, 65536), BASE)
    assert found == [Point(0, 512), Point(4, 512), Point(0, 1024), Point(4, 1024)]
    cluster = points.find_cluster("NVIDIA H200", 2)
    assert cluster is not None and cluster.name == "h200_x2"
    assert (cluster := points.find_cluster("NVIDIA H200", 8)) is not None and cluster.name == "hgx_h200_8gpu"
    assert points.find_cluster("NVIDIA A100-SXM4-80GB", 2) is None


def test_expectations_are_the_simulations() -> None:
    from mok_megatron.simulate.layer import LayerShape, simulate

    cluster, shape = load_cluster("h200_x2"), Shape(1024, 1024, 512, 8, 4)
    point, huge = Point(4, 512), Point(0, 512, 512)
    found = points.expect([point, huge], shape, cluster, 2, BASE)
    layer = LayerShape(**dataclasses.asdict(shape))
    times = [simulate(layer, cluster, 2, point.config(BASE), forward).total / 1e3 for forward in (True, False)]
    assert found[point] == Expected(*times)
    assert "exceed the macrobatch" in str(found[huge])


def on_ranks(rank: int) -> tuple[Any, ...]:
    import torch.distributed as dist

    problem = make_problem(SHAPE, rank, 2, torch.device("cpu"), torch.float32)
    bench = Bench(problem, dist.group.WORLD, 1, time.monotonic(), 60)
    found = run(bench)
    assert bench.expected is not None
    bench.expected["dw2"][0, 0, 0] += rank  # what one rank sees differ differs for all
    return found.config, list(found.readings), found.different, bench.read(BASE).same


def test_two_ranks_agree() -> None:
    first, second = run_on_ranks(2, on_ranks)
    assert first == second
    assert len(first[1]) == 8 and first[2] == [] and first[3] is False
