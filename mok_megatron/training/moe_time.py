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
    """The marks of each layer's last microbatch."""

    def __init__(self) -> None:
        self._marks: dict[tuple[int, str], tuple[Mark, Mark]] = {}

    def timed(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """`MoELayer.forward` with marks around it and, by hooks on its input and output, around its backward."""

        @functools.wraps(forward)
        def call(layer: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
            begin = _mark()
            result = forward(layer, hidden_states, *args, **kwargs)
            output = result[0] if isinstance(result, tuple) else result
            self._keep(layer, "forward", begin)
            if isinstance(output, Tensor) and output.requires_grad and hidden_states.requires_grad:
                started: list[Mark | None] = []
                output.register_hook(lambda gradient: started.append(_mark()))
                hidden_states.register_hook(lambda gradient: self._keep(layer, "backward", started.pop()))
            return result

        return call

    def _keep(self, layer: Any, direction: str, begin: Mark | None) -> None:
        end = _mark()
        if begin is not None and end is not None:
            self._marks[id(layer), direction] = (begin, end)

    def milliseconds(self) -> dict[str, float]:
        """Sum over this rank's layers by direction; empty before a layer has run both."""
        found = {
            name: [_between(*marks) for (_, direction), marks in self._marks.items() if direction == name]
            for name in DIRECTIONS
        }
        return {name: sum(times) for name, times in found.items()} if all(found.values()) else {}


@contextlib.contextmanager
def logged() -> Iterator[None]:
    """Add a line to Megatron's log: milliseconds of the last rank's MoE layers in the last microbatch."""
    from megatron.core.transformer.moe.moe_layer import MoELayer
    from megatron.training import training

    clock, original = Clock(), training.training_log

    def training_log(losses: Any, totals: Any, rate: Any, iteration: int, *args: Any, **kwargs: Any) -> Any:
        result = original(losses, totals, rate, iteration, *args, **kwargs)
        times = clock.milliseconds() if iteration % training.get_args().log_interval == 0 else {}
        if times:
            figures = " | ".join(f"{name} (ms): {value:.2f}" for name, value in times.items())
            training.print_rank_last(f" MoE layers of the last microbatch | {figures} |")
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
