"""How long the host takes to enqueue a MoE layer, in a training of Megatron's; see features.py."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch

from tests.training.repeated import ranks, train

FORWARD_US, BACKWARD_US = 150, 200
"""Of the host, to enqueue a layer."""
BUSY_CYCLES = 10_000_000
"""Of the device, 5 ms: longer than the host takes for a layer's direction."""


def host_times(flags: list[str]) -> dict[str, Any]:
    """Microseconds that the host needs to enqueue a MoE layer, against the limits; medians over microbatches.

    `operator` is `mok_moe` with its autograd: all that stands for dispatch, experts and combine. `layer` is all of
    Megatron's MoELayer, with its router and losses; `backend` is the part behind `mok_moe`: checks, allocations and
    launches. The device is kept busy, so that it is always far behind the host.
    """
    from mok_megatron.megakernel import MegakernelBackend
    from mok_megatron.megatron import experts
    from mok_megatron.megatron.layer import MokMoELayer
    from mok_megatron.ops import moe

    times: dict[str, list[float]] = {}
    layer_forward = MokMoELayer.forward

    def clocked(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            begin = time.perf_counter()
            result = function(*args, **kwargs)
            times.setdefault(name, []).append(1e6 * (time.perf_counter() - begin))
            return result

        return call

    def forward(self: Any, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        begin: list[float] = []

        def start_of_backward(gradient: torch.Tensor) -> None:
            torch.cuda._sleep(BUSY_CYCLES)
            begin.append(time.perf_counter())

        torch.cuda._sleep(BUSY_CYCLES)
        output, bias = clocked("layer forward", layer_forward)(self, hidden_states, *args, **kwargs)
        output.register_hook(start_of_backward)
        hidden_states.register_hook(
            lambda gradient: times.setdefault("layer backward", []).append(1e6 * (time.perf_counter() - begin[0]))
        )
        return output, bias

    backward = staticmethod(clocked("operator backward", moe._MokMoe.backward))
    with (
        mock.patch.object(MokMoELayer, "forward", forward),
        mock.patch.object(experts, "mok_moe", clocked("operator forward", experts.mok_moe)),
        mock.patch.object(moe._MokMoe, "backward", backward),
        mock.patch.object(MegakernelBackend, "forward", clocked("backend forward", MegakernelBackend.forward)),
        mock.patch.object(MegakernelBackend, "backward", clocked("backend backward", MegakernelBackend.backward)),
    ):
        ep = ["--expert-model-parallel-size", str(min(2, ranks()))]
        train([*flags, *ep, "--train-iters", "24", "--use-distributed-optimizer", "--moe-token-dispatcher-type", "mok"])
    medians = {name: statistics.median(values[len(values) // 3 :]) for name, values in times.items()}
    alike = medians["operator forward"] < FORWARD_US and medians["operator backward"] < BACKWARD_US
    return {"verdict": "ok" if alike else "slower", "us": medians}
