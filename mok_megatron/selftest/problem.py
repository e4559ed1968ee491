"""A layer's operands, its value and gradients in plain torch, and the kernel on several virtual ranks of one GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from mok_megatron.config import TILE_ROWS, MokConfig
from mok_megatron.ops.schedule import worst_case_capacity

DEVICE = torch.device("cuda", 0)


@dataclass
class Problem:
    """One layer over all tokens and all experts; tests cut it into ranks."""

    x: Tensor
    """[T, H] bf16, the tokens of all ranks."""
    ids: Tensor
    """[T, K] int32."""
    weights: Tensor
    """[T, K] fp32."""
    w1: Tensor
    """[E, 2I, H] bf16."""
    w2: Tensor
    """[E, H, I] bf16."""
    dy: Tensor
    """[T, H] bf16."""
    shared: tuple[Tensor, Tensor] | None = None
    """[2Is, H] and [H, Is] bf16."""
    scale: Tensor | None = None
    """[T] fp32."""


def make_problem(
    tokens: int,
    hidden: int,
    inner: int,
    experts: int,
    topk: int,
    shared: int = 0,
    scale: bool = False,
    seed: int = 0,
    device: torch.device = DEVICE,
) -> Problem:
    """Random operands; the routing is the top-k of random scores, with distinct experts a token."""
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int, std: float = 1.0) -> Tensor:
        return (torch.randn(shape, generator=generator, device=device) * std).bfloat16()

    scores = torch.randn(tokens, experts, generator=generator, device=device)
    top = scores.topk(topk, dim=1)
    return Problem(
        x=normal(tokens, hidden),
        ids=top.indices.int(),
        weights=top.values.softmax(1),
        w1=normal(experts, 2 * inner, hidden, std=hidden**-0.5),
        w2=normal(experts, hidden, inner, std=inner**-0.5),
        dy=normal(tokens, hidden),
        shared=(normal(2 * shared, hidden, std=hidden**-0.5), normal(hidden, shared, std=shared**-0.5))
        if shared
        else None,
        scale=torch.rand(tokens, generator=generator, device=device) if scale else None,
    )


def with_rows_per_expert(problem: Problem, rows: Sequence[int]) -> Problem:
    """The problem with top-1 routing in which expert e gets rows[e] tokens, interleaved; needs sum(rows) tokens."""
    ids = torch.cat([torch.full((n,), e, dtype=torch.int32) for e, n in enumerate(rows)])
    ids = ids[torch.randperm(len(ids), generator=torch.Generator().manual_seed(1))].to(problem.x.device)
    assert len(ids) == len(problem.x)
    return replace(problem, ids=ids[:, None].contiguous(), weights=problem.weights[:, :1].contiguous())


# Gradients and output under one name each; shared ones are lists, one entry a rank.
Result = dict[str, Tensor]


def plain(problem: Problem, dtype: torch.dtype) -> Result:
    """The layer expert by expert in torch, its gradients by autograd. float64 is the oracle; bf16 rounds wherever a
    library of bf16 products would."""
    leaves = {
        name: getattr(problem, name).to(dtype if name != "weights" else _wide(dtype)).requires_grad_()
        for name in ("x", "weights", "w1", "w2")
    }
    x, weights, w1, w2 = leaves.values()
    slots = torch.zeros(*problem.ids.shape, x.shape[1], dtype=dtype, device=x.device)
    for e in range(len(w1)):
        token, k = (problem.ids == e).nonzero(as_tuple=True)
        slots = slots.index_put((token, k), _expert(x[token], w1[e], w2[e]))
    y = (weights[..., None] * slots.to(_wide(dtype))).sum(1)
    if problem.shared is not None:
        leaves["shared_w1"], leaves["shared_w2"] = (w.to(dtype).requires_grad_() for w in problem.shared)
        out = _expert(x, leaves["shared_w1"], leaves["shared_w2"]).to(_wide(dtype))
        if problem.scale is not None:
            leaves["scale"] = problem.scale.to(_wide(dtype)).requires_grad_()
            out = leaves["scale"][:, None] * out
        y = y + out
    y = y.to(dtype)
    grads = torch.autograd.grad(y, list(leaves.values()), problem.dy.to(dtype))
    return {"y": y.detach(), **{"d" + name: grad for name, grad in zip(leaves, grads, strict=True)}}


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype == torch.bfloat16 else dtype


def _expert(x: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
    gate, up = (x @ w1.t()).to(_wide(x.dtype)).chunk(2, dim=1)
    return (torch.nn.functional.silu(gate) * up).to(x.dtype) @ w2.t()


def relative_error(found: Tensor, wanted: Tensor) -> float:
    """||found - wanted|| / ||wanted||; infinite where found has a NaN."""
    difference = (found.double() - wanted.double()).norm() / wanted.double().norm().clamp_min(1e-30)
    return float("inf") if difference.isnan() else difference.item()


class VirtualRanks:
    """The kernel on `ranks` virtual ranks of one GPU, each with a stream and its share of the SMs.

    Args:
        ranks: EP; the experts are cut evenly.
        splits: tokens of each rank; default: as even as they come.
    """

    def __init__(self, problem: Problem, ranks: int, config: MokConfig, splits: Sequence[int] | None = None) -> None:
        from mok_megatron.megakernel import binding
        from mok_megatron.megakernel.workspace import virtual_workspaces

        tokens, topk = problem.ids.shape
        self.splits = list(splits) if splits is not None else [len(p) for p in torch.arange(tokens).tensor_split(ranks)]
        assert sum(self.splits) == tokens
        experts, double, hidden = problem.w1.shape
        longest = max(1, *self.splits)
        capacity = config.capacity_rows or worst_case_capacity(ranks, longest, topk, experts // ranks)
        ring = config.macrobatch_size or -(-capacity // config.minibatch_size) * config.minibatch_size
        shape = binding.MokShape(
            ranks, 0, longest, hidden, double // 2, problem.shared[1].shape[1] if problem.shared else 0,
            experts // ranks, topk, capacity, ring, config.minibatch_size, binding.format_number(config),
        )  # fmt: skip
        self.ranks, self.config = ranks, config
        self.spaces = virtual_workspaces(shape, config, DEVICE)
        # torch hands out 32 streams of a priority, then the same again: two priorities keep 64 ranks apart.
        self.streams = [torch.cuda.Stream(DEVICE, priority=-(rank // 32)) for rank in range(ranks)]

    def check(self) -> None:
        """Raise what any rank has recorded."""
        torch.cuda.synchronize()
        for space in self.spaces:
            space.check()

    def forward_steps(self, problem: Problem) -> list:
        """One ForwardStep a rank, outputs and saved activations filled with NaN."""
        from mok_megatron.megakernel.steps import ForwardStep

        steps = [ForwardStep(s, o) for s, o in zip(self.spaces, self._operands(problem), strict=True)]
        for step in steps:
            _poison(step.y, step.saved.x_rows, step.saved.gate_up, step.saved.shared_gate_up)
        return steps

    def backward_steps(self, problem: Problem, forward: list, main_grad: torch.dtype | None = None) -> list:
        """One BackwardStep a rank, outputs filled with NaN, `main_grad` tensors (if asked for) with ones."""
        from mok_megatron.megakernel.steps import BackwardStep

        steps = []
        for dy, step in zip(problem.dy.split(self.splits), forward, strict=True):
            o = step.operands
            weights = (o.w1, o.w2, o.shared_w1, o.shared_w2)
            targets = [torch.ones_like(w, dtype=main_grad) if main_grad and w is not None else None for w in weights]
            back: Any = BackwardStep(step.workspace, o, step.saved, dy.contiguous(), targets)
            _poison(back.dx, back.dtopk_weights, back.dshared_scale, *back.fresh)
            back.targets = targets
            steps.append(back)
        return steps

    def launch(self, steps: list, leave_out: Sequence[int] = ()) -> None:
        """Enqueue every rank's prepare, then every rank's main launch, each on the rank's stream.

        The wait in between is for this test harness alone: streams share a few hardware queues, in which a launch that
        depends on an earlier one waits for everything before it, other ranks' kernels included.
        """
        for name in ("prepare", "run"):
            torch.cuda.synchronize()
            for rank, (step, stream) in enumerate(zip(steps, self.streams, strict=True)):
                if rank not in leave_out:
                    with torch.cuda.stream(stream):
                        getattr(step, name)()

    def run(self, problem: Problem, main_grad: torch.dtype | None = None) -> Result:
        """Forward and backward; every rank's results, concatenated."""
        forward = self.forward_steps(problem)
        self.launch(forward)
        self.check()
        backward = self.backward_steps(problem, forward, main_grad)
        self.launch(backward)
        self.check()
        result = {
            "y": torch.cat([s.y for s in forward]),
            "dx": torch.cat([s.dx for s in backward]),
            "dweights": torch.cat([s.dtopk_weights for s in backward]),
        }
        grads = [s.targets if main_grad else s.fresh for s in backward]
        result["dw1"], result["dw2"] = (torch.cat([g[i] for g in grads]) for i in (0, 1))
        if problem.shared is not None:
            # Every rank holds the shared expert; its gradient is the sum over ranks.
            result["dshared_w1"], result["dshared_w2"] = (sum(g[i].float() for g in grads) for i in (2, 3))
        if problem.scale is not None:
            result["dscale"] = torch.cat([s.dshared_scale for s in backward])
        return result

    def poison(self, problem: Problem) -> None:
        """Leave NaN in every buffer that a step of this problem's routing touches."""
        nan = float("nan")
        bad = replace(problem, x=torch.full_like(problem.x, nan), dy=torch.full_like(problem.dy, nan))
        self.run(bad)

    def _operands(self, problem: Problem) -> list:
        from mok_megatron.megakernel.scaled import weights_in_format
        from mok_megatron.megakernel.steps import Operands

        cut = [t.split(self.splits) for t in (problem.x, problem.ids, problem.weights)]
        experts = [w.chunk(self.ranks) for w in (problem.w1, problem.w2)]
        shared1, shared2 = problem.shared or (None, None)
        scales = (
            [None] * self.ranks if problem.scale is None else [s.contiguous() for s in problem.scale.split(self.splits)]
        )
        steps = []
        for r in range(self.ranks):
            x, ids, weights, w1, w2 = (part[r].contiguous() for part in (*cut, *experts))
            scaled = weights_in_format(self.config.format, w1, w2)
            steps.append(Operands(x, ids, weights, w1, w2, shared1, shared2, scales[r], scaled))
        return steps


