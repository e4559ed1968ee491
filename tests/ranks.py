"""Runs a function on several gloo ranks, in processes forked from one that has imported torch already."""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import os
import pickle
import signal
import socket
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

# One process imports these once; every rank is forked from it, which takes milliseconds instead of seconds.
PRELOAD = [
    "pytest",  # test modules import it
    "torch",
    "torch.distributed",
    "mok_megatron.ops",
    "mok_megatron.reference.backend",
    "mok_megatron.host.replacements",
    "megatron.core.models.gpt",
    "megatron.core.optimizer",
    "megatron.core.dist_checkpointing",
]
# How long the ranks may take to start: the first ones wait for the imports above.
START_S = 120.0
# How long the other ranks are heard once one has failed.
GRACE_S = 2.0

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(PRELOAD)


def run_on_ranks(world_size: int, function: Callable[..., Any], *args: Any, timeout_s: float = 120) -> list[Any]:
    """Call `function(rank, *args)` on ranks 0 .. world_size - 1 of a gloo group; returns what each returned.

    The function must be importable (top level of a module) and its result picklable. An exception on any rank
    becomes an AssertionError here with the traceback of every rank that failed; so does a rank that takes longer
    than `timeout_s` from the moment when all have started, with the place where it was.
    """
    with tempfile.TemporaryDirectory() as folder:
        results = _context.SimpleQueue()
        workers = [
            _context.Process(target=_work, args=(rank, world_size, folder, timeout_s, function, args, results))
            for rank in range(world_size)
        ]
        for worker in workers:
            worker.start()
        try:
            return _collect(workers, results, Path(folder), timeout_s)
        finally:
            for worker in workers:
                worker.kill()
                worker.join()


def _collect(workers: list[Any], results: Any, folder: Path, timeout_s: float) -> list[Any]:
    deadline = time.monotonic() + START_S
    all_started = False
    values: dict[int, Any] = {}
    failures: dict[int, str] = {}
    while len(values) + len(failures) < len(workers) and time.monotonic() < deadline:
        if not results.empty():
            rank, failure, value = results.get()
            if failure is None:
                values[rank] = pickle.loads(value)
            else:
                failures[rank] = failure
        else:
            for rank, worker in enumerate(workers):
                ended = worker.exitcode is not None and rank not in values and rank not in failures
                if ended and results.empty():
                    failures[rank] = f"ended with exit status {worker.exitcode} and no result"
            time.sleep(0.005)
        if not all_started and all((folder / f"stack{rank}").exists() for rank in range(len(workers))):
            all_started = True
            deadline = time.monotonic() + timeout_s
        if failures:
            # Its peers fail too, or wait for it in vain: the first to be heard need not be the cause.
            deadline = min(deadline, time.monotonic() + GRACE_S)
    silent = sorted(set(range(len(workers))) - set(values) - set(failures))
    for rank in silent:
        with contextlib.suppress(ProcessLookupError):
            os.kill(workers[rank].pid, signal.SIGUSR1)  # faulthandler writes down where it is
    time.sleep(0.3 if silent else 0)
    for rank in silent:
        stack = folder / f"stack{rank}"
        where = stack.read_text() if stack.exists() else "not started yet"
        failures[rank] = f"gave no result within {timeout_s} s, or after another rank failed; it was here:\n{where}"
    assert not failures, "\n".join(
        f"rank {rank} of {len(workers)}: {failure}" for rank, failure in sorted(failures.items())
    )
    return [values[rank] for rank in range(len(workers))]


def _work(
    rank: int, world_size: int, folder: str, timeout_s: float, function: Callable[..., Any], args: tuple, results: Any
) -> None:
    import torch
    import torch.distributed as dist

    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
    torch.set_num_threads(1)
    stack = open(Path(folder) / f"stack{rank}", "w")  # stays open until the process ends
    faulthandler.register(signal.SIGUSR1, file=stack)
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder}/store",
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=timeout_s),
        )
        value = function(rank, *args)
        # Plain pickle: the queue's own would pass tensors as handles that die with this process.
        results.put((rank, None, pickle.dumps(value)))
        dist.destroy_process_group()
    except BaseException:
        results.put((rank, traceback.format_exc(), None))


def free_port() -> int:
    """A TCP port that nobody listens on at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
