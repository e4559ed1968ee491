"""What ranks agree on before they share memory, with a deadline; and what becomes of an error that nobody asked for."""

from __future__ import annotations

import os
import time

import pytest
import torch

from mok_megatron.errors import MokInputError, MokTimeoutError
from mok_megatron.megakernel import workspace
from mok_megatron.megakernel.agreement import exchange
from mok_megatron.megakernel.binding import MokError as Record
from mok_megatron.megakernel.failures import PEER_FAILED
from tests.ranks import run_on_ranks


def agree(rank: int) -> tuple:
    import torch.distributed as dist

    pair = dist.new_group([1, 2])
    world = [exchange(dist.group.WORLD, [rank, step], "to agree", 20) for step in (0, 1)]
    part = exchange(pair, {"rank": rank}, "to agree", 20) if rank else None
    # Rank 1 leaves out the next one: the other two must not wait for ever, nor rank 1 be taken for one that came.
    begin, missing = time.monotonic(), ""
    if rank != 1:
        try:
            exchange(dist.group.WORLD, rank, "to come", 1.0)
        except MokTimeoutError as error:
            missing = str(error)
    seconds = time.monotonic() - begin
    # Long enough for the others to give up: a store may wait a second longer than it was told.
    time.sleep(4 if rank == 1 else 0)
    # Rank 1 is one exchange behind now: nobody takes an answer to another question for one to theirs.
    mixed = ""
    try:
        exchange(dist.group.WORLD, rank, "to go on", 1.0)
    except (MokInputError, MokTimeoutError) as error:
        mixed = str(error)
    return world, part, missing, seconds, mixed


def test_ranks_agree_or_name_the_one_that_does_not_come():
    for rank, (world, part, missing, seconds, mixed) in enumerate(run_on_ranks(3, agree)):
        assert world == [[[r, step] for r in range(3)] for step in (0, 1)]
        assert part == (None if rank == 0 else [{"rank": 1}, {"rank": 2}])
        if rank != 1:
            assert missing.startswith(f"rank {rank} of the expert-parallel group waited 1 s for rank 1 to come.")
            assert 0.9 < seconds < 10
        else:
            assert "rank 0 has come to come, rank 2 has come to come" in mixed and "new process group" in mixed


def noted(code: int = PEER_FAILED) -> workspace._Notes:
    return workspace._Notes(Record(code, 3, 0, 1, -1, 0, 1, 7), timeout_s=3.0)


def test_an_error_is_told_once():
    notes = noted()
    assert "rank 1 could not hold its rows" in str(notes.untold())
    assert notes.untold() is None
    assert noted(code=0).untold() is None


def test_a_workspace_that_goes_tells_what_was_noted(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    waited = []
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    memory = [object()]
    workspace._end(noted(), memory, torch.device("cuda", 0))
    assert waited == [torch.device("cuda", 0)] and not memory
    assert capsys.readouterr().err.startswith("mok_megatron: MokCapacityError: rank 0 of the expert-parallel group")


def test_a_forked_child_tells_nothing_and_leaves_the_device_alone(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: pytest.fail("waited for the parent's device"))
    notes, memory = noted(), [object()]
    notes.pid = os.getpid() + 1
    workspace._end(notes, memory, torch.device("cuda", 0))
    assert memory and notes.untold() is None and capsys.readouterr().err == ""


class Stream:
    def __init__(self, handle: int) -> None:
        self.cuda_stream, self.waited_for = handle, []

    def wait_stream(self, other: Stream) -> None:
        self.waited_for.append(other.cuda_stream)


def test_launches_follow_one_another_whatever_their_streams(monkeypatch):
    streams, capturing = [Stream(1), Stream(2)], False
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    monkeypatch.setattr(workspace, "_last_stream", {})

    def launch(number: int, side_by_side: bool = False) -> list[int]:
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: streams[number])
        space = object.__new__(workspace.Workspace)  # without its buffers
        space.device, space._side_by_side = torch.device("cuda", 0), side_by_side
        assert space.launch_stream() == streams[number].cuda_stream
        waited, streams[number].waited_for = streams[number].waited_for, []
        return waited

    assert [launch(n) for n in (0, 0, 1, 1, 0)] == [[], [], [1], [], [2]]
    assert launch(1, side_by_side=True) == []
    capturing = True
    assert launch(1) == []
    capturing = False
    assert launch(1) == [1]
