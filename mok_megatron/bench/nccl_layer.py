"""The plain baseline: torch.distributed's all_to_all and torch's grouped product, one step after another.

Small, but no straw man: one host synchronisation (NCCL needs the counts), permutations that are gathers in both
directions, SwiGLU and the weighted sum each one kernel by torch.compile, no copy of a weight gradient.
"""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from mok_megatron.bench.layers import clear, gradient_of, parameter
from mok_megatron.bench.problem import Problem


class NcclLayer:
    """Weight gradients are written fresh in the weights' own type, which is less work than accumulating in fp32."""

    is_fp8 = False

    def __init__(self, problem: Problem, group: dist.ProcessGroup | None):
        self.problem, self.group = problem, group
        self.ranks = 1 if group is None else group.size()
        self.w1, self.w2 = parameter(problem.w1, False), parameter(problem.w2, False)
        self.shared = None if problem.shared is None else tuple(parameter(w, False) for w in problem.shared)
        # Compilation on the CPU would need a C++ compiler and minutes.
        fuse = torch.compile(dynamic=True) if problem.x.is_cuda else _unchanged
        self.swiglu, self.weighted_sum = fuse(_swiglu), fuse(_weighted_sum)

    def __call__(self, x: Tensor, topk_weights: Tensor) -> Tensor:
        tokens, topk = topk_weights.shape
        local = self.w1.shape[0]
        ids = self.problem.topk_ids.flatten()
        order = ids.argsort(stable=True)  # routes, an expert after another
        sent = torch.bincount(ids, minlength=local * self.ranks).view(self.ranks, local)
        received = self._exchange_counts(sent)  # [source rank, local expert]
        splits = torch.stack([sent.sum(1), received.sum(1)]).tolist()  # the host waits here
        unsorted = order.argsort()
        rows = _Gather.apply(x, order // topk, unsorted, topk)
        rows = self._exchange(rows, splits[0], splits[1])

        experts = torch.arange(local, device=x.device).repeat(self.ranks)
        expert_of_row = experts.repeat_interleave(received.flatten(), output_size=sum(splits[1]))
        by_expert = expert_of_row.argsort(stable=True)
        by_source = by_expert.argsort()
        ends = received.sum(0).cumsum(0).to(torch.int32)
        rows = _Gather.apply(rows, by_expert, by_source, 1)
        hidden = self.swiglu(_GroupedLinear.apply(rows, self.w1, ends))
        rows = _GroupedLinear.apply(hidden, self.w2, ends)
        rows = _Gather.apply(rows, by_source, by_expert, 1)

        rows = self._exchange(rows, splits[1], splits[0])
        rows = _Gather.apply(rows, unsorted, order, 1).view(tokens, topk, -1)
        y = self.weighted_sum(rows, topk_weights)
        if self.shared is not None:
            y = y + F.linear(self.swiglu(F.linear(x, self.shared[0])), self.shared[1])
        return y

    def weight_gradients(self) -> list[Tensor]:
        return [gradient_of(self.w1), gradient_of(self.w2)]

    def clear_gradients(self) -> None:
        for weight in (self.w1, self.w2, *(self.shared or ())):
            clear(weight)

    def _exchange_counts(self, sent: Tensor) -> Tensor:
        if self.ranks == 1:
            return sent
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self.group)
        return received

    def _exchange(self, rows: Tensor, send: list[int], receive: list[int]) -> Tensor:
        return rows if self.ranks == 1 else _AllToAll.apply(rows, send, receive, self.group)


def _swiglu(rows: Tensor) -> Tensor:
    gate, up = rows.chunk(2, dim=-1)
    return F.silu(gate) * up


def _weighted_sum(rows: Tensor, weights: Tensor) -> Tensor:
    """Sum over k of weights [T, K] (fp32) times rows [T, K, H], in fp32, in the rows' type."""
    return (rows * weights.unsqueeze(2)).sum(1).to(rows.dtype)


def _unchanged[Function](function: Function) -> Function:
    return function


class _GroupedLinear(torch.autograd.Function):
    """rows @ weight[e].T for each expert's rows; its own backward, so that no gradient is transposed by a copy."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
        ctx.save_for_backward(rows, weight, ends)
        return torch._grouped_mm(rows, weight.transpose(1, 2), offs=ends)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        rows, weight, ends = ctx.saved_tensors
        grad_rows = torch._grouped_mm(grad, weight, offs=ends)
        grad_weight = torch._grouped_mm(grad.transpose(0, 1), rows, offs=ends)
        return grad_rows, grad_weight, None


class _Gather(torch.autograd.Function):
    """rows[index], where ``index`` names each row ``copies`` times, and ``inverse`` undoes the permutation."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, index: Tensor, inverse: Tensor, copies: int) -> Tensor:
        ctx.save_for_backward(inverse)
        ctx.copies = copies
        return rows.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        (inverse,) = ctx.saved_tensors
        rows = grad.index_select(0, inverse)
        if ctx.copies > 1:
            rows = rows.view(-1, ctx.copies, rows.shape[1]).sum(1)
        return rows, None, None, None


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, send: list[int], receive: list[int], group: Any) -> Tensor:
        ctx.send, ctx.receive, ctx.group = send, receive, group
        out = rows.new_empty(sum(receive), rows.shape[1])
        dist.all_to_all_single(out, rows.contiguous(), receive, send, group=group)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        out = grad.new_empty(sum(ctx.send), grad.shape[1])
        dist.all_to_all_single(out, grad.contiguous(), ctx.send, ctx.receive, group=ctx.group)
        return out, None, None, None
