"""What the layer cannot be faster than, by what this hardware and its library do today."""

from dataclasses import dataclass

import torch
import torch.distributed as dist

from mok_megatron.bench.measure import measure_step
from mok_megatron.bench.problem import Problem


@dataclass(frozen=True)
class Floor:
    """Milliseconds.

    ``forward``, ``backward``: the products alone, on as many rows as a balanced routing gives a rank, in place.
    ``wire``: the bytes that this routing moves between ranks in a forward, and again in a backward, at the measured
    rate of copies between peers; None where there are no peers.
    """

    forward: float
    backward: float
    wire: float | None
    wire_gb_per_s: float | None


def measure_floor(problem: Problem, group: dist.ProcessGroup | None, iterations: int) -> Floor:
    """Times torch._grouped_mm on the forward's two products per expert and the backward's four."""
    forward, backward = _products(problem, group, iterations)
    rate = _peer_rate(problem.x.device, group)
    wire = None
    if rate is not None and group is not None:
        # Rows go out and results come back at once, in opposite directions.
        wire = _bytes_sent(problem, group) / (rate * 1e9) * 1e3
    return Floor(forward, backward, wire, rate)


def _products(problem: Problem, group: dist.ProcessGroup | None, iterations: int) -> tuple[float, float]:
    shape, x = problem.shape, problem.x
    local = problem.w1.shape[0]
    rows = max(local, shape.tokens * shape.topk // local * local)
    ends = torch.arange(1, local + 1, device=x.device, dtype=torch.int32) * (rows // local)
    tokens = x.new_empty(rows, shape.hidden).normal_()
    inner = x.new_empty(rows, shape.intermediate).normal_()
    both = x.new_empty(rows, 2 * shape.intermediate).normal_()

    shared = None
    if problem.shared is not None:
        outer, middle = x.new_empty(len(x), 2 * shape.shared).normal_(), x.new_empty(len(x), shape.shared).normal_()
        shared = (*problem.shared, outer, middle)

    def forward() -> None:
        torch._grouped_mm(tokens, problem.w1.transpose(1, 2), offs=ends)
        torch._grouped_mm(inner, problem.w2.transpose(1, 2), offs=ends)
        if shared is not None:
            w1, w2, _, middle = shared
            x @ w1.t()
            middle @ w2.t()

    def backward() -> None:
        torch._grouped_mm(tokens, problem.w2, offs=ends)
        torch._grouped_mm(tokens.t(), inner, offs=ends)
        torch._grouped_mm(both, problem.w1, offs=ends)
        torch._grouped_mm(both.t(), tokens, offs=ends)
        if shared is not None:
            w1, w2, outer, middle = shared
            x @ w2
            x.t() @ middle
            outer @ w1
            outer.t() @ x

    return (
        measure_step(forward, x.device, group, iterations),
        measure_step(backward, x.device, group, iterations),
    )


def _bytes_sent(problem: Problem, group: dist.ProcessGroup) -> float:
    """Bytes of routed rows that the busiest rank sends to others or gets from them, whichever is more."""
    local = problem.w1.shape[0]
    owner = problem.topk_ids // local
    counts = torch.bincount(owner.flatten(), minlength=group.size()).to(problem.x.device)
    table = [torch.empty_like(counts) for _ in range(group.size())]
    dist.all_gather(table, counts, group=group)
    matrix = torch.stack(table)  # [source, destination]
    matrix.fill_diagonal_(0)
    rows = int(torch.maximum(matrix.sum(0), matrix.sum(1)).max())
    return float(rows * problem.shape.hidden * problem.x.element_size())


def _peer_rate(device: torch.device, group: dist.ProcessGroup | None, size: int = 2**28) -> float | None:
    """GB/s a GPU of copies out of the next rank's symmetric memory, all ranks at once; None without peers."""
    if group is None or group.size() == 1 or device.type != "cuda":
        return None
    import torch.distributed._symmetric_memory as symmetric

    mine = symmetric.empty(size, dtype=torch.uint8, device=device)
    handle = symmetric.rendezvous(mine, group.group_name)
    peer = handle.get_buffer((group.rank() + 1) % group.size(), (size,), torch.uint8)
    here = torch.empty(size, dtype=torch.uint8, device=device)
    handle.barrier()
    milliseconds = measure_step(lambda: here.copy_(peer), device, group, 10)
    handle.barrier()
    return size / milliseconds / 1e6
