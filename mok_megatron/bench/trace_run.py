"""Records a forward and a backward of the megakernel, tile by tile."""

from collections.abc import Callable

import torch
import torch.distributed as dist

from mok_megatron.bench import trace
from mok_megatron.bench.layers import MokLayer
from mok_megatron.bench.measure import leaves, meet
from mok_megatron.bench.problem import Problem
from mok_megatron.bench.trace import TILE, Trace

TILES_A_CTA = 4096  # more than any layer of the model descriptions gives one CTA; later ones are not recorded


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
