"""The megakernel as a backend of the operator: checks, the shared workspace, and the two launches."""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import torch
from torch import Tensor

from mok_megatron.config import TILE_ROWS
from mok_megatron.errors import MokCapacityError, MokInputError, Problems
from mok_megatron.megakernel import operators, workspace
from mok_megatron.megakernel.agreement import exchange
from mok_megatron.megakernel.binding import MokShape, format_number, library
from mok_megatron.megakernel.scaled import weights_in_format
from mok_megatron.megakernel.steps import Operands, Saved
from mok_megatron.megakernel.workspace import Workspace
from mok_megatron.ops.backend import Routing
from mok_megatron.ops.inputs import MoeGradients, MoeInputs, check_inputs
from mok_megatron.ops.main_grad import takes_main_grad
from mok_megatron.ops.schedule import worst_case_capacity

MAX_TOPK = 32
UNIT = 64
"""H, I and Is are multiples of it: the depth of a stage of the tile product."""
ALIGNMENT = 16
"""Bytes: of bulk copies and vector loads."""
MAIN_GRAD_DTYPES = (torch.float32, torch.bfloat16)
INT32_MAX = torch.iinfo(torch.int32).max


class KernelSaved(NamedTuple):
    """What the forward keeps for the backward."""

    workspace: Workspace
    operands: Operands
    tensors: Saved


class MegakernelBackend:
    """One persistent kernel a direction; see docs/kernel.md."""

    name = "megakernel"

    def forward(self, call: MoeInputs) -> tuple[Tensor, KernelSaved]:
        """y [T, H] and what the backward needs. Waits for nothing, but for peers at the first call of a shape.

        Raises:
            MokInputError: operands that do not fit.
            MokTimeoutError, MokCapacityError: what an earlier launch has recorded.
        """
        space = _workspace_for(call)
        space.check()
        operands = _operands(call)
        y, saved = operators.forward(space, operands)
        return y, KernelSaved(space, operands, saved)

    def routing(self, call: MoeInputs, saved: KernelSaved) -> Routing:
        """What the forward found; on the device, written when its kernels have run."""
        schedule = saved.tensors.schedule
        return Routing(schedule.expert_rows, schedule.info[0], saved.workspace.shape.ring_rows)

    def backward(self, call: MoeInputs, saved: KernelSaved, dy: Tensor, into_main_grad: bool) -> MoeGradients:
        """Gradients for dy [T, H]."""
        saved.workspace.check()
        shared = call.shared
        weights = [call.w1, call.w2, shared.w1 if shared else None, shared.w2 if shared else None]
        targets = [w.main_grad if into_main_grad and takes_main_grad(w) else None for w in weights]  # type: ignore[union-attr]
        _check_main_grads(weights, targets)
        results = operators.backward(saved.workspace, saved.operands, _aligned(dy), saved.tensors, targets)
        dx, dweights, dscale, dw1, dw2, dshared_w1, dshared_w2 = results
        assert dx is not None and dweights is not None
        return MoeGradients(dx, dweights, dw1, dw2, dshared_w1, dshared_w2, dscale, saved.tensors.x_rows)


def symmetric_bytes() -> int:
    """Bytes of the heaps that peers map, over all groups of this process."""
    spaces = {id(w): w for table in workspace._by_group.values() for w in table.values()}
    return sum(library().mok_symmetric_bytes(ctypes.byref(space.shape)) for space in spaces.values())


def _operands(call: MoeInputs) -> Operands:
    shared = call.shared
    scale = None if shared is None or shared.scale is None else shared.scale.contiguous()
    return Operands(
        _aligned(call.x),
        expert_numbers(call.topk_ids),
        call.topk_weights.contiguous(),
        call.w1.contiguous(),
        call.w2.contiguous(),
        None if shared is None else shared.w1.contiguous(),
        None if shared is None else shared.w2.contiguous(),
        scale,
        weights_in_format(call.config.format, call.w1, call.w2),
    )


def expert_numbers(topk_ids: Tensor) -> Tensor:
    """`topk_ids` as int32. A number beyond int32 becomes one that no expert has, for the kernel to refuse; a plain
    conversion would wrap it to one that some expert may have."""
    if topk_ids.dtype != torch.int32:
        topk_ids = topk_ids.clamp(-2, INT32_MAX).to(torch.int32)
    return topk_ids.contiguous()


