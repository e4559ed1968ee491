"""Weight gradients straight into Megatron's `main_grad` buffers."""

from __future__ import annotations

import torch
from torch import Tensor

_dummies: dict[tuple[torch.Size, torch.dtype, torch.device], Tensor] = {}


def takes_main_grad(weight: Tensor | None) -> bool:
    """Whether gradients of `weight` belong in its `main_grad`, which Megatron's DistributedDataParallel sets."""
    return weight is not None and weight.requires_grad and getattr(weight, "main_grad", None) is not None


def store_gradient(weight: Tensor, gradient: Tensor, into_main_grad: bool) -> Tensor | None:
    """Hand over `gradient` (of weight's shape, in any float dtype).

    Returns:
        None where it was added to `main_grad`, in main_grad's dtype; else the gradient in the weight's dtype.
    """
    if into_main_grad and takes_main_grad(weight):
        weight.main_grad.add_(gradient)  # type: ignore[attr-defined]
        return None
    return gradient.to(weight.dtype)


def autograd_result(weight: Tensor, gradient: Tensor | None, spare: Tensor | None = None) -> Tensor | None:
    """What the autograd function returns for `weight`.

    Where the gradient went into `main_grad`, Megatron's hooks on the parameter must still fire, so autograd gets
    a tensor of the right shape all the same: undefined values, which Megatron drops because `grad_added_to_main_grad`
    is set, or zeros where the parameter says `zero_out_wgrad`. They lie in `spare` where it is large enough, else in
    memory that all weights of that shape share.
    """
    if gradient is not None or not takes_main_grad(weight):
        return gradient
    weight.grad_added_to_main_grad = True  # type: ignore[attr-defined]
    if getattr(weight, "zero_out_wgrad", False):
        return torch.zeros_like(weight)
    if spare is not None and spare.dtype == weight.dtype and spare.numel() >= weight.numel():
        return spare.view(-1)[: weight.numel()].view(weight.shape)
    key = (weight.shape, weight.dtype, weight.device)
    if key not in _dummies:
        _dummies[key] = torch.empty_like(weight, requires_grad=False)
    # A fresh view object: autograd keeps a gradient without copying it only when nobody else holds it.
    return _dummies[key].detach()
