"""Starting the ranks of a run on this machine, and ending all of them when one fails."""

import ctypes
import logging
import multiprocessing
import os
import pickle
import signal
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

from mok_megatron.errors import MokError

COLLECTIVE_TIMEOUT_S = 120.0
POLL_S = 0.1
GRACE_S = 5.0
PR_SET_PDEATHSIG = 1  # linux/prctl.h


class RankError(MokError, RuntimeError):
    """A rank failed or did not finish; the message says which, and why."""


def run_ranks(ranks: int, function: Callable[..., None], *arguments: Any, deadline_s: float) -> None:
    """Call ``function(rank, *arguments)`` on ``ranks`` fresh processes of this machine, and wait for them.

    Each process has joined one process group (gloo, or NCCL where there are GPUs) and Megatron's parallel groups with
    expert parallelism over all ranks, and runs Megatron on the CPU where there is no GPU. As soon as one rank fails,
    the others are ended.

    Args:
        ranks: number of processes; on GPUs at most their number.
        function: a function at the top level of a module; everything it is given can be pickled.
        deadline_s: seconds after which the run is ended with an error.

    Raises:
        RankError: a rank failed, was killed, or the deadline passed.
    """
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="mok-ranks-") as folder:
        errors = context.SimpleQueue()
        # Pickled here and unpickled by the rank: unpickling imports Megatron, which first has to be made quiet.
        call = pickle.dumps((function, arguments))
        workers = [
            context.Process(target=_rank_main, args=(rank, ranks, folder, errors, call)) for rank in range(ranks)
        ]
        try:
            for worker in workers:
                worker.start()
            _wait(workers, errors, deadline_s)
        finally:
            _end(workers)


def _wait(workers: list[Any], errors: Any, deadline_s: float) -> None:
    """Return when all ranks have finished well; raise on the first that has not."""
    deadline = time.monotonic() + deadline_s
    while True:
        failed = [rank for rank, worker in enumerate(workers) if worker.exitcode not in (None, 0)]
        if failed:
            time.sleep(POLL_S)  # a rank that sees its peer vanish may report first; let the cause arrive too
            messages = []
            while not errors.empty():
                messages.append(errors.get())
            raise RankError(_cause(failed, workers, messages))
        if all(worker.exitcode == 0 for worker in workers):
            return
        if time.monotonic() > deadline:
            running = [rank for rank, worker in enumerate(workers) if worker.exitcode is None]
            raise RankError(f"ranks {running} did not finish within {deadline_s:.0f} s; they were ended")
        time.sleep(POLL_S)


def _cause(failed: list[int], workers: list[Any], messages: list[tuple[int, str]]) -> str:
    """What to tell the user: a killed rank explains its peers' errors, else the first error reported."""
    for rank in failed:
        if workers[rank].exitcode < 0:
            return f"rank {rank} was killed by signal {-workers[rank].exitcode}; the other ranks were ended"
    if messages:
        rank, text = messages[0]
        return f"rank {rank}: {text}"
    return f"rank {failed[0]} ended with exit status {workers[failed[0]].exitcode} and no message"


def _end(workers: list[Any]) -> None:
    for worker in workers:
        if worker.is_alive():
            worker.terminate()
    for worker in workers:
        if worker.pid is not None:
            worker.join(GRACE_S)
        if worker.is_alive():
            worker.kill()
            worker.join()


def _rank_main(rank: int, ranks: int, folder: str, errors: Any, call: bytes) -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)  # end with the launcher, however that ends
    try:
        quiet()
        _join(rank, ranks, Path(folder))
        function, arguments = pickle.loads(call)
        function(rank, *arguments)
        _leave()
    except BaseException as error:  # torch's CheckpointException is no Exception
        # The message alone tells the user what to do where it is one of ours; otherwise the place matters.
        errors.put((rank, str(error) if isinstance(error, MokError) else traceback.format_exc()))
        raise SystemExit(1) from None


def _join(rank: int, ranks: int, folder: Path) -> None:
    """Join the process group and Megatron's groups; on a machine without a GPU, in CPU host mode."""
    import torch
    from megatron.core import parallel_state

    import mok_megatron
    from mok_megatron import host

    mok_megatron.register()
    timeout = timedelta(seconds=COLLECTIVE_TIMEOUT_S)
    rendezvous = f"file://{folder}/rendezvous"
    if torch.cuda.is_available():
        torch.cuda.set_device(rank)
        device = torch.device("cuda", rank)
        torch.distributed.init_process_group(
            "nccl", init_method=rendezvous, rank=rank, world_size=ranks, timeout=timeout, device_id=device
        )
    else:
        host.enable()
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // ranks))
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # all ranks are here: do not depend on the host's name
        torch.distributed.init_process_group(
            "gloo", init_method=rendezvous, rank=rank, world_size=ranks, timeout=timeout
        )
    parallel_state.initialize_model_parallel(expert_model_parallel_size=ranks)


def _leave() -> None:
    import torch
    from megatron.core import parallel_state

    torch.distributed.barrier()
    parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()


def quiet() -> None:
    """Silence Megatron's notes on optional packages, which do not concern a run without them."""
    warnings.filterwarnings("ignore", module=r"(megatron|torch)\..*")
    for name in ("megatron", "torch.utils.cpp_extension", "torch.distributed"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