def _aligned(tensor: Tensor) -> Tensor:
    """Contiguous and at a multiple of `ALIGNMENT`, a copy if need be; storage itself is aligned."""
    tensor = tensor.contiguous()
    return tensor if tensor.storage_offset() * tensor.element_size() % ALIGNMENT == 0 else tensor.clone()


def _check_main_grads(weights: list[Tensor | None], targets: list[Tensor | None]) -> None:
    """The kernel adds to these through their addresses, four numbers at a time."""
    if all(t is None or _can_add(w, t) for w, t in zip(weights, targets, strict=True)):  # type: ignore[arg-type]
        return
    problems = Problems()
    for name, weight, target in zip(("w1", "w2", "shared w1", "shared w2"), weights, targets, strict=True):
        if weight is None or target is None:
            continue
        problems.require(
            target.dtype in MAIN_GRAD_DTYPES,
            f"main_grad of {name} is {target.dtype}",
            "the megakernel adds to float32 or bfloat16",
        )
        problems.require(
            target.shape == weight.shape and target.device == weight.device and target.is_contiguous(),
            f"main_grad of {name} has shape {list(target.shape)} and strides {target.stride()} on {target.device}",
            f"give one like the weight: {list(weight.shape)}, contiguous, on {weight.device}",
        )
        problems.require(
            target.storage_offset() * target.element_size() % ALIGNMENT == 0,
            f"main_grad of {name} begins {target.storage_offset()} elements into its buffer",
            f"let it begin at a multiple of {ALIGNMENT} bytes, as --use-distributed-optimizer does",
        )
    problems.raise_if_any(MokInputError, "mok_moe: main_grad that the megakernel cannot add to:")


def _can_add(weight: Tensor, target: Tensor) -> bool:
    return (
        target.dtype in MAIN_GRAD_DTYPES
        and target.shape == weight.shape
        and target.device == weight.device
        and target.is_contiguous()
        and target.storage_offset() * target.element_size() % ALIGNMENT == 0
    )


def _workspace_for(call: MoeInputs) -> Workspace:
    signature = _signature(call)
    space = None if signature is None else workspace.find(call.group, signature)
    if space is None:
        space = _checked_workspace(call)
        if signature is not None:
            workspace.keep(call.group, signature, space)
    tokens = call.x.shape[0]
    if tokens > space.shape.max_tokens:
        raise MokInputError(
            f"mok_moe: {tokens} tokens, and the workspace was laid out for {space.shape.max_tokens}: the most that any "
            f"rank brought to the first call; set --mok-max-tokens to the largest number that can occur"
        )
    return space


def _signature(call: MoeInputs) -> tuple | None:
    """Everything that the checks of `_key` look at, but for the number of tokens, which is the same in all operands.

    Calls of one signature pass the checks together: the host must not format the same messages in vain at every call
    of every layer. None where the checks must find out what is wrong.
    """
    try:
        tokens, hidden = call.x.shape
        operands = [call.x, call.topk_ids, call.topk_weights, call.w1, call.w2]
        shared = call.shared
        if shared is not None:
            operands += (shared.w1, shared.w2)
            if shared.scale is not None:
                operands.append(shared.scale)
                if shared.scale.shape != (tokens,):
                    return None
        shape = call.topk_ids.shape
        if shape[0] != tokens or call.topk_weights.shape != shape:
            return None
        kinds = tuple([(t.dtype, t.device, t.layout) for t in operands])
        weights = (
            (call.w1.shape, call.w2.shape)
            if shared is None
            else (call.w1.shape, call.w2.shape, shared.w1.shape, shared.w2.shape)
        )
        return (hidden, shape[1:], kinds, weights, call.config)
    except (AttributeError, TypeError, ValueError, IndexError):
        return None


def _checked_workspace(call: MoeInputs) -> Workspace:
    key = _key(call)
    space = workspace.find(call.group, key)
    if space is None:
        space = _make_workspace(call)
        workspace.keep(call.group, key, space)
    return space


