"""Nothing hangs, nothing is written out of bounds, and the error says what happened."""

from __future__ import annotations

import time

import pytest
import torch

from mok_megatron.errors import MokCapacityError, MokError, MokInputError, MokTimeoutError
from mok_megatron.selftest.problem import VirtualRanks, kernel_config, make_problem

pytestmark = pytest.mark.gpu


def error_of(space) -> MokError | None:
    torch.cuda.synchronize()
    try:
        space.check()
    except MokError as error:
        return error
    return None


def test_a_rank_that_never_launches():
    problem = make_problem(200, 128, 64, 4, 2)
    run = VirtualRanks(problem, 2, kernel_config(timeout_s=0.5))
    begin = time.monotonic()
    run.launch(run.forward_steps(problem), leave_out=[1])
    error = error_of(run.spaces[0])
    assert time.monotonic() - begin < 10
    assert isinstance(error, MokTimeoutError)
    assert "rank 0" in str(error) and "the routes of rank 1" in str(error)


def test_a_rank_that_leaves_out_the_backward():
    problem = make_problem(200, 128, 64, 4, 2)
    run = VirtualRanks(problem, 2, kernel_config(timeout_s=0.5))
    forward = run.forward_steps(problem)
    run.launch(forward)
    run.check()
    run.launch(run.backward_steps(problem, forward), leave_out=[0])
    error = error_of(run.spaces[1])
    assert isinstance(error, MokTimeoutError)
    # Two waits on that rank end at the same deadline; either may be noted first.
    assert "output gradients) of rank 0" in str(error) or "rank 0 to push its last row" in str(error)


def test_ranks_that_launch_different_steps():
    problem = make_problem(200, 128, 64, 4, 2)
    run = VirtualRanks(problem, 2, kernel_config(timeout_s=0.5))
    run.spaces[1].struct.shape.minibatch_rows *= 2
    run.spaces[1].struct.shape.ring_rows *= 2
    run.launch(run.forward_steps(problem))
    expect_other_steps(run, [(0, 1), (1, 0)])


def expect_other_steps(run: VirtualRanks, named: list[tuple[int, int]]) -> None:
    """Each first rank names each second one, whose step differs; nobody waits for a deadline."""
    for rank, other in named:
        error = error_of(run.spaces[rank])
        assert isinstance(error, MokInputError) and f"rank {rank} of" in str(error), error
        assert f"rank {other} launched a step of another shape, direction" in str(error)


@pytest.mark.parametrize("format", ["bf16", "blockwise"])
def test_a_forward_on_one_rank_and_a_backward_on_another(format):
    problem = make_problem(400, 256, 128, 6, 2, shared=64)
    run = VirtualRanks(problem, 3, kernel_config(timeout_s=10, macrobatch_size=256, format=format))
    forward = run.forward_steps(problem)
    run.launch(forward)
    run.check()
    steps = run.backward_steps(problem, forward)
    steps[2] = run.forward_steps(problem)[2]
    begin = time.monotonic()
    run.launch(steps)
    expect_other_steps(run, [(0, 2), (1, 2), (2, 0)])
    assert time.monotonic() - begin < 5


@pytest.mark.parametrize("number", [4, -2])
def test_an_expert_that_does_not_exist(number):
    problem = make_problem(200, 128, 64, 4, 2)
    problem.ids[150, 1] = number
    run = VirtualRanks(problem, 2, kernel_config())
    run.launch(run.forward_steps(problem))
    assert error_of(run.spaces[0]) is None
    error = error_of(run.spaces[1])
    assert isinstance(error, MokInputError) and f"topk_ids holds {number} (at flat index 101)" in str(error)


def test_more_rows_than_the_schedule_holds():
    problem = make_problem(1000, 128, 64, 4, 2)
    problem.ids[:] = torch.tensor([0, 1], dtype=torch.int32, device="cuda")  # all of it on rank 0
    run = VirtualRanks(problem, 2, kernel_config(capacity_rows=1024))
    steps = run.forward_steps(problem)
    for step in steps:
        step.saved.schedule.row_source.fill_(-7)
    run.launch(steps)
    error, peer_error = error_of(run.spaces[0]), error_of(run.spaces[1])
    assert (
        isinstance(error, MokCapacityError) and "2048 routed rows" in str(error) and "--mok-capacity-rows" in str(error)
    )
    assert isinstance(peer_error, MokCapacityError) and "rank 0" in str(peer_error)
    assert (steps[0].saved.schedule.row_source == -7).all()
