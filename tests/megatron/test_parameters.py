"""The expert weights as parameters: initial values, attributes, main_grad, hooks, copies."""

from __future__ import annotations

import copy
import copyreg
import pickle
from typing import Any

import pytest
import torch

from tests.megatron import layers
from tests.megatron.once import run_once

SHARED = {"moe_shared_expert_intermediate_size": 40, "moe_shared_expert_gate": True}
SIZES = {"EP 1": {}, "EP 2": {"ep": 2}, "TP 2, EP 1": {"tp": 2}, "TP 2, EP 2": {"tp": 2, "ep": 2}}
INITIALIZATIONS = ("tracker", "cpu", "bf16")
ATTRIBUTES = ("allreduce", "tensor_model_parallel", "partition_stride", "requires_grad", "dtype")


def run(rank: int) -> dict[str, Any]:
    results: dict[str, Any] = {}
    for size, parallel in SIZES.items():
        layers.start(rank, **parallel)
        for how in INITIALIZATIONS:
            results["initial", size, how] = initial_weights(how)
        results["attributes", size] = attributes()
    layers.start(rank, ep=2)
    results["main_grad"] = {str(dtype): main_grad(dtype) for dtype in (torch.float32, torch.bfloat16)}
    results["hooks"] = hooks_that_fire()
    results["empty"] = perform_no_initialization()
    layers.start(rank)
    results["copies"] = copies()
    return results


def results() -> list[dict[str, Any]]:
    return run_once(2, run)


def initial_weights(how: str) -> list[bool]:
    fields: dict[str, Any] = {"cpu": {"use_cpu_initialization": True}, "bf16": {"params_dtype": torch.bfloat16}}
    drawn = [layers.layer(layers.config(d, **SHARED, **fields.get(how, {}))) for d in ("mok", "alltoall")]
    pairs = zip(*(layers.expert_weights(built.experts) for built in drawn), strict=True)
    same = [torch.equal(ours, theirs) and ours.std() > 0.01 for ours, theirs in pairs]
    # What is drawn after the experts must not move either.
    return same + [torch.equal(*(built.shared_experts.linear_fc1.weight for built in drawn))]


def attributes() -> tuple[list[Any], list[Any]]:
    ours, theirs = (layers.layer(layers.config(d)).experts for d in ("mok", "alltoall"))
    pairs = [
        (ours.weight1, theirs.local_experts[0].linear_fc1.weight),
        (ours.weight2, theirs.local_experts[0].linear_fc2.weight),
    ]
    mine = [[getattr(w, name) for name in ATTRIBUTES] + [w.partition_dim - 1] for w, _ in pairs]
    return mine, [[getattr(w, name) for name in ATTRIBUTES] + [w.partition_dim] for _, w in pairs]


def weights_of(built: Any) -> list[torch.nn.Parameter]:
    """Those whose gradients the operator computes."""
    shared = built.shared_experts
    return [built.experts.weight1, built.experts.weight2, shared.linear_fc1.weight, shared.linear_fc2.weight]


def main_grad(dtype: torch.dtype) -> dict[str, list[Any]]:
    """Two microbatches into main_grad of `dtype`, and their gradients in fp32 without it.

    Gradient accumulation fusion is off in Megatron's configuration: the operator accumulates all the same.
    """
    built = layers.layer(layers.config("mok", **SHARED))
    torch.manual_seed(torch.distributed.get_rank())
    batches = [torch.randn(2, 5, 2, layers.HIDDEN) for _ in range(2)]
    weights = weights_of(built)
    separate = []
    for x, dy in batches:
        layers.step(built, x, dy)
        separate.append([w.grad.clone() for w in weights])
    for weight in weights:
        weight.main_grad, weight.grad_added_to_main_grad = torch.zeros_like(weight, dtype=dtype), False
    flags = []
    for x, dy in batches:
        built.zero_grad(set_to_none=True)
        built(x.clone())[0].backward(dy)
        flags += [(w.grad_added_to_main_grad, w.grad is not None and w.grad.shape == w.shape) for w in weights]
    expected = [torch.zeros_like(w, dtype=dtype).add_(a).add_(b) for w, a, b in zip(weights, *separate, strict=True)]
    return {
        "equal": [torch.equal(w.main_grad, e) for w, e in zip(weights, expected, strict=True)],
        "flags": flags,
        "gate": [built.shared_experts.gate_weight.grad.abs().max().item() > 0],
    }


