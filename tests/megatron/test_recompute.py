"""Recomputation, several microbatches, and the phases into which CUDA graphs cut the layer: the same to the bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.megatron import layers
from tests.megatron.once import run_once

SHARED = {"moe_shared_expert_intermediate_size": 40, "moe_shared_expert_gate": True}
BIAS = {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}
LAYERS: dict[str, dict[str, Any]] = {"plain": {}, "shared expert": SHARED, "expert bias": {**SHARED, **BIAS}}
SIZES: dict[str, dict[str, int]] = {"EP 2": {"ep": 2}, "TP 2, EP 2": {"tp": 2, "ep": 2}}
MOE = {"recompute_granularity": "selective", "recompute_modules": ["moe"]}
GRAPHS = {
    "router": {"cuda_graph_impl": "transformer_engine", "cuda_graph_modules": ["attn", "moe_router"]},
    "preprocess": {
        "cuda_graph_impl": "transformer_engine",
        "cuda_graph_modules": ["attn", "moe_router", "moe_preprocess"],
    },
    # Megatron adds moe_preprocess itself here.
    "local": {"cuda_graph_impl": "local", "cuda_graph_modules": ["attn", "moe_router"]},
}


def run(rank: int) -> dict[Any, Any]:
    found: dict[Any, Any] = {}
    for size, parallel in SIZES.items():
        layers.start(rank, **parallel)
        for name, fields in LAYERS.items():
            plain = layers.layer(layers.config("mok", **fields))
            again = layers.layer(layers.config("mok", **fields, **MOE))
            assert again.moe_layer_recompute and not plain.moe_layer_recompute
            found["recompute", size, name] = unequal(layers.step(plain, *batch()), layers.step(again, *batch()))
            found["microbatches", size, name] = two_microbatches(fields)
    layers.start(rank, ep=2)
    for how, graph in GRAPHS.items():
        for name, fields in LAYERS.items():
            found["graph", how, name] = in_phases(how, {**fields, **graph})
    return found


def batch() -> tuple[Tensor, Tensor]:
    torch.manual_seed(torch.distributed.get_rank())
    return tuple(torch.randn(2, 7, 3, layers.HIDDEN).unbind())  # type: ignore[return-value]


def unequal(one: dict[str, Tensor], other: dict[str, Tensor]) -> list[str]:
    """Names of the results that differ."""
    assert one.keys() == other.keys()
    return [name for name in one if not torch.equal(one[name], other[name])]


def two_microbatches(fields: dict[str, Any]) -> list[str]:
    """Parameters whose gradient is not doubled by a second pass over the same tokens (exact in binary)."""
    built = layers.layer(layers.config("mok", **fields))
    x, dy = batch()
    gradients = []
    for _ in range(2):
        built(x.clone().requires_grad_())[0].backward(dy)
        gradients.append({name: p.grad.clone() for name, p in built.named_parameters()})
    return [name for name, grad in gradients[0].items() if not torch.equal(2 * grad, gradients[1][name])]


def in_phases(how: str, fields: dict[str, Any]) -> list[str]:
    """What differs from the layer in one piece when the layer runs as Megatron's CUDA graphs cut it.

    The graphs are left out: this is the protocol of TransformerLayer._te_cuda_graph_capture and
    _te_cuda_graph_replay, and of MoETransformerLayer._forward_mlp, in which tensors of one phase reach the next only
    if the layer hands them over.
    """
    whole = layers.layer(layers.config("mok", **{k: v for k, v in fields.items() if not k.startswith("cuda_graph")}))
    built = layers.layer(layers.config("mok", **fields))
    x, dy = batch()
    expected = layers.step(whole, x, dy)
    built.zero_grad(set_to_none=True)
    tokens = x.clone().requires_grad_()
    output = local_phases(built, tokens) if how == "local" else te_phases(built, tokens)
    output.backward(dy)
    found = {"output": output.detach(), "input gradient": tokens.grad}
    found["FC1 gradient"], found["FC2 gradient"] = layers.expert_weights(built.experts, "grad")
    found |= {f"gradient of {n}": p.grad for n, p in built.named_parameters() if not n.startswith("experts.")}
    # The shared expert is Megatron's own module here, and its sums round elsewhere.
    compared = {name: expected[name] for name in found}
    return [f"{n}: {d}" for n, d in layers.differences(found, compared).items() if d > 1e-6]


def te_phases(built: Any, x: Tensor) -> Tensor:
    from megatron.core.transformer.moe import moe_utils

    before = moe_utils.is_graph_capturing
    moe_utils.is_graph_capturing = lambda: True
    try:
        outputs = list(built(x))
    finally:
        moe_utils.is_graph_capturing = before
    shared = outputs.pop() if built.use_shared_expert and not built.config.moe_shared_expert_overlap else None
    names = built.token_dispatcher.valid_cudagraph_attrs
    captured = {"hidden_states": outputs[0], "probs": outputs[1], "shared_expert_output": shared}
    if names is None:
        captured["routing_map"] = outputs[2]
    else:
        assert len(outputs) == 2 + len(names)
    forget(built)
    for name, value in zip(names or (), outputs[2:], strict=False):
        setattr(built.token_dispatcher, name, value)
    built.cudagraph_tensor_store.set(**captured)
    output = built(outputs[0])[0]
    built.cudagraph_tensor_store.clear()
    return output


def local_phases(built: Any, x: Tensor) -> Tensor:
    built.fwd_execution_map = "route"
    hidden, probs, shared = built(x, intermediate_tensors=())
    kept = {name: getattr(built.token_dispatcher, name) for name in built.token_dispatcher.cudagraph_attrs}
    forget(built)
    for name, value in kept.items():
        setattr(built.token_dispatcher, name, value)
    built.fwd_execution_map = "expert_compute"
    output, _ = built(None, intermediate_tensors=(hidden, probs))
    built.fwd_execution_map = "postprocess"
    return built(None, intermediate_tensors=(output, shared))


def forget(built: Any) -> None:
    """A replayed graph runs no Python: tensors that the layer keeps on the side are those of the capture."""
    for owner in (built, built.token_dispatcher):
        for name, value in vars(owner).items():
            if isinstance(value, Tensor):
                setattr(owner, name, torch.full_like(value, -1))
    built._shared = None


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("size", SIZES)
def test_recompute_changes_no_bit(size: str, name: str) -> None:
    assert [found["recompute", size, name] for found in run_once(2, run)] == [[], []]


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("size", SIZES)
def test_microbatches_add_up(size: str, name: str) -> None:
    assert [found["microbatches", size, name] for found in run_once(2, run)] == [[], []]


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("how", GRAPHS)
def test_phases_of_cuda_graphs(how: str, name: str) -> None:
    assert [found["graph", how, name] for found in run_once(2, run)] == [[], []]
