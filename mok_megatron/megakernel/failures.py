"""What a kernel recorded before it gave up, as an error that a user can act on."""

from __future__ import annotations

from mok_megatron.errors import MokCapacityError, MokError, MokInputError, MokTimeoutError
from mok_megatron.megakernel.binding import MokError as Record

TIMEOUT, OVERFLOW, SHAPE_MISMATCH, PEER_FAILED, BAD_ROUTE = 1, 2, 3, 4, 5

# What each flag of kernels/mok_api.h stands for; {peer} is filled in.
FLAGS = {
    1: "the routes of rank {peer}",
    2: "the tokens (or output gradients) of rank {peer}",
    3: "rank {peer} to push its last row",
    4: "rows of block {index} to arrive",
    5: "the FC1 tiles of block {index}",
    6: "the FC2 tiles of block {index}",
    7: "the dHidden tiles of block {index}",
    8: "the tiles of the macrobatches before",
    9: "the other CTAs of the prepare kernel",
    10: "a barrier inside a CTA",
}


def failure(record: Record, timeout_s: float) -> MokError:
    """The exception for a record whose `code` is not 0."""
    where = f"rank {record.rank} of the expert-parallel group, launch {record.epoch}"
    if record.code == OVERFLOW:
        return MokCapacityError(
            f"{where}: {record.seen} routed rows arrived and the schedule holds {record.expected}; nothing was written "
            f"beyond it, and the step's results are not valid: raise --mok-capacity-rows to at least {record.seen}, "
            "or leave it out (then no routing can exceed it)"
        )
    if record.code == SHAPE_MISMATCH:
        # Where the peer found out, and told this rank, there is no signature of its own.
        seen = f" (signature {record.seen:#010x}, expected {record.expected:#010x})" if record.seen else ""
        return MokInputError(
            f"{where}: rank {record.peer} launched a step of another shape, direction or setting{seen}, so this step's "
            "results are not valid: every rank must run the same layers in the same order with the same --mok-* flags"
        )
    if record.code == PEER_FAILED:
        return MokCapacityError(
            f"{where}: rank {record.peer} could not hold its rows, so this step's results are not valid; its own "
            "message says how many there were"
        )
    if record.code == BAD_ROUTE:
        number = record.seen - (1 << 32) if record.seen >= 1 << 31 else record.seen
        return MokInputError(
            f"{where}: topk_ids holds {number} (at flat index {record.index}), so this step's results are not valid; "
            f"expert numbers are 0 to {record.expected - 1}, and -1 for no route"
        )
    waited_for = FLAGS.get(record.flag, f"flag {record.flag}").format(peer=record.peer, index=record.index)
    return MokTimeoutError(
        f"{where}: waited {timeout_s:g} s for {waited_for} (expected {record.expected}, saw {record.seen}). A rank "
        "that crashed, or that skipped this layer, does this: look for the first error of the others. If the step is "
        "only slow, raise --mok-timeout-s or MOK_TIMEOUT_S"
    )
