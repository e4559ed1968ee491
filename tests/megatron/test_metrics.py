"""--log-mok: what layers record of their calls, gathered over ranks and written for TensorBoard and W&B."""

from __future__ import annotations

import sys
import types
from typing import Any
from unittest import mock

import pytest
import torch

from tests.megatron import layers
from tests.megatron.once import run_once

EP = 2
ARGS = types.SimpleNamespace(num_layers=3, mtp_num_layers=None)


class Writer:
    """Takes the place of a TensorBoard and a W&B writer."""

    def __init__(self) -> None:
        self.scalars: dict[str, float] = {}
        self.steps: set[int] = set()

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.scalars[name] = value
        self.steps.add(step)

    def log(self, named: dict[str, float], step: int) -> None:
        self.scalars |= named
        self.steps.add(step)


def run(rank: int) -> dict[str, Any]:
    """A layer that records, as number 2 of 3, and one that does not; twice the macrobatch on one rank."""
    from mok_megatron.config import MokConfig
    from mok_megatron.megatron import metrics

    layers.start(rank, ep=EP)
    nothing = metrics.report(ARGS, 1, None, None)
    config = layers.config("mok", num_layers=3)
    config.mok = MokConfig(minibatch_size=128, macrobatch_size=128)
    built = layers.layer(config)
    built.set_layer_number(2)
    tokens = torch.randn(300, 1, layers.HIDDEN, generator=torch.Generator().manual_seed(rank))
    built(tokens.requires_grad_())[0].sum().backward()
    silent = metrics.report(ARGS, 1, None, None)

    args = types.SimpleNamespace(_GLOBAL_ARGS=types.SimpleNamespace(log_mok=True))
    routed = [0] * layers.EXPERTS
    built.router.register_forward_hook(lambda m, i, out: routed.__setitem__(slice(None), out[1].sum(0).tolist()))
    with mock.patch.dict(sys.modules, {"megatron.training.global_vars": args}):
        built(tokens)[0].sum().backward()
    board, wandb = Writer(), Writer()
    line = metrics.report(ARGS, 7, board, wandb)
    return {
        "nothing": [nothing, silent],
        "routed": routed,
        "board": board.scalars,
        "wandb": wandb.scalars,
        "steps": board.steps | wandb.steps,
        "line": line,
    }


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    return run_once(EP, run)


def test_rows_of_every_rank_are_those_that_the_routers_chose(found: list[dict[str, Any]]) -> None:
    by_expert = torch.tensor([result["routed"] for result in found]).sum(0)
    rows = by_expert.view(EP, -1).sum(1)
    for result in found:
        named = result["board"]
        assert [named[f"mok/layer 2/rows of EP rank {rank}"] for rank in range(EP)] == rows.tolist()
        assert (
            named["mok/layer 2/imbalance"] == named["mok/imbalance"] == pytest.approx(rows.max() / rows.float().mean())
        )
        padded = ((by_expert + 127) // 128 * 128).view(EP, -1).sum(1)
        assert named["mok/layer 2/evicted rows"] == named["mok/evicted rows"] == padded.max() - 128


def test_other_layers_and_unknown_times_are_left_out(found: list[dict[str, Any]]) -> None:
    for result in found:
        assert {name.split("/")[1] for name in result["board"]} == {
            "layer 2",
            "imbalance",
            "evicted rows",
            "symmetric MB",
        }
        assert result["wandb"] == result["board"] and result["steps"] == {7}
        assert "ms" not in result["line"] and "evicted rows" in result["line"]


def test_nothing_is_recorded_unless_asked_for(found: list[dict[str, Any]]) -> None:
    for result in found:
        assert result["nothing"] == [None, None]
