"""The two directions as operators of torch.library, so that torch.compile and tracing see them.

A workspace cannot be an operator's argument; its number in a table of live workspaces is.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

from mok_megatron.megakernel.steps import BackwardStep, ForwardStep, Operands, Saved
from mok_megatron.megakernel.workspace import Workspace

_OPERANDS = (
    "Tensor x, Tensor topk_ids, Tensor topk_weights, Tensor w1, Tensor w2, "
    "Tensor? shared_w1, Tensor? shared_w2, Tensor? shared_scale, Tensor[] scaled"
)

_definitions = torch.library.Library("mok_megatron", "DEF")
# Returns y, then the tensors of Saved.
_definitions.define(f"forward(int workspace, {_OPERANDS}) -> Tensor[]")
# Returns dx, dtopk_weights, then what there is of dshared_scale, dw1, dw2, dshared_w1, dshared_w2.
_definitions.define(
    f"backward(int workspace, {_OPERANDS}, Tensor dy, Tensor(a!)[] saved, Tensor(b!)? main_grad_w1, "
    "Tensor(c!)? main_grad_w2, Tensor(d!)? main_grad_shared_w1, Tensor(e!)? main_grad_shared_w2) -> Tensor[]"
)

_numbers: weakref.WeakKeyDictionary[Workspace, int] = weakref.WeakKeyDictionary()
_workspaces: weakref.WeakValueDictionary[int, Workspace] = weakref.WeakValueDictionary()
_next_number = 0


def number_of(workspace: Workspace) -> int:
    """The number by which the operators know `workspace`, as long as it lives."""
    global _next_number
    if workspace not in _numbers:
        _numbers[workspace] = _next_number
        _workspaces[_next_number] = workspace
        _next_number += 1
    return _numbers[workspace]


def _forward(number: int, *operands: Tensor | None) -> list[Tensor]:
    step = ForwardStep(_workspaces[number], Operands(*operands))  # type: ignore[arg-type]
    step.launch()
    return [step.y, *step.saved.tensors()]


def _backward(number: int, *arguments: object) -> list[Tensor]:
    workspace = _workspaces[number]
    *operands, dy, saved, main_w1, main_w2, main_shared_w1, main_shared_w2 = arguments
    step = BackwardStep(
        workspace,
        Operands(*operands),  # type: ignore[arg-type]
        Saved.from_tensors(workspace, saved),  # type: ignore[arg-type]
        dy,  # type: ignore[arg-type]
        (main_w1, main_w2, main_shared_w1, main_shared_w2),  # type: ignore[arg-type]
    )
    step.launch()
    return _present(step.dx, step.dtopk_weights, step.dshared_scale, *step.fresh)


def _forward_fake(number: int, *operands: Tensor | None) -> list[Tensor]:
    step = ForwardStep(_workspaces[number], Operands(*operands), describe_only=True)  # type: ignore[arg-type]
    return [step.y, *step.saved.tensors()]


def _backward_fake(number: int, *arguments: object) -> list[Tensor]:
    x, _, topk_weights, *weights, shared_scale, _scaled, _dy, _saved = arguments[:11]
    targets = arguments[11:]
    pairs = zip(weights, targets, strict=True)
    fresh = [torch.empty_like(w) if w is not None and t is None else None for w, t in pairs]  # type: ignore[arg-type]
    scale = None if shared_scale is None else torch.empty_like(shared_scale)  # type: ignore[arg-type]
    return _present(torch.empty_like(x), torch.empty_like(topk_weights), scale, *fresh)  # type: ignore[arg-type]


def _present(*tensors: Tensor | None) -> list[Tensor]:
    # A list of results cannot hold None.
    return [t for t in tensors if t is not None]


_definitions.impl("forward", _forward, "CUDA")
_definitions.impl("backward", _backward, "CUDA")
torch.library.register_fake("mok_megatron::forward", _forward_fake, lib=_definitions)
torch.library.register_fake("mok_megatron::backward", _backward_fake, lib=_definitions)


def forward(workspace: Workspace, operands: Operands) -> tuple[Tensor, Saved]:
    """Enqueue the forward of one rank on the current stream: y [T, H] and what the backward needs."""
    y, *saved = torch.ops.mok_megatron.forward(number_of(workspace), *operands)
    return y, Saved.from_tensors(workspace, saved)


def backward(
    workspace: Workspace, operands: Operands, dy: Tensor, saved: Saved, targets: Sequence[Tensor | None]
) -> list[Tensor | None]:
    """Enqueue the backward of one rank: dx, dtopk_weights, dshared_scale, dw1, dw2, dshared_w1, dshared_w2.

    None where a gradient went to its target or there is no such operand; see BackwardStep.
    """
    results = torch.ops.mok_megatron.backward(number_of(workspace), *operands, dy, saved.tensors(), *targets)
    weights = (operands.w1, operands.w2, operands.shared_w1, operands.shared_w2)
    fresh = [w is not None and t is None for w, t in zip(weights, targets, strict=True)]
    there = iter(results)
    return [next(there) if is_there else None for is_there in (True, True, operands.shared_scale is not None, *fresh)]
