"""Runs a function on several gloo ranks, in processes forked from one that has imported torch already."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import socket
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

# One process imports these once; every rank is forked from it, which takes milliseconds instead of seconds.
PRELOAD = ["torch", "torch.distributed", "mok_megatron.ops", "mok_megatron.reference.backend"]

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(PRELOAD)


def run_on_ranks(world_size: int, function: Callable[..., Any], *args: Any, timeout_s: float = 120) -> list[Any]:
    """Call `function(rank, *args)` on ranks 0 .. world_size - 1 of a gloo group; returns what each returned.

    The function must be importable (top level of a module) and its result picklable. An exception on any rank
    becomes an AssertionError here with that rank's traceback; so does a rank that takes longer than `timeout_s`.
    """
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder) / "store"
        results = _context.SimpleQueue()
        workers = [
            _context.Process(target=_work, args=(rank, world_size, str(store), timeout_s, function, args, results))
            for rank in range(world_size)
        ]
        for worker in workers:
            worker.start()
        try:
            return _collect(workers, results, timeout_s)
        finally:
            for worker in workers:
                worker.kill()
                worker.join()


def _collect(workers: list[Any], results: Any, timeout_s: float) -> list[Any]:
    deadline = time.monotonic() + timeout_s
    values: dict[int, Any] = {}
    while len(values) < len(workers):
        if not results.empty():
            rank, failure, value = results.get()
            assert failure is None, f"rank {rank} of {len(workers)} failed:\n{failure}"
            values[rank] = pickle.loads(value)
            continue
        for rank, worker in enumerate(workers):
            dead = worker.exitcode is not None and rank not in values and results.empty()
            assert not dead, f"rank {rank} of {len(workers)} ended with exit status {worker.exitcode} and no result"
        missing = sorted(set(range(len(workers))) - set(values))
        assert time.monotonic() < deadline, f"ranks {missing} gave no result within {timeout_s} s"
        time.sleep(0.005)
    return [values[rank] for rank in range(len(workers))]


def _work(
    rank: int, world_size: int, store: str, timeout_s: float, function: Callable[..., Any], args: tuple, results: Any
) -> None:
    import torch
    import torch.distributed as dist

    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{store}",
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