def _poison(*tensors: Tensor | None) -> None:
    for tensor in tensors:
        if tensor is not None:
            tensor.fill_(float("nan")) if tensor.is_floating_point() else tensor.fill_(0xFF)  # NaN in any float


def kernel_config(**settings: Any) -> MokConfig:
    """Settings for small problems: minibatches of two tiles, a short deadline."""
    small: dict[str, Any] = {"minibatch_size": 2 * TILE_ROWS, "timeout_s": 10.0, "fwd_comm_sms": 0, "bwd_comm_sms": 0}
    return MokConfig(**small | settings)


def reference(problem: Problem, config: MokConfig | None = None) -> Result:
    """The layer on the reference backend, EP 1, on the problem's device, in the format of `config` (default bf16)."""
    from mok_megatron.ops import SharedExpert, mok_moe

    names = ("x", "weights", "w1", "w2")
    leaves = {name: getattr(problem, name).clone().requires_grad_() for name in names}
    shared = None
    if problem.shared is not None:
        leaves |= {f"shared_w{i + 1}": w.clone().requires_grad_() for i, w in enumerate(problem.shared)}
        if problem.scale is not None:
            leaves["scale"] = problem.scale.clone().requires_grad_()
        shared = SharedExpert(leaves["shared_w1"], leaves["shared_w2"], leaves.get("scale"))
    config = replace(config or MokConfig(), backend="reference")
    y = mok_moe(leaves["x"], problem.ids, leaves["weights"], leaves["w1"], leaves["w2"], None, config, shared)
    grads = torch.autograd.grad(y, list(leaves.values()), problem.dy)
    return {"y": y.detach(), **{"d" + name: grad for name, grad in zip(leaves, grads, strict=True)}}
