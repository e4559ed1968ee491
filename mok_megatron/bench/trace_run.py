"""Records a forward and a backward of the megakernel, tile by tile, and how long its kernels take in a row of calls."""

import statistics
from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist

from mok_megatron.bench import trace
from mok_megatron.bench.layers import MokLayer
from mok_megatron.bench.measure import leaves, meet
from mok_megatron.bench.problem import Problem
from mok_megatron.bench.trace import TILE, Trace

TILES_A_CTA = 4096  # more than any layer of the model descriptions gives one CTA; later ones are not recorded


PROFILED_CALLS = 6
DIRECTIONS = ("forward", "backward")


def record(layer: MokLayer, problem: Problem, group: dist.ProcessGroup | None, title: str) -> dict[str, Trace]:
    """ "forward" and "backward" of one call, after one that is not recorded. Every rank of the group takes part."""
    from mok_megatron.megakernel.workspace import all_workspaces

    def call() -> Callable[[], None]:
        x, topk_weights = leaves(problem)
        y = layer(x, topk_weights)
        return lambda: y.backward(problem.dy)

    call()()
    torch.cuda.synchronize()
    workspaces = all_workspaces()
    ctas = max(workspace.struct.num_ctas for workspace in workspaces)
    buffer = torch.zeros(ctas * TILES_A_CTA * TILE.itemsize, dtype=torch.uint8, device=problem.x.device)

    def recorded(name: str) -> Trace:
        torch.cuda.synchronize()
        found = trace.read(buffer.cpu().numpy(), ctas, f"{name}, {title}")
        buffer.zero_()
        return found

    for workspace in workspaces:
        workspace.struct.trace, workspace.struct.trace_tiles = buffer.data_ptr(), TILES_A_CTA
    try:
        meet(problem.x.device, group)
        backward = call()
        forward = recorded("forward")
        meet(problem.x.device, group)
        backward()
        return {"forward": forward, "backward": recorded("backward")}
    finally:
        torch.cuda.synchronize()  # a launch may still write into the buffer
        for workspace in workspaces:
            workspace.struct.trace, workspace.struct.trace_tiles = None, 0


def kernel_times(layer: MokLayer, problem: Problem, group: dist.ProcessGroup | None) -> dict[str, dict[str, float]]:
    """Microseconds of the two kernels of each direction, medians over calls as `measure` makes them:
    {"forward": {"prepare": .., "megakernel": ..}, "backward": ..}. Every rank of the group takes part.

    RuntimeError if the profiler reports no such kernels.
    """
    activity = torch.profiler.ProfilerActivity.CUDA
    with torch.profiler.profile(activities=[activity], acc_events=True) as profile:
        for _ in range(PROFILED_CALLS):
            x, topk_weights = leaves(problem)
            layer.clear_gradients()
            meet(problem.x.device, group)
            layer(x, topk_weights).backward(problem.dy)
        torch.cuda.synchronize()
    return medians((event.time_range.start, event.name, event.time_range.elapsed_us()) for event in profile.events())


def medians(kernels: Iterable[tuple[float, str, float]]) -> dict[str, dict[str, float]]:
    """The result of `kernel_times`, from (start, name, microseconds) of everything that ran on the device.

    A prepare kernel belongs to the megakernel that follows it.
    """
    times: dict[str, dict[str, list[float]]] = {name: {"prepare": [], "megakernel": []} for name in DIRECTIONS}
    prepared = None
    for _, name, length in sorted(kernels):
        if "prepare_kernel" in name:
            prepared = length
        elif "megakernel" in name:
            if prepared is None:
                raise RuntimeError(f"the profile has no prepare_kernel before {name}")
            of = times["forward" if "Forward" in name else "backward"]
            of["prepare"].append(prepared)
            of["megakernel"].append(length)
            prepared = None
    if not all(of["megakernel"] for of in times.values()):
        raise RuntimeError("the profile has no megakernel of each direction")
    return {direction: {part: statistics.median(of[part]) for part in of} for direction, of in times.items()}
