"""What the ranks of a group tell one another before they share memory: through the group's store, with a deadline.

Not by a collective of the group's backend. NCCL would wait for a rank that never comes until the group's own timeout
(ten minutes by default), and then end the process without a word about the layer.
"""

from __future__ import annotations

import json
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from mok_megatron.errors import MokBackendError, MokInputError, MokTimeoutError
from mok_megatron.topology.check import rank_list


def exchange(group: dist.ProcessGroup, mine: Any, purpose: str, timeout_s: float) -> list[Any]:
    """`mine` of every rank of `group`, in its rank order. All ranks call it together, as often as one another.

    Args:
        mine: what JSON can hold; tuples come back as lists.
        purpose: completes "waited 3 s for rank 1 ...", for the error.
        timeout_s: seconds to wait for the other ranks. torch's FileStore (`init_method="file://..."`) counts whole
            seconds and may wait one more.

    Raises:
        MokTimeoutError: naming the ranks that did not come.
        MokInputError: a rank came for another purpose.
        MokBackendError: the store is gone, most likely with the rank that hosted it.
    """
    rank, ranks = group.rank(), range(group.size())
    store = group.get_group_store()
    try:
        # Counted in the store, not here: a store may outlive the group, and then holds what an earlier one wrote.
        number = store.add(f"mok/count/{rank}", 1)
        keys = [f"mok/{number}/{r}" for r in ranks]
        store.set(keys[rank], json.dumps([purpose, mine]))
        try:
            store.wait(keys, timedelta(seconds=timeout_s))
        except dist.DistNetworkError:
            raise
        except RuntimeError as error:  # stores have no error in common for it
            missing = [r for r in ranks if not store.check([keys[r]])]
            raise MokTimeoutError(
                f"rank {rank} of the expert-parallel group waited {timeout_s:g} s for {rank_list(missing)} {purpose}. "
                "A rank that crashed, or that skipped this layer, does this: look for the first error of the others. "
                "If a rank is only slow (the first call on a machine may compile the kernels: mok-megatron build does "
                "it ahead of time), raise --mok-timeout-s or MOK_TIMEOUT_S"
            ) from error
        answers = [json.loads(store.get(key)) for key in keys]
    except dist.DistNetworkError as error:
        raise MokBackendError(
            f"rank {rank} of the expert-parallel group waited for the others {purpose}, and lost the store of its "
            f"process group ({_first_line(error)}): the process that hosts the store, usually rank 0, has ended"
        ) from error
    others = [f"rank {r} has come {there}" for r, (there, _) in zip(ranks, answers, strict=True) if there != purpose]
    if others:
        raise MokInputError(
            f"rank {rank} of the expert-parallel group has come {purpose}, but {', '.join(others)}: they have not made "
            "the same calls, as after an error that only some of them have caught; make a new process group"
        )
    return [value for _, value in answers]


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n", 1)[0]
