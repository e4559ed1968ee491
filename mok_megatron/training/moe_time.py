"""How long whole MoE layers take in a training, router and shared expert included, under any dispatcher.

`mok_megatron.pretrain` prints it at each log interval where --log-mok is given, so that a comparison can say how much
of a step is MoE at all. Measured by events on the stream that the layer runs on; nothing waits for them before
Megatron's own log interval, which waits for the device itself.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor

Mark = torch.cuda.Event | float
DIRECTIONS = ("forward", "backward")


class Clock:
    """The marks of all layers and microbatches since they were last taken."""

    def __init__(self) -> None:
        self._marks: dict[str, list[tuple[Mark, Mark]]] = {}

    def timed(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """`MoELayer.forward` with marks around it and, by hooks on its input and output, around its backward."""

        @functools.wraps(forward)
        def call(layer: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
            begin = _mark()
            result = forward(layer, hidden_states, *args, **kwargs)
            output = result[0] if isinstance(result, tuple) else result
            self._keep("forward", begin)
            if isinstance(output, Tensor) and output.requires_grad and hidden_states.requires_grad:
                started: list[Mark | None] = []
                output.register_hook(lambda gradient: started.append(_mark()))
                hidden_states.register_hook(lambda gradient: self._keep("backward", started.pop()))
            return result

        return call

    def _keep(self, direction: str, begin: Mark | None) -> None:
        end = _mark()
        if begin is not None and end is not None:
            self._marks.setdefault(direction, []).append((begin, end))

    def take(self) -> dict[str, list[tuple[Mark, Mark]]]:
        """The marks by direction; it starts anew."""
        found, self._marks = self._marks, {}
        return found


@contextlib.contextmanager
def logged() -> Iterator[None]:
    """Add a line to Megatron's log: milliseconds a step of the last rank's MoE layers, in all microbatches."""
    from megatron.core.transformer.moe.moe_layer import MoELayer
    from megatron.training import training

    clock, original = Clock(), training.training_log

    def training_log(losses: Any, totals: Any, rate: Any, iteration: int, *args: Any, **kwargs: Any) -> Any:
        result = original(losses, totals, rate, iteration, *args, **kwargs)
        marks = clock.take()  # at every step, so that none pile up
        if iteration % training.get_args().log_interval == 0 and all(name in marks for name in DIRECTIONS):
            figures = " | ".join(f"{name} (ms): {sum(_between(*m) for m in marks[name]):.2f}" for name in DIRECTIONS)
            training.print_rank_last(f" MoE layers of a step | {figures} |")
        return result

    with (
        mock.patch.object(MoELayer, "forward", clock.timed(MoELayer.forward)),
        mock.patch.object(training, "training_log", training_log),
    ):
        yield


def _mark() -> Mark | None:
    """Now: on the device's current stream, or by the host's clock where there is no device. None in a graph's capture,
    whose events cannot be read."""
    if not torch.cuda.is_available():
        return time.perf_counter()
    if torch.cuda.is_current_stream_capturing():
        return None
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _between(begin: Mark, end: Mark) -> float:
    if isinstance(begin, float):
        assert isinstance(end, float)
        return 1e3 * (end - begin)
    assert isinstance(end, torch.cuda.Event)
    end.synchronize()
    return begin.elapsed_time(end)
