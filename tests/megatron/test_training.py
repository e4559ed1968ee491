"""A small GPTModel under Megatron's DDP, optimizer and schedules: the fused layer trains it like alltoall."""

from __future__ import annotations

from typing import Any

import pytest

from tests.megatron import layers
from tests.megatron.models import Run, largest_difference
from tests.megatron.once import run_once

STEPS = 2
OVERLAP = {"overlap_grad_reduce": True, "overlap_param_gather": True}
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
PLAIN_OPTIMIZER = {"use_distributed_optimizer": False}

# What the fused layer runs with beside the reference: (name, parallel sizes, arguments of Run).
RUNS: dict[int, dict[str, tuple[dict[str, int], dict[str, Any]]]] = {
    2: {
        "EP 1, DP 2": ({}, {}),
        "EP 2": ({"ep": 2}, {}),
        "EP 1, overlapped": ({}, {"ddp": OVERLAP}),
        "EP 2, overlapped": ({"ep": 2}, {"ddp": OVERLAP}),
        "EP 2, plain optimizer": ({"ep": 2}, {"ddp": PLAIN_OPTIMIZER}),
        "EP 2, full recompute": ({"ep": 2}, FULL),
        "TP 2, EP 1": ({"tp": 2}, {}),
        "TP 2, EP 2": ({"tp": 2, "ep": 2}, {}),
    },
    4: {
        "PP 2, EP 2": ({"pp": 2, "ep": 2}, {}),
        "EP 2, DP 2, overlapped": ({"ep": 2}, {"ddp": OVERLAP}),
    },
}
SAME_TO_THE_BIT = ("EP 2, overlapped", "EP 2, plain optimizer", "EP 2, full recompute")


def run(rank: int, world_size: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    references: dict[str, tuple[list[dict[str, float]], dict[str, Any]]] = {}
    plain = None
    for name, (parallel, options) in RUNS[world_size].items():
        layers.start(rank, **parallel)
        if str(parallel) not in references:
            references[str(parallel)] = train(Run("alltoall"))
        reports, weights = train(Run("mok", **options))
        expected_reports, expected = references[str(parallel)]
        found[name] = {
            "loss": max(relative(a, b, "loss") for a, b in zip(reports, expected_reports, strict=True)),
            "norm": max(relative(a, b, "gradient norm") for a, b in zip(reports, expected_reports, strict=True)),
            "weights": largest_difference(weights, expected),
        }
        if name == "EP 2":
            plain = weights
        if name in SAME_TO_THE_BIT and plain is not None:
            found[name]["to the bit"] = largest_difference(weights, plain)
    return found


def train(model: Run) -> tuple[list[dict[str, float]], dict[str, Any]]:
    reports = [model.step(number) for number in range(STEPS)]
    return reports, model.weights()


def relative(one: dict[str, float], other: dict[str, float], name: str) -> float:
    return abs(one[name] - other[name]) / max(abs(other[name]), 1e-9)


@pytest.mark.parametrize(("world_size", "name"), [(size, name) for size in RUNS for name in RUNS[size]])
def test_trains_like_alltoall(world_size: int, name: str) -> None:
    for found in run_once(world_size, run, world_size):
        # Adam divides a gradient by its own size, which blows rounding up to a small part of a step of 1e-2.
        assert found[name]["weights"] < 2e-4
        assert found[name]["loss"] < 1e-5
        assert found[name]["norm"] < 1e-5


@pytest.mark.parametrize("name", SAME_TO_THE_BIT)
def test_options_change_no_bit(name: str) -> None:
    for found in run_once(2, run, 2):
        assert found[name]["to the bit"] == 0
