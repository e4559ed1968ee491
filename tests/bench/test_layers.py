"""Every implementation that runs on the CPU gives the reference's results, and a wrong one is found out."""

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist

from mok_megatron.bench import layers, measure
from mok_megatron.bench.floor import measure_floor
from mok_megatron.bench.layers import MokLayer
from mok_megatron.bench.nccl_layer import NcclLayer
from mok_megatron.bench.problem import Shape, make_problem
from mok_megatron.config import MokConfig
from tests.ranks import run_on_ranks

SHAPE = Shape(tokens=33, hidden=32, intermediate=48, experts=8, topk=2, shared=16)
CPU = torch.device("cpu")


def on_a_rank(rank: int, names: list[str], imbalance: float) -> dict[str, Any]:
    warnings.simplefilter("ignore")
    group = dist.group.WORLD if dist.get_world_size() > 1 else None
    problem = make_problem(SHAPE, rank, dist.get_world_size(), CPU, torch.float32, imbalance)
    expected = measure.reference(problem, group, torch.float64)
    builders = {"mok": lambda problem, group: MokLayer(problem, group, MokConfig()), **layers.baselines()}
    results: dict[str, Any] = {}
    for name in names:
        layer = builders[name](problem, group)
        results[name] = measure.errors(measure.run_once(layer, problem), expected, group)
        results[name + " again"] = measure.errors(measure.run_once(layer, problem), expected, group)
    results["times"] = measure.measure(layer, problem, group, iterations=3, warmup=1)
    results["floor"] = measure_floor(problem, group, 2)
    return results


@pytest.mark.parametrize(
    ("ranks", "names", "imbalance"),
    [(1, ["mok", "nccl"], 0.0), (2, ["mok", "nccl", "alltoall"], 0.0), (4, ["nccl"], 4.0)],
)
def test_implementations_agree_with_the_reference(ranks: int, names: list[str], imbalance: float) -> None:
    for results in run_on_ranks(ranks, on_a_rank, names, imbalance):
        for name in names:
            for found in (results[name], results[name + " again"]):  # gradients are cleared between the two
                assert set(found) == set(measure.RESULTS)
                assert measure.is_correct(found, torch.float32), (name, found)
        times = results["times"]
        assert 0 < times.forward <= times.both and 0 < times.backward <= times.both
        assert results["floor"].forward > 0 and results["floor"].wire is None


class Wrong(NcclLayer):
    """Forgets one token."""

    def __call__(self, x: torch.Tensor, topk_weights: torch.Tensor) -> torch.Tensor:
        y = super().__call__(x, topk_weights)
        return torch.cat([y[:-1], torch.zeros_like(y[-1:])])


def test_one_missing_token_is_found_out() -> None:
    problem = make_problem(SHAPE, 0, 1, CPU, torch.float32)
    expected = measure.reference(problem, None, torch.float64)
    right = measure.errors(measure.run_once(NcclLayer(problem, None), problem), expected, None)
    wrong = measure.errors(measure.run_once(Wrong(problem, None), problem), expected, None)
    assert measure.is_correct(right, torch.float32) and not measure.is_correct(wrong, torch.float32)
    assert not measure.is_correct({**right, "y": float("nan")}, torch.float32)


def test_times_are_medians() -> None:
    laps = [[1.0, 10.0], [9.0, 2.0], [2.0, 3.0]]
    assert measure._summary(laps, CPU, None) == measure.Times(forward=2.0, backward=3.0, both=11.0)


def test_routing_skew() -> None:
    def busiest(imbalance: float) -> float:
        ids = make_problem(Shape(2000, 8, 8, 16, 2), 0, 1, CPU, torch.float32, imbalance).topk_ids
        rows = torch.bincount(ids.flatten(), minlength=16)
        return float(rows.max() / rows.double().mean())

    assert busiest(0) < 1.2 < 2 < busiest(1) < busiest(4)


def test_ranks_share_the_shared_expert_and_nothing_else() -> None:
    one, other = (make_problem(SHAPE, rank, 2, CPU, torch.float32) for rank in range(2))
    assert one.shared is not None and other.shared is not None
    assert torch.equal(one.shared[0], other.shared[0])
    for name in ("x", "w1", "w2", "topk_ids", "dy"):
        assert not torch.equal(getattr(one, name), getattr(other, name))


def test_libraries_that_are_missing_are_named() -> None:
    problem = make_problem(SHAPE, 0, 1, CPU, torch.float32)
    for name in ("hybridep", "deepep"):
        with pytest.raises(layers.Unavailable, match="needs GPUs"):
            layers.baselines()[name](problem, None)


@pytest.mark.gpu
def test_nccl_baseline_on_a_gpu() -> None:
    device = torch.device("cuda")
    problem = make_problem(Shape(512, 256, 128, 8, 2, 64), 0, 1, device, torch.bfloat16)
    found = measure.errors(
        measure.run_once(NcclLayer(problem, None), problem), measure.reference(problem, None, torch.float64), None
    )
    assert measure.is_correct(found, torch.bfloat16), found
