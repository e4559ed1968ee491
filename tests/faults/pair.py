"""Two worker processes, one a GPU (or both on one), that tests tell what to do and that may die of it."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.ranks import free_port

ROOT = Path(__file__).resolve().parents[2]
SHARE_GPU = os.environ.get("MOK_FAULTS_SHARE_GPU") == "1"
"""Both ranks on GPU 0, for machines that have one. The driver gives their kernels the GPU in turns, so a wait for the
other rank takes milliseconds; and the process group is gloo's, since NCCL wants a GPU for each rank."""
DEVICES = (0, 0) if SHARE_GPU else (0, 1)
"""GPU of each rank."""
DEADLINE_S = 3.0
"""MOK_TIMEOUT_S of the workers."""
START_S = 90.0
"""For the imports, a CUDA context and NCCL's communicator."""


@dataclass
class Answer:
    """What one worker made of a scenario."""

    value: Any
    error: str
    """Name of the exception's class, or nothing."""
    message: str
    seconds: float


class Worker:
    """One rank: `tests/faults/worker.py` in a session of its own, so that nothing it starts can be lost from sight."""

    def __init__(self, rank: int, port: int, folder: Path) -> None:
        self.rank, self.log = rank, folder / f"rank{rank}.log"
        environment = os.environ | {
            "RANK": str(rank), "LOCAL_RANK": str(DEVICES[rank]), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port), "MOK_TIMEOUT_S": str(DEADLINE_S), "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
            "NCCL_NVLS_ENABLE": "0", "OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1",
            "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": str(int(SHARE_GPU)),
        }  # fmt: skip
        answers, write = os.pipe()
        self._answers = os.fdopen(answers, "rb", buffering=0)
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.faults.worker", str(write)],
                stdin=subprocess.PIPE, stdout=log, stderr=log, pass_fds=[write], cwd=ROOT, env=environment,
                start_new_session=True, text=True,
            )  # fmt: skip
        os.close(write)
        self._unread = b""

    def tell(self, scenario: str, **arguments: Any) -> None:
        """Start a scenario: a function of `scenarios.py`."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([scenario, arguments]) + "\n")
        self.process.stdin.flush()

    def answer(self, timeout_s: float) -> Answer:
        """What it made of the scenario; AssertionError with its log if it does not say in time."""
        line = self.line(timeout_s)
        assert line, f"rank {self.rank} gave no answer within {timeout_s} s:\n{self.text()}"
        return Answer(**json.loads(line))

    def line(self, timeout_s: float) -> str:
        """The next line that it writes, or nothing."""
        end = time.monotonic() + timeout_s
        while b"\n" not in self._unread:
            ready, _, _ = select.select([self._answers], [], [], max(0.0, end - time.monotonic()))
            more = os.read(self._answers.fileno(), 65536) if ready else b""
            if not more:
                return ""
            self._unread += more
        line, _, self._unread = self._unread.partition(b"\n")
        return line.decode()

    def text(self) -> str:
        """What it printed."""
        return self.log.read_text(errors="replace")

    def status(self, timeout_s: float) -> int:
        """Its exit status; AssertionError with its log if it does not end in time."""
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"rank {self.rank} has not ended within {timeout_s} s:\n{self.text()}") from None

    def left(self) -> list[int]:
        """Process ids of its session that are there: itself and whatever it started."""
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with contextlib.suppress(OSError):
                    state, _, _, session = (entry / "stat").read_text().rpartition(")")[2].split()[:4]
                    if int(session) == self.process.pid and state != "Z":
                        found.append(int(entry.name))
        return found


class Pair:
    """Ranks 0 and 1. Importing torch takes seconds, so pairs are started ahead; `connect` makes the group."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory()
        port = free_port()
        self.workers = [Worker(rank, port, Path(self._folder.name)) for rank in (0, 1)]

    def connect(self) -> Pair:
        """CUDA, the process group, and a first collective."""
        for answer in self.run("connect", timeout_s=START_S):
            assert not answer.error, answer
        return self

    def run(self, *scenarios: str, timeout_s: float = 30.0, **arguments: Any) -> list[Answer]:
        """A scenario on both ranks (or one each), and their answers. The pair goes on."""
        for worker, scenario in zip(self.workers, scenarios * (2 // len(scenarios)), strict=True):
            worker.tell(scenario, **arguments)
        return [worker.answer(timeout_s) for worker in self.workers]

    def end(self, timeout_s: float = 15.0) -> list[int]:
        """Exit statuses, once both have ended by themselves."""
        for worker in self.workers:
            with contextlib.suppress(OSError):  # it has ended
                worker.process.stdin.close()  # type: ignore[union-attr]
        return [worker.status(timeout_s) for worker in self.workers]

    def left(self) -> list[int]:
        """Process ids of both sessions that are still there."""
        return [pid for worker in self.workers for pid in worker.left()]

    def kill(self) -> None:
        """Whatever is left."""
        for pid in self.left():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for worker in self.workers:
            with contextlib.suppress(OSError):
                worker.process.stdin.close()  # type: ignore[union-attr]
            worker.process.wait()
            worker._answers.close()
        self._folder.cleanup()


class Pairs:
    """Pairs, one after another; the next one imports its modules while a test has the one before."""

    def __init__(self) -> None:
        self._spare = Pair()

    @contextlib.contextmanager
    def pair(self) -> Iterator[Pair]:
        """A connected pair. At the end none of its processes may be there any more; any that is gets killed."""
        pair, self._spare = self._spare, Pair()
        try:
            yield pair.connect()
            pair.end()
            assert not pair.left()
        finally:
            pair.kill()

    def close(self) -> None:
        """The one that nobody asked for."""
        self._spare.kill()
