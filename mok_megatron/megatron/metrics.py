"""What the MoE layers did, into Megatron's TensorBoard and W&B writers: --log-mok.

Each layer has a `LayerRecord` that the operator tells of its calls. It keeps references to small tensors that the
kernel writes anyway, and CUDA events; nothing is read, and the host waits for nothing, before Megatron's own log
interval, which waits for the device itself. The figures are those of the last microbatch before it.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.utils import get_pg_rank, get_pg_size
from torch import Tensor

from mok_megatron.megatron.validate import megatron_args
from mok_megatron.ops.backend import Routing

DIRECTIONS = ("forward", "backward")

_records: weakref.WeakSet[LayerRecord] = weakref.WeakSet()


def logs_layers() -> bool:
    """Whether Megatron's arguments ask for it (--log-mok)."""
    return bool(getattr(megatron_args(), "log_mok", False))


class LayerRecord:
    """The last calls of one layer; an `Observer` of `mok_moe`.

    Args:
        number: of the layer, from 1, MTP layers behind the others, as Megatron numbers its MoE losses.
        ep_group: whose ranks share the layer's experts.
    """

    def __init__(self, number: int, ep_group: Any) -> None:
        self.number, self.ep_group = number, ep_group
        self.routing: Routing | None = None
        self._events: dict[str, tuple[torch.cuda.Event, torch.cuda.Event]] = {}
        _records.add(self)

    def before(self, direction: str) -> None:
        """Start the clock."""
        if self._timed():
            if direction not in self._events:
                self._events[direction] = tuple(torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[assignment]
            self._events[direction][0].record()

    def after(self, direction: str, routing: Routing | None) -> None:
        """Stop it, and remember where the rows are counted."""
        if direction in self._events and self._timed():
            self._events[direction][1].record()
        if routing is not None:
            self.routing = routing

    def figures(self) -> list[float | Tensor]:
        """Rows of this rank, rows beyond the macrobatch, and milliseconds of each direction; 0 where unknown."""
        assert self.routing is not None
        evicted = (self.routing.used - self.routing.macrobatch_rows).clamp(min=0)
        return [self.routing.rows.sum(), evicted, *(self._milliseconds(name) for name in DIRECTIONS)]

    def _milliseconds(self, direction: str) -> float:
        if direction not in self._events:
            return 0.0
        start, end = self._events[direction]
        end.synchronize()
        return start.elapsed_time(end)

    @staticmethod
    def _timed() -> bool:
        # An event of a graph's capture cannot be read; kernels inside one stay without times.
        return torch.cuda.is_available() and not torch.cuda.is_current_stream_capturing()


def gather(layers: int) -> dict[str, Tensor] | None:
    """The figures of all ranks; collective over the default group. None where no layer of any rank has run.

    Args:
        layers: of the model, MTP layers included.

    Returns:
        On the CPU: `rows` [layers, EP], the mean over the replicas of an EP rank; `evicted`, `forward_ms` and
        `backward_ms` [layers], the largest of any rank, NaN for layers that are no MoE layers. `symmetric_mb` [], the
        largest of any rank, in 2^20 bytes: what torch's own statistics of memory leave out.
    """
    records = [r for r in _records if r.routing is not None]
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    sizes = torch.tensor([get_pg_size(records[0].ep_group) if records else 0], device=device)
    dist.all_reduce(sizes, op=dist.ReduceOp.MAX)
    ranks = int(sizes)
    if ranks == 0:
        return None
    rows = torch.zeros(2, layers, ranks, device=device)  # sums, and how many they are of
    largest = torch.full((3, layers), -1.0, device=device)
    memory = torch.tensor(_symmetric_megabytes(), device=device)
    for record in records:
        mine, *others = record.figures()
        rows[0, record.number - 1, get_pg_rank(record.ep_group)] += mine
        rows[1, record.number - 1, get_pg_rank(record.ep_group)] += 1
        for place, value in enumerate(others):
            largest[place, record.number - 1] = value
    dist.all_reduce(rows)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    dist.all_reduce(memory, op=dist.ReduceOp.MAX)
    mean, most = (rows[0] / rows[1]).cpu(), largest.masked_fill(largest < 0, float("nan")).cpu()
    return {
        "rows": mean,
        "evicted": most[0],
        "forward_ms": most[1],
        "backward_ms": most[2],
        "symmetric_mb": memory.cpu(),
    }


def scalars(found: dict[str, Tensor]) -> dict[str, float]:
    """Names and values for the writers: per layer, then over all layers."""
    named: dict[str, float] = {}
    moe = [i for i in range(found["rows"].shape[0]) if not found["rows"][i].isnan().any()]
    for i in moe:
        rows = found["rows"][i]
        layer = f"mok/layer {i + 1}"
        named |= {f"{layer}/rows of EP rank {rank}": float(n) for rank, n in enumerate(rows)}
        named[f"{layer}/imbalance"] = _imbalance(rows)
        named[f"{layer}/evicted rows"] = float(found["evicted"][i])
        for name in DIRECTIONS:
            if found[f"{name}_ms"][i] > 0:
                named[f"{layer}/{name} ms"] = float(found[f"{name}_ms"][i])
    named["mok/symmetric MB"] = float(found["symmetric_mb"])
    named["mok/imbalance"] = max(_imbalance(found["rows"][i]) for i in moe)
    named["mok/evicted rows"] = sum(float(found["evicted"][i]) for i in moe)
    for name in DIRECTIONS:
        total = sum(float(found[f"{name}_ms"][i]) for i in moe)
        if total > 0:
            named[f"mok/{name} ms"] = total
    return named


def report(args: Any, iteration: int, writer: Any, wandb_writer: Any) -> str | None:
    """Write the figures of this log interval; collective. Returns the line for the log, None without layers."""
    found = gather(args.num_layers + (args.mtp_num_layers or 0))
    if found is None:
        return None
    named = scalars(found)
    if writer is not None:
        for name, value in named.items():
            writer.add_scalar(name, value, iteration)
    if wandb_writer is not None:
        wandb_writer.log(named, iteration)
    line = f" mok of the last microbatch | largest imbalance: {named['mok/imbalance']:.3f}"
    line += f" | evicted rows: {named['mok/evicted rows']:.0f}"
    for name in DIRECTIONS:
        if f"mok/{name} ms" in named:
            line += f" | {name} (ms): {named[f'mok/{name} ms']:.2f}"
    return line + f" | symmetric memory (MB): {found['symmetric_mb']:.0f} |"


def _symmetric_megabytes() -> float:
    if not torch.cuda.is_available():
        return 0.0
    from mok_megatron.megakernel import symmetric_bytes

    return symmetric_bytes() / 2**20


def _imbalance(rows: Tensor) -> float:
    """Rows of the busiest rank by the mean: 1 is perfect."""
    return float(rows.max() / rows.mean()) if rows.sum() > 0 else 1.0
