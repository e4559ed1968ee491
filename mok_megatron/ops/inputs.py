"""The operands of one call of the operator, and the checks that a rank can make on its own."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from mok_megatron.config import MokConfig
from mok_megatron.errors import MokInputError, Problems
from mok_megatron.formats import BLOCK_LENGTH
from mok_megatron.formats.tensor import SOURCE_DTYPES

FLOAT_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


@dataclass(frozen=True)
class SharedExpert:
    """An expert that every token visits.

    y[t] += scale[t] * w2 @ (silu(w1_gate @ x[t]) * (w1_up @ x[t]))
    """

    w1: Tensor
    """[2 * Is, H], gate rows, then up rows."""
    w2: Tensor
    """[H, Is]."""
    scale: Tensor | None = None
    """[T] fp32, the sigmoid gate of `moe_shared_expert_gate` after its sigmoid; None means 1."""


@dataclass(frozen=True)
class MoeInputs:
    """What one rank brings to a call of the operator `mok_moe`."""

    x: Tensor
    """[T, H]."""
    topk_ids: Tensor
    """[T, K] int32 or int64: global expert numbers, -1 = no route."""
    topk_weights: Tensor
    """[T, K] fp32."""
    w1: Tensor
    """[E_local, 2I, H], gate rows, then up rows."""
    w2: Tensor
    """[E_local, H, I]."""
    shared: SharedExpert | None
    group: dist.ProcessGroup | None
    """The expert-parallel group; None means EP 1."""
    config: MokConfig

    @property
    def device(self) -> torch.device:
        """Where the operands are; where they differ, or are no tensors, that of the first that is one."""
        if isinstance(self.x, Tensor):
            return self.x.device
        tensors = (value for value in _operands(self).values() if isinstance(value, Tensor))
        return next((tensor.device for tensor in tensors), torch.device("cpu"))

    @property
    def ep_size(self) -> int:
        """Ranks of the group."""
        return 1 if self.group is None else self.group.size()

    @property
    def ep_rank(self) -> int:
        """This rank's place in the group; it holds experts [ep_rank * E_local, (ep_rank + 1) * E_local)."""
        return 0 if self.group is None else self.group.rank()

    @property
    def topk(self) -> int:
        """K."""
        return self.topk_ids.shape[1]

    @property
    def num_experts(self) -> int:
        """E, in all."""
        return self.w1.shape[0] * self.ep_size


@dataclass
class MoeGradients:
    """Gradients of one call. A weight gradient is None where it was added to `main_grad`."""

    x: Tensor
    topk_weights: Tensor
    w1: Tensor | None
    w2: Tensor | None
    shared_w1: Tensor | None = None
    shared_w2: Tensor | None = None
    shared_scale: Tensor | None = None
    spare: Tensor | None = None
    """Memory that the call needed and nobody reads any more; for gradients whose values do not matter."""


def check_inputs(call: MoeInputs) -> Problems:
    """What is wrong with the operands, as far as it shows without a peer and without waiting for the device."""
    problems = Problems()
    operands = _operands(call)
    for name, value in operands.items():
        if not isinstance(value, Tensor):
            problems.add(f"{name} is a {type(value).__name__}", "give a torch.Tensor")
        elif value.layout != torch.strided:
            problems.add(f"{name} has layout {value.layout}", "give a dense tensor, such as its to_dense()")
    if not problems and call.x.device.type == "meta":
        problems.add("x is on the meta device, where tensors have no values", "move all operands to a real device")
    if not problems:
        _check_shapes(call, problems)
        _check_dtypes_and_devices(call, operands, problems)
    if not problems and call.config.format != "bf16":
        _check_format(call, problems)
    return problems


def check_arguments(config: object, group: object, shared: object) -> None:
    """What else a call is given, before a backend is chosen by it.

    Raises:
        MokInputError: listing what is not of its type.
    """
    known_group = group is None or isinstance(group, dist.ProcessGroup)
    if isinstance(config, MokConfig) and known_group and (shared is None or isinstance(shared, SharedExpert)):
        return
    problems = Problems()
    problems.require(isinstance(config, MokConfig), f"config is a {type(config).__name__}", "give a MokConfig or None")
    problems.require(
        known_group,
        f"group is a {type(group).__name__}",
        "give the expert-parallel group that this rank is in, or None for EP 1",
    )
    pair = isinstance(shared, tuple) and len(shared) in (2, 3)
    problems.require(
        shared is None or isinstance(shared, SharedExpert) or pair,
        f"shared is a {type(shared).__name__}" + (f" of {len(shared)}" if isinstance(shared, tuple) else ""),
        "give a SharedExpert, or a tuple of its w1, w2 and, if there is one, scale",
    )
    problems.raise_if_any(MokInputError, "mok_moe: arguments that do not fit")


