"""Faults on two GPUs: a clear error or the right result, within the deadline, and nothing left behind.

MOK_FAULTS_SHARE_GPU=1 puts both ranks on one GPU, where that is all there is. `scenarios.py` says what the ranks do,
`pair.py` how they are started and watched.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from tests.faults.pair import DEADLINE_S, DEVICES, SHARE_GPU, Pair, Pairs

pytestmark = pytest.mark.gpu(count=len(set(DEVICES)))

# Beyond the deadline: a second for waits inside a rank, the launches before, a traceback, the end of the process.
SLACK_S = 8.0
# What a driver may keep for itself, in bytes.
MEMORY_SLACK = 64 << 20
# By which free memory of a GPU may differ between steps, in bytes, for each rank on it.
STEP_SLACK = 2 << 20


def used_bytes() -> list[int]:
    """Memory in use on each GPU of the ranks, by anybody."""
    import pynvml

    pynvml.nvmlInit()
    try:
        return [pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByIndex(i)).used for i in sorted(set(DEVICES))]
    finally:
        pynvml.nvmlShutdown()


@pytest.fixture(scope="module")
def pairs():
    pairs = Pairs()
    yield pairs
    pairs.close()


def assert_free(before):
    """The GPUs' memory is as it was; the driver takes a moment."""
    end = time.monotonic() + 5
    while True:
        more = [now - then for now, then in zip(used_bytes(), before, strict=True)]
        if max(more) <= MEMORY_SLACK:
            return
        assert time.monotonic() < end, f"{more} bytes more than before"
        time.sleep(0.1)


@pytest.fixture(scope="module")
def pair(pairs):
    """Shared by the tests after which a pair goes on."""
    before = used_bytes()
    with pairs.pair() as pair:
        yield pair
    assert_free(before)


@pytest.fixture
def doomed(pairs):
    """For one test alone, which ends its processes."""
    before = used_bytes()
    with pairs.pair() as pair:
        yield pair
    assert_free(before)


def expect_right(pair: Pair, scenario: str, **arguments) -> list:
    answers = pair.run(scenario, **arguments)
    assert not any(a.error for a in answers), answers
    return [a.value for a in answers]


def expect_errors(pair: Pair, scenario: str, error: str, *parts: str, **arguments) -> None:
    """The same refusal on both ranks, sooner than the deadline, after which the pair works."""
    for answer in pair.run(scenario, **arguments):
        assert answer.error == error and all(part in answer.message for part in parts), answer
        assert answer.seconds < DEADLINE_S + 1
    expect_right(pair, "step")


