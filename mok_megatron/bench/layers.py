"""What can be measured: the interface of an implementation, ours, and the table of all."""

from collections.abc import Callable
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from mok_megatron.bench.problem import Problem
from mok_megatron.config import MokConfig
from mok_megatron.errors import Problems
from mok_megatron.formats import BLOCK_LENGTH
from mok_megatron.ops import SharedExpert, mok_moe
from mok_megatron.ops.backend import backend_name
from mok_megatron.ops.formats import check_format


class Unavailable(Exception):
    """An implementation that cannot run here; the message says why."""


class Layer(Protocol):
    """One implementation, holding its own parameters."""

    is_fp8: bool
    """Whether its products multiply FP8 numbers."""

    def __call__(self, x: Tensor, topk_weights: Tensor) -> Tensor:
        """y [T, H] for x [T, H] and topk_weights [T, K], with the routing of its problem."""

    def weight_gradients(self) -> list[Tensor]:
        """Gradients of w1 [E_local, 2I, H] and w2 [E_local, H, I] so far, in the type they are accumulated in."""

    def clear_gradients(self) -> None:
        """Before a backward that is measured: gradients are gone, `main_grad` buffers are zero."""


def parameter(value: Tensor, main_grad: bool) -> torch.nn.Parameter:
    """A parameter with a copy of ``value``, and Megatron's fp32 gradient buffer if ``main_grad``."""
    made = torch.nn.Parameter(value.clone())
    if main_grad:
        made.main_grad = torch.zeros_like(made, dtype=torch.float32)  # type: ignore[attr-defined]
        made.grad_added_to_main_grad = False  # type: ignore[attr-defined]
    return made


def gradient_of(weight: Tensor) -> Tensor:
    """A weight's gradient, from wherever it was accumulated."""
    if getattr(weight, "grad_added_to_main_grad", False):
        return weight.main_grad  # type: ignore[attr-defined]
    assert weight.grad is not None
    return weight.grad


def clear(weight: Tensor) -> None:
    weight.grad = None
    if hasattr(weight, "main_grad"):
        weight.main_grad.zero_()
        weight.grad_added_to_main_grad = False  # type: ignore[attr-defined]


class MokLayer:
    """`mok_moe`, accumulating weight gradients into fp32 `main_grad` as in Megatron's training."""

    def __init__(self, problem: Problem, group: dist.ProcessGroup | None, config: MokConfig, main_grad: bool = True):
        self.problem, self.group, self.config = problem, group, config
        self.is_fp8 = config.format != "bf16"
        self.w1, self.w2 = parameter(problem.w1, main_grad), parameter(problem.w2, main_grad)
        self.shared = None
        if problem.shared is not None:
            self.shared = SharedExpert(*(parameter(weight, main_grad) for weight in problem.shared))

    def __call__(self, x: Tensor, topk_weights: Tensor) -> Tensor:
        return mok_moe(
            x, self.problem.topk_ids, topk_weights, self.w1, self.w2, self.group, self.config, shared=self.shared
        )

    def weight_gradients(self) -> list[Tensor]:
        return [gradient_of(self.w1), gradient_of(self.w2)]

    def clear_gradients(self) -> None:
        for weight in (self.w1, self.w2, *((self.shared.w1, self.shared.w2) if self.shared else ())):
            clear(weight)


def mok_layer(problem: Problem, group: dist.ProcessGroup | None, config: MokConfig) -> MokLayer:
    """Ours in the format of `config`; raises `Unavailable` where the backend, the device or the sizes cannot do it."""
    if config.format != "bf16":
        problems = Problems()
        check_format(config, backend_name(config, problem.x.device), problem.x.device, problems)
        length = BLOCK_LENGTH[config.format]
        for name in ("hidden", "intermediate"):
            size = getattr(problem.shape, name)
            problems.require(
                size % length == 0, f"--{name} {size} is not a multiple of {length}", f"the block of {config.format} is"
            )
        if problems:
            raise Unavailable(" ".join(problems.text("").split()))
    return MokLayer(problem, group, config)


Builder = Callable[[Problem, dist.ProcessGroup | None], Layer]


def baselines() -> dict[str, Builder]:
    """Name -> builder of every baseline. A builder raises `Unavailable` where its library is missing."""
    from mok_megatron.bench.megatron_layers import MegatronLayer
    from mok_megatron.bench.nccl_layer import NcclLayer

    return {
        "nccl": NcclLayer,
        "alltoall": lambda problem, group: MegatronLayer(problem, group, "alltoall"),
        "hybridep": lambda problem, group: MegatronLayer(problem, group, "hybridep"),
        "deepep": lambda problem, group: MegatronLayer(problem, group, "deepep"),
        "alltoall-blockwise": lambda problem, group: MegatronLayer(problem, group, "alltoall", "blockwise"),
        "hybridep-blockwise": lambda problem, group: MegatronLayer(problem, group, "hybridep", "blockwise"),
    }
