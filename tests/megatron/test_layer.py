"""The fused layer against Megatron's own, with the same weights and tokens, at several parallel sizes."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from tests.megatron import layers
from tests.megatron.once import run_once


@dataclass(frozen=True)
class Case:
    """Fields of the configuration, and what else differs from the plain layer."""

    fields: dict[str, Any] = field(default_factory=dict)
    against: str = "alltoall"
    padding: bool = False
    lengths: tuple[int, ...] = (9,)
    """Sequence length of each rank, repeated."""
    steps: int = 1
    tolerance: float = 2e-6
    latent: bool = False
    expects: tuple[str, ...] = ()
    """Results that must be there, so that the case tests what it is named for."""


SHARED = {"moe_shared_expert_intermediate_size": 40}
SIGMOID = {
    "moe_router_topk": 4,
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_router_num_groups": 4,
    "moe_router_group_topk": 2,
    "moe_router_topk_scaling_factor": 2.5,
    "moe_router_load_balancing_type": "seq_aux_loss",
}
LOSSES = {
    "moe_router_load_balancing_type": ["aux_loss", "seq_aux_loss", "global_aux_loss"],
    "moe_aux_loss_coeff": [0.3, 0.2, 0.1],
    "moe_z_loss_coeff": 0.01,
}

CASES = {
    "plain": Case(expects=("recorded load_balancing_loss",)),
    "against allgather": Case(against="allgather"),
    "shared expert": Case(SHARED, expects=("gradient of shared_experts.linear_fc1.weight",)),
    "shared expert gate": Case(
        {**SHARED, "moe_shared_expert_gate": True}, expects=("gradient of shared_experts.gate_weight",)
    ),
    "shared expert recompute": Case(
        {**SHARED, "recompute_granularity": "selective", "recompute_modules": ["shared_experts"]}
    ),
    "shared expert overlap": Case({**SHARED, "moe_shared_expert_overlap": True}),
    "several losses": Case(
        LOSSES, expects=("recorded load_balancing_loss", "recorded seq_load_balancing_loss", "recorded z_loss")
    ),
    "sigmoid, bias, groups": Case(SIGMOID, steps=3, expects=("tokens per expert", "expert bias")),
    "drop by probability": Case({"moe_expert_capacity_factor": 0.6}),
    "drop by position": Case({"moe_expert_capacity_factor": 0.6, "moe_token_drop_policy": "position"}),
    "pad to capacity": Case({"moe_expert_capacity_factor": 0.8, "moe_pad_expert_input_to_capacity": True}),
    # Without expert bias: Megatron 0.19.2's own router fails on a padding mask beside it.
    "padding mask": Case(LOSSES, padding=True),
    "forced balance": Case({"moe_router_force_load_balancing": True}),
    "top-1": Case({"moe_router_topk": 1, "moe_router_pre_softmax": True}),
    "every expert": Case({"moe_router_topk": 8}),
    "sinkhorn": Case({"moe_router_load_balancing_type": "sinkhorn", "moe_aux_loss_coeff": 0.0}),
    "latent": Case(dict(moe_latent_size=16, **SHARED), latent=True, expects=("gradient of fc1_latent_proj.weight",)),
    "other lengths": Case(SHARED, lengths=(9, 4, 17, 1)),
    "bf16": Case({**SHARED, "params_dtype": torch.bfloat16, "bf16": True}, tolerance=2e-2),
    "fp64 router": Case({**SHARED, "moe_router_dtype": "fp64"}),
}

SIZES = {
    "EP 1": (1, {}),
    "EP 2": (2, {"ep": 2}),
    "EP 4": (4, {"ep": 4}),
    "TP 2, EP 1": (2, {"tp": 2}),
    "TP 2, EP 2": (2, {"tp": 2, "ep": 2}),
    "TP 2, EP 4": (4, {"tp": 2, "ep": 4}),
    "CP 2, EP 2": (2, {"cp": 2, "ep": 2}),
    "DP 2, EP 2": (4, {"ep": 2}),
}
# Where only the groups differ, a few cases say whether the layer uses the right ones.
FEW = ("plain", "shared expert", "shared expert gate", "sigmoid, bias, groups", "drop by probability")


def cases_of(size: str) -> list[str]:
    return list(CASES) if size.startswith("EP") else list(FEW)


def compare(rank: int, case: Case) -> dict[str, float]:
    """Largest relative difference of each result between the fused layer and Megatron's."""
    context: Any = layers.latent_projections() if case.latent else contextlib.nullcontext()
    with context:
        # The fused layer overlaps its shared expert always, Megatron's alltoall needs CUDA streams for it.
        theirs_fields = {k: v for k, v in case.fields.items() if k != "moe_shared_expert_overlap"}
        theirs = layers.layer(layers.config(case.against, **theirs_fields))
        ours = layers.layer(layers.config("mok", **case.fields), seed=8)
    layers.copy_weights(theirs, ours)
    assert type(ours).__name__ == "MokMoELayer" and type(theirs).__name__ == "MoELayer"
    worst: dict[str, float] = {}
    for number in range(case.steps):
        torch.manual_seed(100 * number + rank)
        shape = (case.lengths[rank % len(case.lengths)], 3, layers.HIDDEN)
        tokens, dy = torch.randn(2, *shape).to(case.fields.get("params_dtype", torch.float32))
        mask = torch.rand(shape[1], shape[0]) < 0.3 if case.padding else None
        found = layers.differences(layers.step(ours, tokens, dy, mask), layers.step(theirs, tokens, dy, mask))
        worst = {name: max(value, worst.get(name, 0.0)) for name, value in found.items()}
    return worst


def compare_all(rank: int, sizes: tuple[str, ...]) -> dict[tuple[str, str], dict[str, float]]:
    results = {}
    for size in sizes:
        layers.start(rank, **SIZES[size][1])
        for name in cases_of(size):
            try:
                results[size, name] = compare(rank, CASES[name])
            except Exception as error:
                raise RuntimeError(f"{size}: {name}") from error
    return results


def results(world_size: int) -> list[dict[tuple[str, str], dict[str, float]]]:
    """Of every case that needs this many ranks."""
    return run_once(world_size, compare_all, tuple(size for size in SIZES if SIZES[size][0] == world_size))


@pytest.mark.parametrize(("size", "case"), [(size, case) for size in SIZES for case in cases_of(size)])
def test_equals_megatron(size: str, case: str) -> None:
    for rank, found in enumerate(results(SIZES[size][0])):
        differences = found[size, case]
        assert set(CASES[case].expects) <= differences.keys()
        wrong = {name: value for name, value in differences.items() if not value < CASES[case].tolerance}
        assert not wrong, f"rank {rank}: relative differences {wrong}"
