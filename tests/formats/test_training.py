"""A small model in training on the CPU: FP8 follows the loss of bf16, and weights are quantised once a step."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mok_megatron.formats import QuantizedWeight, Recipe
from mok_megatron.training import comparison
from mok_megatron.training.launch import run_ranks
from mok_megatron.training.loop import Trainer, TrainSettings
from mok_megatron.training.model import ModelShape

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the CPU path; docs/formats.md has its curves")

STEPS, WINDOW = 16, 8
BOUND = 0.006
"""Nats between the mean losses of 8 steps. Over 3 seeds 0.0009 was the most; with half of the experts' output missing
it is 0.0098, with no gradient of w1 0.0135. docs/formats.md has the curves of longer runs."""

SHAPE = ModelShape(layers=2, expert_intermediate=128, shared_intermediate=64, mtp_layers=0, sequence_length=64)
FORMATS: dict[str, dict[str, Any]] = {
    "bf16": {},
    "mxfp8": {"format": "mxfp8", "fp8_wgrad": "fp8"},
    "blockwise": {"format": "blockwise"},
}


def train_in_every_format(rank: int, plan: comparison.Plan) -> None:
    results = {}
    for name, settings in FORMATS.items():
        trainer = comparison.make_trainer(replace(plan, settings=replace(plan.settings, **settings)), "mok")
        quantised = _record(trainer)
        losses, fresh = [], []
        for _ in range(plan.steps):
            present = [w.detach().clone() for w in _expert_weights(trainer)]
            quantised.clear()
            losses.append(trainer.step())
            fresh.append([torch.equal(a, b) for a, b in zip(quantised, present, strict=name != "bf16")])
        results[name] = {"loss": losses, "fresh": fresh}
    (plan.folder / "results.json").write_text(json.dumps(results))


def _expert_weights(trainer: Trainer) -> list[Tensor]:
    modules = [m for m in trainer.model.modules() if type(m).__name__ == "MokExperts"]
    return [weight for m in modules for weight in (m.weight1, m.weight2)]


def _record(trainer: Trainer) -> list[Tensor]:
    """A list to which each weight is added as it is quantised."""
    seen: list[Tensor] = []
    quantise = getattr(Recipe.weight, "original", Recipe.weight)

    def recorded(self: Recipe, weight: Tensor) -> QuantizedWeight:
        seen.append(weight.clone())
        return quantise(self, weight)

    recorded.original = quantise  # type: ignore[attr-defined]
    Recipe.weight = recorded  # type: ignore[method-assign]
    return seen


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder: Path = tmp_path_factory.mktemp("formats")
    settings = TrainSettings(dispatcher="", micro_batch=2, microbatches=2, warmup_steps=5)
    plan = comparison.Plan(folder=folder, dtype="bf16", steps=STEPS, shape=SHAPE, settings=settings)
    comparison.write_data(plan)
    run_ranks(1, train_in_every_format, plan, deadline_s=120)
    return json.loads((folder / "results.json").read_text())


def windows(losses: list[float]) -> list[float]:
    return [sum(losses[i : i + WINDOW]) / WINDOW for i in range(0, STEPS, WINDOW)]


@pytest.mark.parametrize("name", ["mxfp8", "blockwise"])
def test_the_loss_follows_that_of_bf16(results: dict[str, Any], name: str) -> None:
    expected, found = (windows(results[n]["loss"]) for n in ("bf16", name))
    assert expected[-1] < expected[0] - 0.5, "there was nothing to follow"
    assert found != expected, "it was bf16"
    assert max(abs(a - b) for a, b in zip(found, expected, strict=True)) < BOUND


@pytest.mark.parametrize("name", ["mxfp8", "blockwise"])
def test_weights_are_quantised_once_a_step_and_never_late(results: dict[str, Any], name: str) -> None:
    """In bf16 Megatron's optimizer writes parameters through `.data`, unseen by their version counters."""
    assert results[name]["fresh"] == [[True, True]] * STEPS
