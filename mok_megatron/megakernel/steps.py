"""One launch each: allocates what it returns, fills in the C structs, and enqueues prepare and megakernel.

The two are apart (`prepare`, `run`) because ranks that share a device must all have prepared before any of them runs.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from mok_megatron.megakernel.binding import (
    GRAD_BF16,
    GRAD_FP32,
    MokBackward,
    MokForward,
    MokGrad,
    MokScaledWeights,
    MokSchedule,
    enqueue,
)
from mok_megatron.megakernel.scaled import MxWeights
from mok_megatron.megakernel.workspace import Workspace

ALIGNMENT = 128
"""Elements of 4 bytes at whose multiples each tensor of a schedule starts: 512 bytes, as torch aligns allocations."""


class ScheduleTensors(NamedTuple):
    """The schedule as the kernel writes it: `ops/schedule.py`, on the device, in one allocation."""

    memory: Tensor
    """[n] int32."""
    capacity: int
    """Rows."""
    experts: int
    """E_local."""

    @staticmethod
    def allocate(workspace: Workspace) -> ScheduleTensors:
        """Uninitialised tensors of the workspace's capacity."""
        capacity, experts = workspace.shape.capacity_rows, workspace.shape.experts_local
        size = _schedule_starts(capacity, experts)[-1]
        return ScheduleTensors(_empty(workspace, size, dtype=torch.int32), capacity, experts)

    @property
    def row_source(self) -> Tensor:
        """[capacity]: source_rank * (max T * K) + token * K + k, -1 for padding."""
        return self._part(0, self.capacity)

    @property
    def row_weight(self) -> Tensor:
        """[capacity] fp32: the row's router weight, 0 for padding."""
        return self._part(1, self.capacity).view(torch.float32)

    @property
    def block_expert(self) -> Tensor:
        """[capacity / 128]."""
        return self._part(2, self.capacity // 128)

    @property
    def expert_offsets(self) -> Tensor:
        """[E_local + 1]."""
        return self._part(3, self.experts + 1)

    @property
    def expert_rows(self) -> Tensor:
        """[E_local]."""
        return self._part(4, self.experts)

    @property
    def info(self) -> Tensor:
        """[3]: rows in use with padding, max T over the ranks, whether any rank evicts rows."""
        return self._part(5, 3)

    def struct(self) -> MokSchedule:
        """The C struct."""
        start = self.memory.data_ptr()
        return MokSchedule(*[start + 4 * place for place in _schedule_starts(self.capacity, self.experts)[:-1]])

    def _part(self, number: int, size: int) -> Tensor:
        start = _schedule_starts(self.capacity, self.experts)[number]
        return self.memory[start : start + size]


@functools.cache
def _schedule_starts(capacity: int, experts: int) -> tuple[int, ...]:
    """Where the tensors of a schedule start, in the order of the C struct, in elements; last: the number of all."""
    starts = [0]
    for size in (capacity, capacity, capacity // 128, experts + 1, experts, 3):
        starts.append(-(-(starts[-1] + size) // ALIGNMENT) * ALIGNMENT)
    return tuple(starts)


class Operands(NamedTuple):
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
    scaled: Sequence[Tensor] = ()
    """In FP8: the weights as `scaled.weights_in_format` gives them."""


class Saved(NamedTuple):
    """What a forward leaves for its backward."""

    schedule: ScheduleTensors
    x_rows: Tensor
    """[ring_rows, bytes of a row] uint8: dispatched tokens of the last macrobatch, bf16 [H] (also in MXFP8), or with
    block scales values and scales (`scaled_row_bytes` in kernels/layout.h)."""
    gate_up: Tensor
    """[ring_rows, 2I] bf16: their FC1 output, before the activation."""
    shared_gate_up: Tensor | None
    """[T, 2Is] bf16, likewise of the shared expert; None without one."""

    def tensors(self) -> list[Tensor]:
        """As a flat list, for an operator's results."""
        kept = [self.schedule.memory, self.x_rows, self.gate_up]
        return kept if self.shared_gate_up is None else [*kept, self.shared_gate_up]

    @staticmethod
    def from_tensors(workspace: Workspace, tensors: Sequence[Tensor]) -> Saved:
        """The reverse of `tensors`."""
        shape = workspace.shape
        memory, x_rows, gate_up, *shared = tensors
        schedule = ScheduleTensors(memory, shape.capacity_rows, shape.experts_local)
        return Saved(schedule, x_rows, gate_up, shared[0] if shared else None)


class _Step:
    """What both directions share: the launches."""

    NAMES: tuple[str, str]
    """The library's functions."""

    workspace: Workspace
    _schedule: MokSchedule
    _struct: MokForward | MokBackward

    def prepare(self) -> None:
        """The first launch: send routes and stage x, build the schedule; or stage dy."""
        self._enqueue(self.NAMES[0], self.workspace.launch_stream())

    def run(self) -> None:
        """The megakernel."""
        self._enqueue(self.NAMES[1], self.workspace.launch_stream())

    def launch(self) -> None:
        """Both, one after the other: where no other rank shares the device."""
        stream = self.workspace.launch_stream()
        self._enqueue(self.NAMES[0], stream)
        self._enqueue(self.NAMES[1], stream)

    def _enqueue(self, name: str, stream: int) -> None:
        enqueue(name, self.workspace.struct, self._schedule, self._struct, stream)


class ForwardStep(_Step):
    """The forward of one rank. After `run`: `y` [T, H] bf16, and `saved`. `describe_only` allocates and no more."""

    NAMES = ("mok_forward_prepare", "mok_forward")

    def __init__(self, workspace: Workspace, operands: Operands, describe_only: bool = False) -> None:
        shape, o = workspace.shape, operands
        tokens = o.x.shape[0]
        self.workspace, self.operands = workspace, operands
        self.y = torch.empty_like(o.x)
        schedule = ScheduleTensors.allocate(workspace)
        x_rows = _empty(workspace, shape.ring_rows, workspace.row_bytes, dtype=torch.uint8)
        gate_up = _empty(workspace, shape.ring_rows, 2 * shape.intermediate)
        shared = _empty(workspace, tokens, 2 * shape.shared_intermediate) if shape.shared_intermediate else None
        self.saved = Saved(schedule, x_rows, gate_up, shared)
        if describe_only:  # operands without memory, while torch traces
            return
        self._schedule = schedule.struct()
        self._struct = MokForward(
            tokens,
            o.x.data_ptr(),
            o.topk_ids.data_ptr(),
            o.topk_weights.data_ptr(),
            o.w1.data_ptr(),
            o.w2.data_ptr(),
            _pointer(o.shared_w1),
            _pointer(o.shared_w2),
            _pointer(o.shared_scale),
            self.y.data_ptr(),
            x_rows.data_ptr(),
            gate_up.data_ptr(),
            _pointer(shared),
            _scaled(o),
        )


class BackwardStep(_Step):
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

    NAMES = ("mok_backward_prepare", "mok_backward")

    def __init__(
        self, workspace: Workspace, operands: Operands, saved: Saved, dy: Tensor, targets: Sequence[Tensor | None]
    ) -> None:
        self.workspace, self.operands, self.saved = workspace, operands, saved
        o = operands
        self.dx = torch.empty_like(o.x)
        self.dtopk_weights = torch.empty_like(o.topk_weights)
        self.dshared_scale = None if o.shared_scale is None else torch.empty_like(o.shared_scale)
        pairs = zip((o.w1, o.w2, o.shared_w1, o.shared_w2), targets, strict=True)
        self.fresh = [torch.empty_like(w) if w is not None and target is None else None for w, target in pairs]
        self._schedule = saved.schedule.struct()
        self._struct = MokBackward(
            o.x.shape[0],
            dy.data_ptr(),
            o.x.data_ptr(),
            o.topk_ids.data_ptr(),
            o.w1.data_ptr(),
            o.w2.data_ptr(),
            _pointer(o.shared_w1),
            _pointer(o.shared_w2),
            _pointer(o.shared_scale),
            saved.x_rows.data_ptr(),
            saved.gate_up.data_ptr(),
            _pointer(saved.shared_gate_up),
            self.dx.data_ptr(),
            self.dtopk_weights.data_ptr(),
            _pointer(self.dshared_scale),
            *[_grad(target, fresh) for target, fresh in zip(targets, self.fresh, strict=True)],
            _scaled(o),
        )


def _grad(target: Tensor | None, fresh: Tensor | None) -> MokGrad:
    if target is None:
        return MokGrad(_pointer(fresh), GRAD_BF16, 0)
    return MokGrad(target.data_ptr(), GRAD_FP32 if target.dtype == torch.float32 else GRAD_BF16, 1)


def _scaled(operands: Operands) -> MokScaledWeights:
    pointers = [tensor.data_ptr() for tensor in operands.scaled]
    if len(pointers) == len(MxWeights._fields):
        return MokScaledWeights(**dict(zip(MxWeights._fields, pointers, strict=True)))
    return MokScaledWeights(*pointers)


def _pointer(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _empty(workspace: Workspace, *sizes: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(sizes, dtype=dtype, device=workspace.device)
