"""Checkpoints between the fused layer and Megatron's, weights and optimizer, also at another EP size."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from mok_megatron.errors import MokTimeoutError
from mok_megatron.megakernel import workspace
from tests.megatron import layers
from tests.megatron.models import Run, largest_difference
from tests.megatron.once import run_once

# (saved by, at EP, loaded by, at EP, each expert and layer under a key of its own (Megatron's default), optimizer).
# Between EP 1 and more, weights only: Megatron chains another number of optimizers there, under any dispatcher.
EXCHANGES = [
    ("mok", 2, "alltoall", 2, False, "distributed"),
    ("alltoall", 2, "mok", 4, True, "distributed"),
    ("mok", 4, "mok", 2, True, "plain"),
    ("alltoall", 1, "mok", 2, False, "none"),
    ("mok", 4, "alltoall", 1, True, "none"),
]


def run(rank: int) -> dict[Any, Any]:
    folder = [tempfile.mkdtemp() if rank == 0 else ""]
    dist.broadcast_object_list(folder)
    try:
        found: dict[Any, Any] = {each: exchange(rank, Path(folder[0]), *each) for each in EXCHANGES}
        found["shape"] = other_shape(rank, Path(folder[0]))
        dist.barrier()
    finally:
        if rank == 0:
            shutil.rmtree(folder[0])
    return found


def exchange(
    rank: int, folder: Path, source: str, source_ep: int, target: str, target_ep: int, singleton: bool, optimizer: str
) -> dict[str, float]:
    """Differences right after the load, and after one step more of both."""
    ddp = {"use_distributed_optimizer": optimizer == "distributed"}
    path = folder / f"{source}-{source_ep}-{target}-{target_ep}-{singleton}-{optimizer}"
    with_optimizer = optimizer != "none"
    layers.start(rank, ep=source_ep)
    saved = Run(source, ddp=ddp)
    if with_optimizer:
        saved.step(0)
    saved.save(path, singleton, with_optimizer)
    before = saved.weights()
    if with_optimizer:
        saved.step(1)
    after = saved.weights()

    layers.start(rank, ep=target_ep)
    loaded = Run(target, ddp=ddp, seed=8)
    fresh = largest_difference(loaded.weights(), before)
    # With this strictness a key that only one side knows is an error, whichever side it is.
    loaded.load(path, singleton, "raise_all", with_optimizer)
    differences = {"loaded": largest_difference(loaded.weights(), before), "before the load": fresh}
    if with_optimizer:
        loaded.step(1)
        differences["one step on"] = largest_difference(loaded.weights(), after)
        differences["how far a step goes"] = largest_difference(before, after)
    else:
        loaded.load(path, singleton, "assume_ok_unexpected", with_optimizer)  # Megatron's default
    return differences


def other_shape(rank: int, folder: Path) -> dict[str, str]:
    """What a checkpoint of another shape says, on this rank."""
    layers.start(rank, ep=2)
    Run("mok").save(folder / "shape", False, optimizer=False)
    Run("mok").save(folder / "shape singleton", True, optimizer=False)
    messages = {}
    for name, fields in (("experts", {"num_moe_experts": 4}), ("inner", {"moe_ffn_hidden_size": 32})):
        for singleton, path in ((False, folder / "shape"), (True, folder / "shape singleton")):
            try:
                Run("mok", **fields).load(path, singleton, "assume_ok_unexpected", optimizer=False)
                messages[f"{name}, {singleton}"] = "loaded"
            except BaseException as error:  # torch's CheckpointException is not an Exception
                messages[f"{name}, {singleton}"] = f"{type(error).__name__}: {error}"
            dist.barrier()
    return messages


@pytest.mark.parametrize("exchanged", EXCHANGES, ids=lambda e: f"{e[0]} EP {e[1]} to {e[2]} EP {e[3]}, {e[4:]}")
def test_exchange(exchanged: tuple) -> None:
    for found in run_once(4, run):
        differences = found[exchanged]
        assert differences["before the load"] > 1e-2
        assert differences["loaded"] == 0
        if exchanged[-1] != "none":
            # Adam without its state would go about as far, but elsewhere.
            assert differences["how far a step goes"] > 5e-3
            assert differences["one step on"] < 1e-5


@pytest.mark.parametrize("singleton", [False, True])
@pytest.mark.parametrize("what", ["experts", "inner"])
def test_another_shape_is_refused_on_every_rank(what: str, singleton: bool) -> None:
    for found in run_once(4, run):
        message = found["shape"][f"{what}, {singleton}"]
        assert "shape mismatch" in message and "mlp." in message, message


def test_extra_states_are_what_transformer_engine_takes_for_none() -> None:
    """TEGroupedLinear._decode_extra_state: an empty uint8 tensor means that there is no FP8 state."""
    state = run_once(1, states)[0][0]
    assert len(state) == 2 * layers.EXPERTS
    assert all(value.dtype == torch.uint8 and value.numel() == 0 for value in state.values())


def test_no_checkpoint_after_a_launch_that_failed() -> None:
    assert run_once(1, states)[0][1] == ["waited in vain", "waited in vain"]


def states(rank: int) -> tuple[dict[str, Any], list[str]]:
    layers.start(rank)
    built = layers.layer(layers.config("mok"))
    extra = {k: v.data for k, v in built.experts.sharded_state_dict().items() if "extra" in k}
    built.experts.state_dict()

    class Failed:
        device = torch.device("cuda", 0)

        def check(self) -> None:
            raise MokTimeoutError("waited in vain")

    refusals = []
    with mock.patch.object(workspace, "all_workspaces", lambda: [Failed()]), mock.patch("torch.cuda.synchronize"):
        for save in (built.experts.sharded_state_dict, built.experts.state_dict):
            try:
                save()
            except MokTimeoutError as error:
                refusals.append(str(error))
    return extra, refusals