def stop_and_continue(pair: Pair, seconds: float) -> None:
    """Rank 1 has stopped itself; continue it after a while."""
    pid = pair.workers[1].process.pid
    end = time.monotonic() + 20
    while (Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()[0] != "T":
        assert time.monotonic() < end, pair.workers[1].text()
        time.sleep(0.02)
    time.sleep(seconds)
    os.kill(pid, signal.SIGCONT)


def assert_ended(worker, *parts: str, status: int = 1, within_s: float = DEADLINE_S + SLACK_S) -> None:
    """The process ends by itself in time, with that status and those words."""
    found = worker.status(within_s)
    assert found == status and all(part in worker.text() for part in parts), (found, worker.text()[-3000:])


# ---- the right result


@pytest.mark.parametrize("scenario", ["step", "fp8", "interleaved", "two_streams", "exception_between", "data_loaders"])
def test_right_result(pair, scenario):
    expect_right(pair, scenario)


def test_second_workspace_and_no_leak(pair):
    for rounds in expect_right(pair, "second_workspace", rounds=4):
        (free, files), *others = rounds[1:]  # the first round loads modules
        # The driver's own few MiB move when another process uses the device.
        slack = DEVICES.count(0) * STEP_SLACK if SHARE_GPU else 0
        assert all(other[1] == files and free - slack <= other[0] <= free + slack for other in others), rounds


@pytest.mark.timeout(300)
def test_two_thousand_steps_hold_what_they_held(pair):
    for samples in expect_right(pair, "many_steps", steps=2000, samples=4, timeout_s=240 if SHARE_GPU else 60):
        first, *others = samples
        for later in others:
            assert later["torch"] == first["torch"] and later["files"] == first["files"], samples
            assert later["device"] >= first["device"] - DEVICES.count(0) * STEP_SLACK, samples
            assert later["host"] <= first["host"] + (4 << 20), samples


def test_rank_stopped_for_five_seconds(pair):
    for worker in pair.workers:
        worker.tell("stopped")
    stop_and_continue(pair, 5)
    for worker in pair.workers:
        answer = worker.answer(20)
        assert not answer.error and 5 < answer.seconds < 9, answer


def test_group_destroyed_with_work_under_way(pair):
    expect_right(pair, "group_destroyed")
    expect_right(pair, "step")


# ---- an error on both ranks


def test_another_shape(pair):
    expect_errors(pair, "other_size", "MokInputError", "H differs between ranks", "rank 1 has 384", hidden=384)


def test_another_topk(pair):
    expect_errors(pair, "other_size", "MokInputError", "K differs between ranks", "rank 1 has 3", topk=3)


def test_no_memory_for_the_workspace(pair):
    expect_errors(pair, "no_memory", "MokBackendError", "rank 1: cannot allocate a workspace", "--mok-max-tokens")


def test_ranks_that_go_on_with_different_layers_and_recover(pair):
    for rank, answer in enumerate(pair.run("other_layer")):
        assert answer.error == "MokTimeoutError" and f"rank {1 - rank}" in answer.message, answer
        assert answer.seconds < DEADLINE_S + 4
    expect_right(pair, "recover")


def test_ranks_that_go_on_in_different_directions_and_recover(pair):
    """They hear of it at once."""
    for rank, answer in enumerate(pair.run("other_direction")):
        assert answer.error == "MokInputError" and f"rank {1 - rank} launched a step of another" in answer.message, (
            answer
        )
        assert answer.seconds < DEADLINE_S - 1
    expect_right(pair, "recover")


def test_world_destroyed_with_work_under_way(pair):
    """The last one with this pair: it has no group any more."""
    expect_right(pair, "world_destroyed")
    assert pair.end() == [0, 0]


# ---- the end of a rank


@pytest.mark.parametrize("victim", [0, 1])
def test_rank_killed_before_the_first_launch(doomed, victim):
    for worker in doomed.workers:
        worker.tell("never_comes_", victim=victim)
    lost = "MokTimeoutError: rank 0" if victim == 1 else "the process that hosts the store"
    named = "rank 1 to reach the first call" if victim == 1 else "MokBackendError"
    assert_ended(doomed.workers[1 - victim], lost, named)


def test_rank_killed_between_launches(doomed):
    for worker in doomed.workers:
        worker.tell("dies_before_")
    assert_ended(doomed.workers[0], "MokTimeoutError: rank 0", "waited 3 s for", "rank 1")


@pytest.mark.parametrize("victim", [0, 1])
def test_rank_killed_during_a_launch(doomed, victim):
    for worker in doomed.workers:
        worker.tell("runs_")
    for worker in doomed.workers:
        assert worker.line(30) == "running", worker.text()
    time.sleep(0.2)
    doomed.workers[victim].process.kill()
    assert_ended(doomed.workers[1 - victim], f"MokTimeoutError: rank {1 - victim}", "waited 3 s for", f"rank {victim}")


def test_rank_killed_after_its_launch(doomed):
    for worker in doomed.workers:
        worker.tell("dies_after_")
    answer = doomed.workers[0].answer(20)
    assert not answer.error, answer
    assert doomed.workers[1].status(5) == -signal.SIGKILL
    assert doomed.end() == [0, -signal.SIGKILL]


def test_rank_stopped_for_longer_than_the_deadline(doomed):
    for worker in doomed.workers:
        worker.tell("stopped_too_long_")
    stop_and_continue(doomed, 5)
    assert_ended(doomed.workers[0], "MokTimeoutError: rank 0", "rank 1")
    assert_ended(doomed.workers[1], "MokTimeoutError: rank 1", "rank 0")


def test_another_number_of_launches_is_told_at_the_end(doomed):
    for answer in doomed.run("one_launch_more_"):
        assert not answer.error, answer
    assert doomed.end() == [0, 0]
    assert "mok_megatron: MokTimeoutError: rank 0" in doomed.workers[0].text()
    assert "mok_megatron: Mok" not in doomed.workers[1].text()


def test_exception_between_forward_and_backward_on_one_rank(doomed):
    for worker in doomed.workers:
        worker.tell("raises_between_")
    assert_ended(doomed.workers[1], "ValueError: the user's own")
    assert_ended(doomed.workers[0], "MokTimeoutError: rank 0", "rank 1")
