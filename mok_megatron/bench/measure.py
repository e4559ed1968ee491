"""Errors against the reference in float64, and times of forward and backward."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor

from mok_megatron.bench.layers import Layer, MokLayer
from mok_megatron.bench.problem import Problem
from mok_megatron.config import MokConfig

# What a correct implementation stays under, in relative Frobenius norm: a few units of the type's last place,
# grown by the sums of two products; a wrong row or weight gives tens of percent.
TOLERANCE = {torch.bfloat16: 2e-2, torch.float32: 1e-4, torch.float64: 1e-9}
# Likewise of E4M3 with block scales: each rounding adds 2.6e-2, and all of them together 6 to 7e-2.
FP8_TOLERANCE = 9e-2
HEAD_START_CYCLES = 3_000_000  # of the GPU's clock: 1.5 ms at 2 GHz
PART = 2**24  # elements that are widened at a time
RESULTS = ("y", "dx", "dtopk_weights", "dw1", "dw2")


@dataclass(frozen=True)
class Times:
    """Medians over iterations of the slowest rank's time, in milliseconds."""

    forward: float
    backward: float
    both: float


def run_once(layer: Layer, problem: Problem) -> dict[str, Tensor]:
    """One forward and backward: y and every gradient, by the names in RESULTS."""
    layer.clear_gradients()
    x, topk_weights = leaves(problem)
    y = layer(x, topk_weights)
    y.backward(problem.dy)
    assert x.grad is not None and topk_weights.grad is not None
    dw1, dw2 = layer.weight_gradients()
    return dict(zip(RESULTS, (y.detach(), x.grad, topk_weights.grad, dw1, dw2), strict=True))


def leaves(problem: Problem) -> tuple[Tensor, Tensor]:
    """Fresh x and topk_weights that take gradients."""
    return problem.x.detach().clone().requires_grad_(), problem.topk_weights.detach().clone().requires_grad_()


def reference_dtype(problem: Problem) -> torch.dtype:
    """float64, or float32 where float64 copies of the weights and their gradients would crowd the device."""
    if not problem.x.is_cuda:
        return torch.float64
    needed = 2 * 8 * (problem.w1.numel() + problem.w2.numel())
    return (
        torch.float64 if needed < torch.cuda.get_device_properties(problem.x.device).total_memory / 3 else torch.float32
    )


def reference(problem: Problem, group: dist.ProcessGroup | None, dtype: torch.dtype) -> dict[str, Tensor]:
    """The same results by the reference backend in a wider type, from the same (rounded) inputs."""
    wide = problem.to(dtype)
    return run_once(MokLayer(wide, group, MokConfig(backend="reference"), main_grad=False), wide)


def errors(
    results: dict[str, Tensor], expected: dict[str, Tensor], group: dist.ProcessGroup | None
) -> dict[str, float]:
    """Relative error of each result over all ranks: norm of the difference by the norm of what is expected."""
    names = list(RESULTS)
    sums = torch.stack(
        [torch.stack([_square_sum(results[name], expected[name]), _square_sum(expected[name])]) for name in names]
    )
    if group is not None:
        dist.all_reduce(sums, group=group)
    found = (sums[:, 0] / sums[:, 1]).sqrt().tolist()
    return dict(zip(names, found, strict=True))


def _square_sum(values: Tensor, less: Tensor | None = None) -> Tensor:
    """Sum of squares in float64 of ``values``, or of their difference to ``less``; a part at a time, to save memory."""
    total = torch.zeros((), dtype=torch.float64, device=values.device)
    others = None if less is None else less.reshape(-1).split(PART)
    for i, part in enumerate(values.reshape(-1).split(PART)):
        total += (part.double() if others is None else part.double() - others[i].double()).square().sum()
    return total


def is_correct(found: dict[str, float], dtype: torch.dtype, is_fp8: bool = False) -> bool:
    """Whether every error is below TOLERANCE or, of a layer that multiplies in FP8, FP8_TOLERANCE; a NaN is not."""
    tolerance = FP8_TOLERANCE if is_fp8 else TOLERANCE[dtype]
    return all(error < tolerance for error in found.values())


def measure(layer: Layer, problem: Problem, group: dist.ProcessGroup | None, iterations: int, warmup: int = 5) -> Times:
    """Times of ``iterations`` forwards and backwards after ``warmup`` unmeasured ones.

    Gradients are cleared, and the ranks meet, before each iteration and outside its time.
    """
    clock = _CudaClock() if problem.x.is_cuda else _HostClock()
    x, topk_weights = leaves(problem)
    for iteration in range(warmup + iterations):
        x.grad = topk_weights.grad = None
        layer.clear_gradients()
        meet(problem.x.device, group)
        clock.start()
        y = layer(x, topk_weights)
        clock.lap()
        y.backward(problem.dy)
        clock.lap()
        if iteration < warmup:
            clock.forget()
    return _summary(clock.laps(), problem.x.device, group)


def measure_step(
    step: Callable[[], object], device: torch.device, group: dist.ProcessGroup | None, iterations: int
) -> float:
    """Median over iterations of the slowest rank's time of ``step``, in milliseconds."""
    clock = _CudaClock() if device.type == "cuda" else _HostClock()
    for iteration in range(3 + iterations):
        meet(device, group)
        clock.start()
        step()
        clock.lap()
        if iteration < 3:
            clock.forget()
    return statistics.median(_slowest(torch.tensor(clock.laps(), dtype=torch.float64), device, group)[:, 0].tolist())


def meet(device: torch.device, group: dist.ProcessGroup | None) -> None:
    """All ranks start together: on a GPU its stream waits for the peers', on the CPU the process does.

    The GPU is kept busy for a moment before, so that the host gets ahead of it, as in training. What waits for the
    GPU on the host loses that lead and pays for it, as in training too.
    """
    if device.type == "cuda":
        torch.cuda._sleep(HEAD_START_CYCLES)
    if group is not None:
        dist.all_reduce(torch.zeros(1, device=device), group=group)


def _summary(laps: list[list[float]], device: torch.device, group: dist.ProcessGroup | None) -> Times:
    table = torch.tensor(laps, dtype=torch.float64)
    table = _slowest(torch.cat([table, table.sum(1, keepdim=True)], dim=1), device, group)
    return Times(*(statistics.median(column) for column in table.t().tolist()))


def _slowest(table: Tensor, device: torch.device, group: dist.ProcessGroup | None) -> Tensor:
    if group is None:
        return table
    table = table.to(device)
    dist.all_reduce(table, op=dist.ReduceOp.MAX, group=group)
    return table.cpu()


class _HostClock:
    """Laps of each iteration in milliseconds, by the process's clock."""

    def __init__(self) -> None:
        self.marks: list[list[float]] = []

    def start(self) -> None:
        self.marks.append([time.perf_counter()])

    def lap(self) -> None:
        self.marks[-1].append(time.perf_counter())

    def forget(self) -> None:
        self.marks.clear()

    def laps(self) -> list[list[float]]:
        return [[1e3 * (after - before) for before, after in pairwise(m)] for m in self.marks]


class _CudaClock:
    """Laps of each iteration in milliseconds, by events on the current stream."""

    def __init__(self) -> None:
        self.marks: list[list[torch.cuda.Event]] = []

    def start(self) -> None:
        self.marks.append([])
        self.lap()

    def lap(self) -> None:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self.marks[-1].append(event)

    def forget(self) -> None:
        self.marks.clear()

    def laps(self) -> list[list[float]]:
        torch.cuda.synchronize()
        return [[before.elapsed_time(after) for before, after in pairwise(m)] for m in self.marks]