def hooks_that_fire() -> list[str]:
    """Names of the modules whose forward pre-hooks run, of those with parameters."""
    built = layers.layer(layers.config("mok", **SHARED))
    fired = []
    for name, module in built.named_modules():
        if list(module.parameters(recurse=False)):
            module.register_forward_pre_hook(lambda module, args, name=name: fired.append(name))
    built.shared_experts.linear_fc1.register_forward_pre_hook(
        lambda module, args, kwargs: fired.append("with kwargs"), with_kwargs=True
    )
    built(torch.randn(3, 2, layers.HIDDEN))
    return fired


def perform_no_initialization() -> int:
    """Bytes that the weights take when nothing is to be drawn: a checkpoint follows."""
    built = layers.layer(layers.config("mok", perform_initialization=False))
    return sum(weight.numel() for weight in layers.expert_weights(built.experts))


def copies() -> dict[str, str]:
    """The class of each copy of a layer, where the copy computes the same."""
    groups = torch.distributed.distributed_c10d
    # A process group can be neither copied nor pickled; both kinds of layer hold some.
    copyreg.pickle(torch.distributed.ProcessGroup, lambda g: (groups._resolve_process_group, (g.group_name,)))
    found = {}
    x = torch.randn(3, 2, layers.HIDDEN)
    for dispatcher in ("mok", "alltoall"):
        built = layers.layer(layers.config(dispatcher, **SHARED))
        clone = copy.deepcopy(built)
        with torch.no_grad():
            same = torch.equal(clone(x)[0], built(x)[0])
            next(built.experts.parameters()).zero_()
            apart = not torch.equal(clone(x)[0], built(x)[0])
        found[f"{dispatcher}, deepcopy"] = type(clone).__name__ if same and apart else "differs"
        # Megatron's linear layers hold functions that pickle refuses, so only the layer's own shell can be tried.
        bare = type(built).__new__(type(built))
        found[f"{dispatcher}, pickle"] = type(pickle.loads(pickle.dumps(bare))).__name__
    return found


@pytest.mark.parametrize("how", INITIALIZATIONS)
@pytest.mark.parametrize("size", SIZES)
def test_one_seed_draws_the_weights_of_sequential_mlp(size: str, how: str) -> None:
    for found in results():
        assert found["initial", size, how] == [True, True, True]


@pytest.mark.parametrize("size", SIZES)
def test_optimizer_and_reduction_see_the_attributes_of_sequential_mlp(size: str) -> None:
    for found in results():
        ours, theirs = found["attributes", size]
        assert ours == theirs


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_add_up_in_main_grad(dtype: torch.dtype) -> None:
    for found in results():
        assert found["main_grad"][str(dtype)] == {
            "equal": [True] * 4,
            "flags": [(True, True)] * 8,
            "gate": [True],
        }


def test_pre_hooks_fire_for_every_module_with_parameters() -> None:
    expected = ["router", "experts", "shared_experts", "shared_experts.linear_fc1", "shared_experts.linear_fc2"]
    for found in results():
        assert sorted(found["hooks"]) == sorted([*expected, "with kwargs"])


def test_weights_exist_without_initialization() -> None:
    assert results()[0]["empty"] == 4 * 3 * layers.INNER * layers.HIDDEN


def test_copies_keep_class_and_values() -> None:
    assert results()[0]["copies"] == {
        "mok, deepcopy": "MokMoELayer",
        "mok, pickle": "MokMoELayer",
        "alltoall, deepcopy": "MoELayer",
        "alltoall, pickle": "MoELayer",
    }