def _key(call: MoeInputs) -> tuple:
    """What tells one workspace of a group from another. Operands of one key need no further check of their shapes'
    relation to the workspace."""
    problems = check_inputs(call)
    _check_for_kernel(call, problems)
    problems.raise_if_any(MokInputError, "mok_moe: arguments that do not fit the megakernel")
    shared = 0 if call.shared is None else call.shared.w2.shape[1]
    return (*call.w1.shape, call.topk, shared, call.x.device, call.config)


def _check_for_kernel(call: MoeInputs, problems: Problems) -> None:
    if problems:
        return
    for name, tensor in (("x", call.x), ("w1", call.w1), ("w2", call.w2)):
        problems.require(
            tensor.dtype == torch.bfloat16,
            f"{name} is {tensor.dtype}",
            "the megakernel computes in bfloat16; convert it, or choose --mok-backend reference",
        )
    sizes = [("H", call.x.shape[1]), ("I", call.w2.shape[2])]
    if call.shared is not None:
        sizes.append(("Is", call.shared.w2.shape[1]))
    for name, size in sizes:
        problems.require(
            size % UNIT == 0 and size > 0,
            f"{name} = {size} is not a positive multiple of {UNIT}",
            f"the nearest that works is {max(1, round(size / UNIT)) * UNIT}",
        )
    problems.require(call.topk <= MAX_TOPK, f"K = {call.topk}", f"the megakernel takes at most {MAX_TOPK}")


def _make_workspace(call: MoeInputs) -> Workspace:
    """Agree with the peers on the sizes, then allocate. Collective, and waits for the host: once a shape."""
    tokens = call.config.max_tokens or call.x.shape[0]
    shared = 0 if call.shared is None else call.shared.w2.shape[1]
    settings = (call.config.minibatch_size, call.config.macrobatch_size or 0, call.config.capacity_rows or 0)
    mine = (tokens, *call.w1.shape, call.topk, shared, *settings)
    everyone = [mine]
    if call.group is not None:
        everyone = exchange(call.group, mine, "to reach the first call of a layer of this shape", call.config.timeout_s)
    problems = Problems()
    flags = ("--mok-minibatch-size", "--mok-macrobatch-size", "--mok-capacity-rows")
    names = ("E_local", "2I", "H", "K", "the shared expert's I", *flags)
    for column, name in enumerate(names, 1):
        values = [entry[column] for entry in everyone]
        problems.require(
            len(set(values)) == 1,
            f"{name} differs between ranks: {', '.join(f'rank {r} has {v}' for r, v in enumerate(values))}",
            "give all ranks the same layer and the same flags",
        )
    problems.raise_if_any(MokInputError, "mok_moe: the ranks of the expert-parallel group disagree:")
    return workspace.symmetric_workspace(
        kernel_shape(call, max(1, *(entry[0] for entry in everyone))), call.config, call.group
    )


def kernel_shape(call: MoeInputs, max_tokens: int) -> MokShape:
    """The C struct for a call whose largest T over the ranks is `max_tokens`."""
    experts, double, hidden = call.w1.shape
    config, ranks, topk = call.config, call.ep_size, call.topk
    capacity = config.capacity_rows or worst_case_capacity(ranks, max_tokens, topk, experts)
    ring = config.macrobatch_rows(max_tokens * topk)
    # A ring larger than the schedule would never fill.
    minibatches = -(-capacity // config.minibatch_size)
    shared = 0 if call.shared is None else call.shared.w2.shape[1]
    rows = max(capacity, ring, ranks * max_tokens * topk)
    if rows + TILE_ROWS > INT32_MAX:
        raise MokCapacityError(
            f"mok_moe: {rows} routed rows (EP {ranks} x {max_tokens} tokens x top-{topk}, or --mok-capacity-rows, or "
            "--mok-macrobatch-size) do not fit the kernel's 32-bit row numbers; give each rank fewer tokens "
            "(--micro-batch-size, --seq-length, --mok-max-tokens), or lower these flags"
        )
    return MokShape(
        ranks=ranks,
        rank=call.ep_rank,
        max_tokens=max_tokens,
        hidden=hidden,
        intermediate=double // 2,
        shared_intermediate=shared,
        experts_local=experts,
        topk=topk,
        capacity_rows=-(-capacity // TILE_ROWS) * TILE_ROWS,
        ring_rows=min(ring, minibatches * config.minibatch_size),
        minibatch_rows=config.minibatch_size,
        format=format_number(config),
    )
