"""One launch each: allocates what it returns, fills in the C structs, and enqueues prepare and megakernel.

The two are apart (`prepare`, `run`) because ranks that share a device must all have prepared before any of them runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mok_megatron.megakernel.binding import (
    GRAD_BF16,
    GRAD_FP32,
    MokBackward,
    MokForward,
    MokGrad,
    MokSchedule,
    enqueue,
)
from mok_megatron.megakernel.workspace import Workspace


@dataclass(frozen=True)
class ScheduleTensors:
    """The schedule as the kernel writes it: `ops/schedule.py`, on the device. All int32 but `row_weight`."""

    row_source: Tensor
    """[capacity]: source_rank * (max T * K) + token * K + k, -1 for padding."""
    row_weight: Tensor
    """[capacity] fp32: the row's router weight, 0 for padding."""
    block_expert: Tensor
    """[capacity / 128]."""
    expert_offsets: Tensor
    """[E_local + 1]."""
    expert_rows: Tensor
    """[E_local]."""
    info: Tensor
    """[3]: rows in use with padding, max T over the ranks, whether any rank evicts rows."""

    @staticmethod
    def allocate(workspace: Workspace) -> ScheduleTensors:
        """Uninitialised tensors of the workspace's capacity."""
        shape = workspace.shape
        sizes = (shape.capacity_rows // 128, shape.experts_local + 1, shape.experts_local, 3)
        block_expert, offsets, rows, info = (_empty(workspace, n, dtype=torch.int32) for n in sizes)
        return ScheduleTensors(
            _empty(workspace, shape.capacity_rows, dtype=torch.int32),
            _empty(workspace, shape.capacity_rows, dtype=torch.float32),
            block_expert,
            offsets,
            rows,
            info,
        )

    def tensors(self) -> list[Tensor]:
        """In the order of the C struct."""
        return [self.row_source, self.row_weight, self.block_expert, self.expert_offsets, self.expert_rows, self.info]

    def struct(self) -> MokSchedule:
        """The C struct."""
        return MokSchedule(*map(_pointer, self.tensors()))


@dataclass(frozen=True)
class Operands:
    """What both directions read. Contiguous, on the workspace's device."""

    x: Tensor
    """[T, H] bf16."""
    topk_ids: Tensor
    """[T, K] int32."""
    topk_weights: Tensor
    """[T, K] fp32."""
    w1: Tensor
    """[E_local, 2I, H] bf16."""
    w2: Tensor
    """[E_local, H, I] bf16."""
    shared_w1: Tensor | None = None
    """[2Is, H] bf16."""
    shared_w2: Tensor | None = None
    """[H, Is] bf16."""
    shared_scale: Tensor | None = None
    """[T] fp32."""

    def tensors(self) -> tuple[Tensor | None, ...]:
        """In the order of the fields."""
        return (
            self.x,
            self.topk_ids,
            self.topk_weights,
            self.w1,
            self.w2,
            self.shared_w1,
            self.shared_w2,
            self.shared_scale,
        )


@dataclass(frozen=True)
class Saved:
    """What a forward leaves for its backward; tensors only."""

    schedule: ScheduleTensors
    x_rows: Tensor
    """[ring_rows, H] bf16: dispatched tokens of the last macrobatch."""
    gate_up: Tensor
    """[ring_rows, 2I] bf16: their FC1 output, before the activation."""
    shared_gate_up: Tensor
    """[T, 2Is] bf16, likewise of the shared expert."""

    def tensors(self) -> list[Tensor]:
        """As a flat list, for an operator's results."""
        return [self.x_rows, self.gate_up, self.shared_gate_up, *self.schedule.tensors()]

    @staticmethod
    def from_tensors(tensors: list[Tensor]) -> Saved:
        """The reverse of `tensors`."""
        x_rows, gate_up, shared_gate_up, *schedule = tensors
        return Saved(ScheduleTensors(*schedule), x_rows, gate_up, shared_gate_up)


class ForwardStep:
    """The forward of one rank. After `run`: `y` [T, H] bf16, and `saved`. `describe_only` allocates and no more."""

    def __init__(self, workspace: Workspace, operands: Operands, describe_only: bool = False) -> None:
        shape, tokens = workspace.shape, operands.x.shape[0]
        self.workspace, self.operands = workspace, operands
        self.y = torch.empty_like(operands.x)
        self.saved = Saved(
            ScheduleTensors.allocate(workspace),
            _empty(workspace, shape.ring_rows, shape.hidden),
            _empty(workspace, shape.ring_rows, 2 * shape.intermediate),
            _empty(workspace, tokens, 2 * shape.shared_intermediate),
        )
        if describe_only:  # operands without memory, while torch traces
            return
        kept = self.saved
        self._struct = MokForward(
            tokens,
            *map(_pointer, operands.tensors()),
            *map(_pointer, (self.y, kept.x_rows, kept.gate_up, kept.shared_gate_up)),
        )

    def prepare(self) -> None:
        """Send routes, stage x, build the schedule."""
        _enqueue("mok_forward_prepare", self)

    def run(self) -> None:
        """The megakernel."""
        _enqueue("mok_forward", self)


class BackwardStep:
    """The backward of one rank.

    Args:
        workspace: that of the forward.
        operands: those of the forward.
        saved: what the forward left; `x_rows` and `gate_up` are overwritten where rows were evicted.
        dy: [T, H] bf16, contiguous.
        targets: `main_grad` tensors (fp32 or bf16, of the weights' shapes) to add to, by weight: w1, w2, shared_w1,
            shared_w2; None means a fresh bf16 gradient.

    After `run`: `dx` [T, H] bf16, `dtopk_weights` [T, K] fp32, `dshared_scale` [T] fp32 or None, and `fresh`, the new
    gradients in the order of the targets, None where there was a target or no weight.
    """

    def __init__(
        self, workspace: Workspace, operands: Operands, saved: Saved, dy: Tensor, targets: Sequence[Tensor | None]
    ) -> None:
        self.workspace, self.operands, self.saved = workspace, operands, saved
        o = operands
        self.dx = torch.empty_like(o.x)
        self.dtopk_weights = torch.empty_like(o.topk_weights)
        self.dshared_scale = None if o.shared_scale is None else torch.empty_like(o.shared_scale)
        pairs = list(zip((o.w1, o.w2, o.shared_w1, o.shared_w2), targets, strict=True))
        self.fresh = [torch.empty_like(w) if w is not None and target is None else None for w, target in pairs]
        self._struct = MokBackward(
            o.x.shape[0],
            *map(_pointer, (dy, o.x, o.topk_ids, o.w1, o.w2, o.shared_w1, o.shared_w2, o.shared_scale)),
            *map(_pointer, (saved.x_rows, saved.gate_up, saved.shared_gate_up)),
            *map(_pointer, (self.dx, self.dtopk_weights, self.dshared_scale)),
            *(_grad(target, fresh) for target, fresh in zip(targets, self.fresh, strict=True)),
        )

    def prepare(self) -> None:
        """Stage dy."""
        _enqueue("mok_backward_prepare", self)

    def run(self) -> None:
        """The megakernel."""
        _enqueue("mok_backward", self)


def _enqueue(name: str, step: ForwardStep | BackwardStep) -> None:
    stream = step.workspace.launch_stream()
    enqueue(name, step.workspace.struct, step.saved.schedule.struct(), step._struct, stream)


def _grad(target: Tensor | None, fresh: Tensor | None) -> MokGrad:
    if target is None:
        return MokGrad(_pointer(fresh), GRAD_BF16, 0)
    return MokGrad(target.data_ptr(), GRAD_FP32 if target.dtype == torch.float32 else GRAD_BF16, 1)


def _pointer(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _empty(workspace: Workspace, *sizes: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(sizes, dtype=dtype, device=workspace.device)