def check_expert_numbers(call: MoeInputs) -> Problems:
    """Experts that do not exist. Waits for the device, to read `topk_ids`: for backends that wait anyway."""
    problems = Problems()
    if call.topk_ids.numel():
        low, high = (int(v) for v in torch.aminmax(call.topk_ids))
        problems.require(
            low >= -1 and high < call.num_experts,
            f"topk_ids holds numbers from {low} to {high}",
            f"expert numbers are 0 to {call.num_experts - 1} "
            f"({call.w1.shape[0]} experts on each of {call.ep_size} ranks), and -1 for no route",
        )
    return problems


def _check_shapes(call: MoeInputs, problems: Problems) -> None:
    if call.x.dim() != 2:
        problems.add(f"x has shape {list(call.x.shape)}", "give [T, H]; flatten sequence and batch first")
        return
    tokens, hidden = call.x.shape
    if call.topk_ids.dim() != 2 or call.topk_ids.shape[0] != tokens or call.topk_ids.shape[1] < 1:
        problems.add(f"topk_ids has shape {list(call.topk_ids.shape)}", f"give [T, K] = [{tokens}, K], K at least 1")
    problems.require(
        call.topk_weights.shape == call.topk_ids.shape,
        f"topk_weights has shape {list(call.topk_weights.shape)}",
        f"give one weight a route: {list(call.topk_ids.shape)}",
    )
    if call.w1.dim() != 3 or call.w1.shape[0] < 1 or call.w1.shape[1] % 2 or call.w1.shape[2] != hidden:
        problems.add(f"w1 has shape {list(call.w1.shape)}", f"give [E_local, 2I, H], H = {hidden} as in x")
    else:
        experts, double, _ = call.w1.shape
        problems.require(
            tuple(call.w2.shape) == (experts, hidden, double // 2),
            f"w2 has shape {list(call.w2.shape)}",
            f"give [E_local, H, I] = [{experts}, {hidden}, {double // 2}], to go with w1",
        )
    if call.shared is not None:
        _check_shared_shapes(call.shared, tokens, hidden, problems)


def _check_shared_shapes(shared: SharedExpert, tokens: int, hidden: int, problems: Problems) -> None:
    if shared.w1.dim() != 2 or shared.w1.shape[0] % 2 or shared.w1.shape[1] != hidden:
        problems.add(f"shared w1 has shape {list(shared.w1.shape)}", f"give [2Is, H] with H = {hidden}")
        return
    inner = shared.w1.shape[0] // 2
    problems.require(
        tuple(shared.w2.shape) == (hidden, inner),
        f"shared w2 has shape {list(shared.w2.shape)}",
        f"give [H, Is] = [{hidden}, {inner}]",
    )
    if shared.scale is not None:
        problems.require(
            tuple(shared.scale.shape) == (tokens,),
            f"shared scale has shape {list(shared.scale.shape)}",
            f"give one factor a token: [{tokens}]",
        )


def _check_format(call: MoeInputs, problems: Problems) -> None:
    name, length = call.config.format, BLOCK_LENGTH[call.config.format]
    problems.require(
        call.x.dtype in SOURCE_DTYPES,
        f"x is {call.x.dtype}, which has no {name} form",
        f"convert all operands to {', '.join(map(str, SOURCE_DTYPES))}, or choose the format bf16",
    )
    sizes = [("H", call.x.shape[1]), ("I", call.w2.shape[2])]
    if call.shared is not None and call.config.fp8_shared == "fp8":
        sizes.append(("Is", call.shared.w2.shape[1]))
    for size_name, size in sizes:
        problems.require(
            size % length == 0,
            f"{size_name} = {size} is not a multiple of {length}, the block of {name}",
            f"the nearest that works is {max(1, round(size / length)) * length}",
        )


def _operands(call: MoeInputs) -> dict[str, Tensor]:
    operands = {
        "x": call.x,
        "topk_ids": call.topk_ids,
        "topk_weights": call.topk_weights,
        "w1": call.w1,
        "w2": call.w2,
    }
    if call.shared is not None:
        operands |= {"shared w1": call.shared.w1, "shared w2": call.shared.w2}
        if call.shared.scale is not None:
            operands["shared scale"] = call.shared.scale
    return operands


def _check_dtypes_and_devices(call: MoeInputs, operands: dict[str, Tensor], problems: Problems) -> None:
    # Router weights and gates keep fp32 whatever the model runs in; a float64 oracle keeps float64.
    weight_dtype = torch.float64 if call.x.dtype == torch.float64 else torch.float32
    for name, tensor in operands.items():
        if name == "topk_ids":
            allowed: tuple[torch.dtype, ...] = (torch.int32, torch.int64)
        elif name in ("topk_weights", "shared scale"):
            allowed = (weight_dtype,)
        elif name == "x" or call.x.dtype not in FLOAT_DTYPES:
            allowed = FLOAT_DTYPES
        else:
            allowed = (call.x.dtype,)
        problems.require(
            tensor.dtype in allowed,
            f"{name} is {tensor.dtype}" + ("" if name == "x" else f" beside an x of {call.x.dtype}"),
            f"convert it to {' or '.join(map(str, allowed))}",
        )
        problems.require(
            tensor.device == call.x.device,
            f"{name} is on {tensor.device} and x on {call.x.device}",
            "move all operands to one device",
        )
