"""The operator `mok_moe`: one MoE layer after routing, with its autograd."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mok_megatron.config import MokConfig
from mok_megatron.ops.backend import Backend, Observer, select_backend
from mok_megatron.ops.inputs import MoeInputs, SharedExpert, check_arguments
from mok_megatron.ops.main_grad import autograd_result


def mok_moe(
    x: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    w1: Tensor,
    w2: Tensor,
    group: dist.ProcessGroup | None = None,
    config: MokConfig | None = None,
    shared: SharedExpert | tuple[Tensor, Tensor] | None = None,
    into_main_grad: bool = True,
    observer: Observer | None = None,
) -> Tensor:
    """Dispatch, expert products with SwiGLU, and combine.

    y[t] = sum over k of topk_weights[t, k] * w2[e] @ (silu(w1_gate[e] @ x[t]) * (w1_up[e] @ x[t])),
    e = topk_ids[t, k] (plus the shared expert's), the sum in fp32 in the order of k. Every rank of `group` calls it
    together; T may differ between ranks and be 0. The result does not depend on EP, not even in its last bit.

    Args:
        x: [T, H] tokens of this rank, bf16 on the megakernel, any float dtype on the reference.
        topk_ids: [T, K] int32 or int64, global expert numbers; -1 is no route (a dropped or padding token).
        topk_weights: [T, K] fp32 router weights (fp64 beside an fp64 x); unread where there is no route.
        w1: [E_local, 2I, H] gate rows, then up rows (Megatron's gated layout), in x's dtype.
        w2: [E_local, H, I], in x's dtype.
        group: the expert-parallel group; rank r holds experts [r * E_local, (r + 1) * E_local). None is EP 1.
        config: settings; the default ones if None.
        shared: an expert that every token visits, held by every rank: a SharedExpert, or its first fields as a
            tuple: (ws1 [2Is, H], ws2 [H, Is]).
        into_main_grad: add weight gradients to a weight's `main_grad`, where it has one (Megatron's gradient
            accumulation fusion), instead of returning them.
        observer: is told when each direction is enqueued, and what it computes.

    Returns:
        y [T, H] in x's dtype. Gradients flow to x, topk_weights, w1, w2 and the shared expert's tensors.

    Raises:
        MokInputError: operands that do not fit, listed all at once, on every rank of the group.
        MokBackendError: the backend asked for cannot run here.
        MokTimeoutError: a peer did not take part within `config.timeout_s`.
    """
    config = MokConfig() if config is None else config
    check_arguments(config, group, shared)
    if isinstance(shared, tuple):
        shared = SharedExpert(*shared)
    call = MoeInputs(x, topk_ids, topk_weights, w1, w2, shared, group, config)
    backend = select_backend(config, call.device)
    shared_tensors = (None, None, None) if shared is None else (shared.w1, shared.w2, shared.scale)
    return _MokMoe.apply(
        backend, config, group, into_main_grad, observer, topk_ids, x, topk_weights, w1, w2, *shared_tensors
    )


def _shared_expert(w1: Tensor | None, w2: Tensor | None, scale: Tensor | None) -> SharedExpert | None:
    # One of the two alone makes a SharedExpert too, for the checks to refuse.
    return None if w1 is None and w2 is None else SharedExpert(w1, w2, scale)  # type: ignore[arg-type]


class _MokMoe(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        backend: Backend,
        config: MokConfig,
        group: dist.ProcessGroup | None,
        into_main_grad: bool,
        observer: Observer | None,
        topk_ids: Tensor,
        x: Tensor,
        topk_weights: Tensor,
        w1: Tensor,
        w2: Tensor,
        shared_w1: Tensor | None,
        shared_w2: Tensor | None,
        shared_scale: Tensor | None,
    ) -> Tensor:
        shared = _shared_expert(shared_w1, shared_w2, shared_scale)
        call = MoeInputs(x, topk_ids, topk_weights, w1, w2, shared, group, config)
        if observer is not None:
            observer.before("forward")
        y, ctx.saved = backend.forward(call)
        if observer is not None:
            observer.after("forward", backend.routing(call, ctx.saved))
        ctx.backend, ctx.config, ctx.group, ctx.into_main_grad = backend, config, group, into_main_grad
        ctx.observer = observer
        # save_for_backward and not attributes: autograd then notices tensors that were changed in place.
        ctx.save_for_backward(x, topk_ids, topk_weights, w1, w2, shared_w1, shared_w2, shared_scale)
        # main_grad lives on the Parameter objects, which saved tensors do not always give back as themselves.
        ctx.weights = (w1, w2, shared_w1, shared_w2)
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.saved is None:
            raise RuntimeError(
                "mok_moe: its backward ran already and freed what the forward kept; call forward again "
                "(retain_graph is not supported, because the backward reuses those buffers)"
            )
        x, topk_ids, topk_weights, *_, shared_scale = ctx.saved_tensors
        w1, w2, shared_w1, shared_w2 = ctx.weights
        shared = _shared_expert(shared_w1, shared_w2, shared_scale)
        call = MoeInputs(x, topk_ids, topk_weights, w1, w2, shared, ctx.group, ctx.config)
        saved, ctx.saved = ctx.saved, None
        if ctx.observer is not None:
            ctx.observer.before("backward")
        grads = ctx.backend.backward(call, saved, dy.contiguous(), ctx.into_main_grad)
        if ctx.observer is not None:
            ctx.observer.after("backward", None)
        by_weight = [grads.w1, grads.w2, grads.shared_w1, grads.shared_w2]
        if ctx.into_main_grad:
            pairs = zip(ctx.weights, by_weight, strict=True)
            by_weight = [None if w is None else autograd_result(w, g, grads.spare) for w, g in pairs]
        return (None, None, None, None, None, None, grads.x, grads.topk_weights, *by_weight, grads.shared_scale)
