"""Megatron's linear layers accumulate into main_grad without Apex where Transformer Engine is there."""

import sys
import types

import pytest
import torch
from megatron.core.tensor_parallel import layers

from mok_megatron.training.wgrad import accumulate_with_transformer_engine

without_apex = pytest.mark.skipif(layers._grad_accum_fusion_available, reason="Apex is installed")


@pytest.fixture
def megatron(monkeypatch):
    """Megatron's names that may change, put back afterwards."""
    from megatron.core import utils

    monkeypatch.setattr(layers, "_grad_accum_fusion_available", False)
    for module in (layers, utils):
        monkeypatch.setattr(module, "fused_weight_gradient_mlp_cuda", None, raising=False)


def gemm(a, b, out_dtype, layout, out, accumulate, grad):
    """Transformer Engine's product: column-major, so `NT` of row-major A [rows, k] and B [rows, n] is B^T A."""
    assert layout == "NT" and accumulate and grad and out.dtype == out_dtype
    out += b.to(out_dtype).t() @ a.to(out_dtype)


@without_apex
def test_accumulates_over_microbatches(megatron, monkeypatch):
    module = types.ModuleType("transformer_engine.pytorch.cpp_extensions")
    module.general_gemm = gemm
    for name in ("transformer_engine", "transformer_engine.pytorch"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    assert accumulate_with_transformer_engine()
    assert not accumulate_with_transformer_engine()  # once

    weight = torch.nn.Parameter(torch.randn(3, 4).bfloat16())
    weight.main_grad = torch.full((3, 4), 0.5)
    expected = weight.main_grad.clone()
    for _ in range(2):
        x = torch.randn(5, 4).bfloat16().requires_grad_()
        dy = torch.randn(5, 3).bfloat16()
        y = layers.linear_with_grad_accumulation_and_async_allreduce(x, weight, None, True, False, False, tp_group=None)
        y.backward(dy)
        expected += dy.float().t() @ x.detach().float()
        assert torch.equal(x.grad, dy @ weight.detach())
    assert torch.allclose(weight.main_grad, expected, rtol=1e-6) and weight.grad is None


@without_apex
def test_without_transformer_engine_nothing_changes(megatron, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformer_engine", None)
    assert not accumulate_with_transformer_engine()
    assert not layers._grad_accum_fusion_available
