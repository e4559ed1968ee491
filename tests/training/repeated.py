"""Trains through `mok_megatron.pretrain` several times in one process; see features.py."""

from __future__ import annotations

import contextlib
import io
import os
import sys
import threading
from typing import Any

import torch

DEADLINE_S = 60.0
"""Of one training."""


def train(flags: list[str]) -> list[float]:
    """The losses of the steps; what Megatron prints is dropped, and its state is as new afterwards."""
    from megatron.training import training

    from mok_megatron import pretrain

    losses: list[float] = []
    original = training.training_log

    def record(loss_dict: dict[str, torch.Tensor], *args: Any, **kwargs: Any) -> Any:
        if loss_dict:
            losses.append(float(loss_dict["lm loss"]))
        return original(loss_dict, *args, **kwargs)

    watchdog = threading.Timer(DEADLINE_S, give_up)
    watchdog.daemon = True
    watchdog.start()
    training.training_log = record
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            pretrain.run(flags)
        told = [losses]  # the last pipeline stage knows them
        torch.distributed.broadcast_object_list(told, src=torch.distributed.get_world_size() - 1)
    finally:
        watchdog.cancel()
        training.training_log = original
        reset()
    return told[0]


def give_up() -> None:
    """A training that hangs ends its process; the stack says where."""
    import faulthandler

    print(f"rank {rank()}: no end within {DEADLINE_S} s", file=sys.stderr, flush=True)
    faulthandler.dump_traceback()
    os._exit(1)


def reset() -> None:
    """Megatron's global state, except the process group."""
    from megatron.core import full_cuda_graph
    from megatron.core.transformer.moe.moe_logging import destroy_moe_metrics_tracker
    from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper
    from megatron.training.determinism import DETERMINISM_ENV_VAR_DEFAULTS
    from megatron.training.training import destroy_global_state

    torch.use_deterministic_algorithms(False)
    for name in DETERMINISM_ENV_VAR_DEFAULTS:
        os.environ.pop(name, None)
    destroy_global_state()
    destroy_moe_metrics_tracker()
    MTPLossLoggingHelper.tracker.clear()
    for table in (full_cuda_graph.FullCudaGraphWrapper.cuda_graph, full_cuda_graph.FullCudaGraphWrapper.result):
        table.update(training=None, validation=None)
    full_cuda_graph.FullCudaGraphWrapper.curr_iteration.update(training=0, validation=0)
    full_cuda_graph.StaticBufferLoader.static_buffers.update(training=[], validation=[])


def rank() -> int:
    """Of this process."""
    return int(os.environ.get("RANK", "0"))


def ranks() -> int:
    """Of this launch."""
    return int(os.environ.get("WORLD_SIZE", "1"))
