"""Operands as they come: at any address, with any integer type; and main_grad where the kernel cannot add to it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mok_megatron.errors import MokInputError
from mok_megatron.megakernel import check_errors, release_workspaces
from mok_megatron.ops import mok_moe
from mok_megatron.selftest.problem import kernel_config, make_problem

pytestmark = pytest.mark.gpu
CONFIG = kernel_config(backend="megakernel")


def off_by(elements: int, tensor: Tensor) -> Tensor:
    """The same values, contiguous, `elements` behind an aligned address."""
    buffer = tensor.new_empty(tensor.numel() + elements)
    buffer[elements:] = tensor.reshape(-1)
    return buffer[elements:].view(tensor.shape)


def results(x: Tensor, ids: Tensor, weights: Tensor, w1: Tensor, w2: Tensor, dy: Tensor) -> list[Tensor]:
    x, weights = x.detach().requires_grad_(), weights.detach().requires_grad_()
    w1, w2 = w1.detach().requires_grad_(), w2.detach().requires_grad_()
    y = mok_moe(x, ids, weights, w1, w2, config=CONFIG)
    return [y, *torch.autograd.grad(y, (x, weights, w1, w2), dy)]


def test_addresses_and_integer_types_change_nothing():
    p = make_problem(200, 128, 64, 4, 2)
    right = results(p.x, p.ids, p.weights, p.w1, p.w2, p.dy)
    others = [
        results(off_by(1, p.x), off_by(1, p.ids), off_by(1, p.weights), p.w1, p.w2, off_by(3, p.dy)),
        results(
            p.x.t().contiguous().t(), p.ids.long(), p.weights, p.w1.mT.contiguous().mT, p.w2, p.dy.expand(200, 128)
        ),
    ]
    for found in others:
        assert all(torch.equal(a, b) for a, b in zip(found, right, strict=True))


@pytest.mark.parametrize("number", [2**32 + 1, -(2**32), 2**31, 2**63 - 1, -(2**63)])
def test_a_number_beyond_32_bits_is_no_expert(number):
    """2**32 + 1 would wrap to expert 1."""
    p = make_problem(200, 128, 64, 4, 2)
    ids = p.ids.long()
    ids[7, 1] = number
    mok_moe(p.x, ids, p.weights, p.w1, p.w2, config=CONFIG)
    torch.cuda.synchronize()
    try:
        with pytest.raises(MokInputError, match="topk_ids holds"):
            check_errors()
    finally:
        release_workspaces()


@pytest.mark.parametrize(
    ("offset", "dtype", "says"),
    [(1, torch.float32, "begins 1 elements into its buffer"), (0, torch.float16, "is torch.float16")],
)
def test_main_grad_that_cannot_be_added_to(offset, dtype, says):
    p = make_problem(200, 128, 64, 4, 2)
    w1 = p.w1.detach().requires_grad_()
    w1.main_grad = off_by(offset, torch.zeros_like(w1, dtype=dtype))
    y = mok_moe(p.x, p.ids, p.weights, w1, p.w2, config=CONFIG)
    with pytest.raises(MokInputError, match=f"main_grad of w1 {says}"):
        y.backward(p.dy)
