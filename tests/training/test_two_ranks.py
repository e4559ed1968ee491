"""Training on two ranks: the dispatchers agree, resumed runs repeat, checkpoints move; one launch does all of it."""

import os
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from mok_megatron.training import comparison, report
from mok_megatron.training.launch import RankError, run_ranks
from mok_megatron.training.loop import CheckpointError, TrainSettings
from mok_megatron.training.model import ModelShape

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the CPU path; GPUs have their own tests")

SHAPE = ModelShape(
    layers=2, hidden=64, heads=2, dense_intermediate=64, experts=4, top_k=2, expert_groups=2, groups_per_token=1,
    expert_intermediate=64, shared_intermediate=64, q_rank=32, kv_rank=16, head_dim=16, rope_dim=8, sequence_length=32,
)  # fmt: skip
SETTINGS = TrainSettings(dispatcher="", micro_batch=2, microbatches=2, warmup_steps=1)


def everything(rank: int, plan: comparison.Plan) -> None:
    """On each rank: train, resume, then bad checkpoints, whose messages rank 0 writes beside the results."""
    comparison.train(rank, plan)
    comparison.resume(rank, plan)
    # Torch's Adam keeps a step a parameter; Megatron's loading once shared one between all of them.
    trainer = comparison.make_trainer(plan, "mok")
    trainer.load(plan.checkpoint("mok"))
    steps = [s["step"] for part in trainer.optimizer.chained_optimizers for s in part.optimizer.state.values()]
    assert {float(step) for step in steps} == {plan.save_step} and len({id(step) for step in steps}) == len(steps)

    wider = comparison.make_trainer(replace(plan, shape=replace(SHAPE, expert_intermediate=128)), "mok")
    in_a_file = plan.folder / "train.json" / "checkpoint"
    messages = []
    for action in (
        lambda: trainer.load(plan.folder / "absent"),
        lambda: trainer.save(in_a_file),
        lambda: wider.load(plan.checkpoint("alltoall")),
    ):
        try:
            action()
            messages.append("no error")
        except CheckpointError as error:
            messages.append(str(error))
    if rank == 0:
        (plan.folder / "messages.txt").write_text("\n---\n".join(messages))


@pytest.fixture(scope="module")
def plan(tmp_path_factory):
    folder = tmp_path_factory.mktemp("quickstart")
    plan = comparison.Plan(folder=folder, steps=4, resume_steps=2, shape=SHAPE, settings=SETTINGS)
    (folder / "checkpoints").mkdir()
    comparison.write_data(plan)
    run_ranks(2, everything, plan, deadline_s=150)
    return plan


@pytest.fixture(scope="module")
def summary(plan):
    trained, resumed = comparison.read_result(plan, "train"), comparison.read_result(plan, "resume")
    return report.summarize(trained, resumed, plan.save_step, plan.dtype)


def test_the_dispatchers_train_the_same_model(summary):
    assert summary["max_abs_loss_diff"] < 1e-5
    for losses in summary["loss"].values():
        assert len(losses) == 4 and losses[-1] < losses[0] - 0.05, "it does not learn"


def test_a_resumed_run_repeats_the_uninterrupted_one(summary):
    assert summary["resume_max_abs_loss_diff"] == 0.0


def test_checkpoints_move_between_dispatchers(summary):
    assert set(summary["checkpoint_exchange"]) == {"mok_to_alltoall", "alltoall_to_mok"}
    assert max(summary["checkpoint_exchange"].values()) < 1e-6


def test_checkpoints_are_complete_or_absent(plan):
    names = sorted(path.name for path in (plan.folder / "checkpoints").iterdir())
    assert names == ["alltoall", "initial", "mok"]


def test_bad_checkpoints_are_explained(plan):
    absent, unwritable, other_shape = (plan.folder / "messages.txt").read_text().split("\n---\n")
    assert "no complete checkpoint in" in absent and "absent" in absent
    assert "cannot write the checkpoint" in unwritable and "writable folder" in unwritable
    assert "does not fit this model" in other_shape and "experts" in other_shape


def rank_one_dies(rank: int) -> None:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    torch.distributed.barrier()


def test_a_killed_rank_ends_the_run_with_a_message():
    start = time.monotonic()
    with pytest.raises(RankError, match="rank 1 was killed by signal 9"):
        run_ranks(2, rank_one_dies, deadline_s=100)
    assert time.monotonic() - start < 60


def refuse(rank: int, folder: Path) -> None:
    raise CheckpointError(f"nothing in {folder} on any rank")


def test_an_error_of_ours_is_its_message_alone(tmp_path):
    with pytest.raises(RankError) as caught:
        run_ranks(1, refuse, tmp_path, deadline_s=100)
    assert str(caught.value) == f"rank 0: nothing in {tmp_path} on any rank"
