"""A made-up MoE layer: its operands over all ranks, one rank's share of them, and a dense layer to compare with."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from mok_megatron.config import MokConfig
from mok_megatron.ops import SharedExpert, mok_moe

REFERENCE = MokConfig(backend="reference", minibatch_size=128)

BY_TOKEN = ("y", "x", "topk_weights", "shared_scale")
BY_EXPERT = ("w1", "w2")
BY_LAYER = ("shared_w1", "shared_w2")


@dataclass(frozen=True)
class Problem:
    """Operands of one layer, and the gradient dy of its output."""

    x: Tensor
    topk_ids: Tensor
    topk_weights: Tensor
    w1: Tensor
    w2: Tensor
    dy: Tensor
    shared: SharedExpert | None = None

    def share(self, rank: int, tokens: list[int]) -> Problem:
        """What `rank` brings where rank r has `tokens[r]` tokens and an equal part of the experts."""
        t = slice(sum(tokens[:rank]), sum(tokens[: rank + 1]))
        experts = self.w1.shape[0] // len(tokens)
        e = slice(rank * experts, (rank + 1) * experts)
        shared = self.shared
        if shared is not None and shared.scale is not None:
            shared = replace(shared, scale=shared.scale[t])
        return Problem(self.x[t], self.topk_ids[t], self.topk_weights[t], self.w1[e], self.w2[e], self.dy[t], shared)


def make_problem(
    tokens: int = 300,
    hidden: int = 40,
    inner: int = 24,
    experts: int = 8,
    topk: int = 3,
    dtype: torch.dtype = torch.float32,
    shared_inner: int = 0,
    scale: bool = False,
    routing: str = "random",
    seed: int = 0,
) -> Problem:
    """Random operands.

    `routing`: 'random' repeats experts within a token and holds -1; 'distinct' does neither; 'one' sends every
    route to the last expert; 'none' has no route at all.
    """
    g = torch.Generator().manual_seed(seed)
    wide = torch.float64 if dtype == torch.float64 else torch.float32

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=g, dtype=torch.float64)

    if routing == "random":
        ids = torch.randint(-1, experts, (tokens, topk), generator=g)
    elif routing == "distinct":
        ids = torch.rand(tokens, experts, generator=g).argsort(1)[:, :topk]
    else:
        ids = torch.full((tokens, topk), experts - 1 if routing == "one" else -1)
    shared = None
    if shared_inner:
        factor = torch.rand(tokens, generator=g, dtype=torch.float64).to(wide) if scale else None
        shared = SharedExpert(
            (randn(2 * shared_inner, hidden) / hidden**0.5).to(dtype),
            (randn(hidden, shared_inner) / shared_inner**0.5).to(dtype),
            factor,
        )
    return Problem(
        x=randn(tokens, hidden).to(dtype),
        topk_ids=ids,
        topk_weights=torch.rand(tokens, topk, generator=g, dtype=torch.float64).to(wide),
        w1=(randn(experts, 2 * inner, hidden) / hidden**0.5).to(dtype),
        w2=(randn(experts, hidden, inner) / inner**0.5).to(dtype),
        dy=randn(tokens, hidden).to(dtype),
        shared=shared,
    )


def operator(
    problem: Problem, group: dist.ProcessGroup | None = None, config: MokConfig = REFERENCE
) -> dict[str, Tensor]:
    """mok_moe's output ('y') and every gradient, by operand."""
    return _output_and_gradients(problem, lambda p: mok_moe(*_operands(p), group, config, p.shared))


def dense(problem: Problem) -> dict[str, Tensor]:
    """The same from autograd, every expert computing every token."""
    return _output_and_gradients(problem, _dense_layer)


def _dense_layer(p: Problem) -> Tensor:
    y = torch.zeros_like(p.x)
    for expert, (w1, w2) in enumerate(zip(p.w1, p.w2, strict=True)):
        factor = torch.where(p.topk_ids == expert, p.topk_weights, 0).sum(1, keepdim=True)
        y = y + factor * _mlp(p.x, w1, w2)
    if p.shared is not None:
        factor = 1 if p.shared.scale is None else p.shared.scale.unsqueeze(1)
        y = y + factor * _mlp(p.x, p.shared.w1, p.shared.w2)
    return y


def _mlp(x: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
    gate, up = F.linear(x, w1).chunk(2, dim=-1)
    return F.linear(F.silu(gate) * up, w2)


def _operands(p: Problem) -> tuple[Tensor, ...]:
    return p.x, p.topk_ids, p.topk_weights, p.w1, p.w2


def _output_and_gradients(problem: Problem, layer) -> dict[str, Tensor]:  # type: ignore[no-untyped-def]
    def leaf(t: Tensor) -> Tensor:
        return t.detach().requires_grad_()

    shared = problem.shared
    if shared is not None:
        shared = SharedExpert(*(None if t is None else leaf(t) for t in (shared.w1, shared.w2, shared.scale)))
    names = ("x", "topk_weights", "w1", "w2")
    leaves = {name: leaf(getattr(problem, name)) for name in names}
    y = layer(replace(problem, shared=shared, **leaves))
    if shared is not None:
        leaves |= {"shared_w1": shared.w1, "shared_w2": shared.w2}
        if shared.scale is not None:
            leaves["shared_scale"] = shared.scale
    gradients = torch.autograd.grad(y, list(leaves.values()), problem.dy)
    return {"y": y.detach(), **dict(zip(leaves, gradients, strict=True))}


def to_bytes(results: dict[str, Tensor]) -> dict[str, bytes]:
    """Each tensor's bytes: equal exactly where the tensors are, NaN and the sign of zero included."""
    return {name: t.contiguous().view(torch.uint8).numpy().tobytes() for name, t in results.items()}


def assert_same_bits(results: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Every tensor equal in every bit."""
    assert results.keys() == expected.keys()
    for name, value in to_bytes(expected).items():
        assert to_bytes(results)[name] == value, f"{name}: not the same bits"
