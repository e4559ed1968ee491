"""Megatron configurations and checkpoints with any mistakes: accepted and right, or refused by name."""

from __future__ import annotations

import argparse
import sys
import tempfile
import traceback
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import strategies as st

from mok_megatron.errors import MokConfigError
from tests.properties.cases import CASES, cases
from tests.ranks import run_on_ranks

GOOD: dict[str, Any] = {
    "num_layers": 1,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_moe_experts": 8,
    "moe_ffn_hidden_size": 48,
    "gated_linear_unit": True,
    "activation_func": F.silu,
    "add_bias_linear": False,
    "moe_token_dispatcher_type": "mok",
}

# Values that the fused layer cannot run, and what its refusal must name; and values that are none of its business.
BAD: dict[str, list[tuple[Any, str]]] = {
    "gated_linear_unit": [(False, "--swiglu")],
    "activation_func": [(F.gelu, "--swiglu"), (None, "--swiglu")],
    "add_bias_linear": [(True, "--disable-bias-linear")],
    "activation_func_clamp_value": [(7.0, "--activation-func-clamp-value"), (0.0, "--activation-func-clamp-value")],
    "glu_linear_offset": [(1.0, "--glu-linear-offset")],
    "moe_mlp_glu_interleave_size": [(32, "--moe-mlp-glu-interleave-size")],
    "moe_apply_probs_on_input": [(True, "--moe-apply-probs-on-input")],
    "expert_model_parallel_size": [
        (n, "--expert-model-parallel-size") for n in (3, 0, -1, -8, 15, None, "2", 2.0, 10**30)
    ],
    "num_moe_experts": [(n, "--num-experts") for n in (0, -8, 8.5, "8")],
    "expert_tensor_parallel_size": [(2, "--expert-tensor-parallel-size"), (0, "--expert-tensor-parallel-size")],
    "delay_wgrad_compute": [(True, "--delay-wgrad-compute")],
    "overlap_moe_expert_parallel_comm": [(True, "--overlap-moe-expert-parallel-comm")],
    "moe_paged_stash": [(True, "--moe-paged-stash")],
    "fp4": [("e2m1", "--fp4-format")],
    "cuda_graph_impl": [("local", "--cuda-graph-impl"), ("transformer_engine", "--cuda-graph-impl")],
    "transformer_impl": [("inference_optimized", "--transformer-impl")],
}
GOOD_TOO: dict[str, list[Any]] = {
    "moe_router_topk": [1, 2, 8],
    "moe_shared_expert_intermediate_size": [None, 32],
    "moe_router_score_function": ["softmax", "sigmoid"],
    "moe_aux_loss_coeff": [0.0, 0.01],
    "num_moe_experts": [1, 2, 8, 64],
    "moe_z_loss_coeff": [None, 1e-3],
    "moe_router_dtype": [None, "fp32", "fp64"],
    "hidden_dropout": [0.0, 0.1],
    "expert_model_parallel_size": [1],
    "glu_linear_offset": [0.0],
}
ARGUMENTS: dict[str, list[tuple[Any, str]]] = {
    "use_megatron_fsdp": [(True, "--use-megatron-fsdp"), (False, "")],
    "use_torch_fsdp2": [(True, "--use-torch-fsdp2")],
    "moe_use_upcycling": [(True, "--moe-use-upcycling")],
    "optimizer": [("muon", "--optimizer"), ("adam", ""), ("sgd", "")],
    "mok_minibatch_size": [(100, "--mok-minibatch-size"), ("128", "--mok-minibatch-size"), (256, "")],
    "mok_backend": [("fast", "--mok-backend"), ("reference", ""), (3, "--mok-backend")],
    "mok_timeout_s": [(-1.0, "--mok-timeout-s"), (2.0, "")],
}


@st.composite
def configurations(draw: st.DrawFn) -> tuple[dict[str, Any], dict[str, Any], list[str]]:
    """Fields, training arguments, and what a refusal must name."""
    fields: dict[str, Any] = {}
    names: list[str] = []
    for name in draw(st.lists(st.sampled_from(sorted(GOOD_TOO)), max_size=4, unique=True)):
        fields[name] = draw(st.sampled_from(GOOD_TOO[name]))
    for name in draw(st.lists(st.sampled_from(sorted(BAD)), max_size=draw(st.integers(0, 3)), unique=True)):
        fields[name], named = draw(st.sampled_from(BAD[name]))
        names.append(named)
    if "--num-experts" in names and fields.get("expert_model_parallel_size") in (3, 15, 10**30):
        names.remove("--expert-model-parallel-size")  # good enough where there is nothing that it could divide
    arguments: dict[str, Any] = {}
    for name in draw(st.lists(st.sampled_from(sorted(ARGUMENTS)), max_size=2, unique=True)):
        arguments[name], named = draw(st.sampled_from(ARGUMENTS[name]))
        names += [named] if named else []
    return fields, arguments, names


@cases(300, configuration=configurations())
def test_a_configuration_is_taken_or_refused_by_name(configuration: Any) -> None:
    from megatron.core.transformer import TransformerConfig

    fields, arguments, names = configuration
    module = SimpleNamespace(_GLOBAL_ARGS=argparse.Namespace(**arguments))
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "megatron.training.global_vars", module)
        try:
            TransformerConfig(**{**GOOD, **fields})
        except MokConfigError as error:
            assert names, error
            assert all(name in str(error) for name in names), (names, str(error))
            return
        except Exception as error:  # Megatron's own opinion of what is none of our business
            frames = traceback.extract_tb(error.__traceback__)
            assert not any("mok_megatron/megatron/validate.py" in frame.filename for frame in frames), error
    assert not names, names


# ---- checkpoints

KEYS = ("experts.weight1", "experts.weight2", "router.weight")


@st.composite
def mistakes(draw: st.DrawFn) -> list[tuple[str, str, Any]]:
    """What happens to the entries of a state dict: (key, kind, detail)."""
    chosen = draw(st.lists(st.sampled_from(KEYS), max_size=2, unique=True))
    kinds = st.sampled_from(["missing", "renamed", "shape", "axes", "dtype", "values", "extra state"])
    return [(key, draw(kinds), draw(st.integers(0, 2))) for key in chosen]


def damage(state: dict[str, Any], mistake: tuple[str, str, Any]) -> list[str]:
    """Change the state dict; returns what a refusal must name, nothing where it still fits."""
    key, kind, detail = mistake
    value = state[key]
    if kind == "missing":
        del state[key]
        return [key]
    if kind == "renamed":
        other = (key + "x", "module." + key, key.upper())[detail]
        state[other] = state.pop(key)
        return [key, other]
    if kind == "shape":
        state[key] = value.narrow(detail % value.dim(), 0, value.shape[detail % value.dim()] - 1)
        return [key]
    if kind == "axes":
        state[key] = value.transpose(0, 1)
        return [key]
    if kind == "dtype":
        state[key] = value.to((torch.bfloat16, torch.float64, torch.float16)[detail])
    elif kind == "values":
        state[key] = value + 1
    else:  # what other linear layers leave there
        state[f"experts.linear_fc{detail % 2 + 1}.0._extra_state"] = torch.empty(0, dtype=torch.uint8)
    return []


def check_state_dicts(rank: int) -> int:
    from tests.megatron import layers

    layers.start(rank)
    built = layers.layer(layers.config("mok"))
    original = {key: value.clone() for key, value in built.state_dict().items() if value is not None}
    ran = 0

    @cases(STATE_DICTS, changes=mistakes())
    def load_a_state_dict(changes: list[tuple[str, str, Any]]) -> None:
        nonlocal ran
        state = {key: value.clone() for key, value in original.items()}
        named = [name for change in changes for name in damage(state, change)]
        built.load_state_dict(original)
        try:
            built.load_state_dict(state)
        except RuntimeError as error:  # torch's way to say it
            assert named and all(name in str(error) for name in named), (named, str(error))
        else:
            assert not named, named
            for key, value in built.state_dict().items():
                assert value is None or torch.equal(value, state[key].to(value.dtype)), key
        ran += 1

    load_a_state_dict()
    return ran


def check_checkpoints(rank: int) -> int:
    """Distributed checkpoints of one shape, read by a layer of any."""
    from megatron.core import dist_checkpointing

    from tests.megatron import layers

    layers.start(rank)
    dist.barrier()
    ran = 0

    def entries(built: Any, singleton: bool, prefix: str = "mlp.") -> dict[str, Any]:
        return {"model": built.sharded_state_dict(prefix=prefix, metadata={"singleton_local_shards": singleton})}

    saved = layers.layer(layers.config("mok"))
    with tempfile.TemporaryDirectory() as folder:
        for singleton in (False, True):
            path = Path(folder, str(singleton))
            path.mkdir()
            dist_checkpointing.save(entries(saved, singleton), str(path), async_strategy="mcore")

        @cases(
            CHECKPOINTS,
            experts=st.sampled_from([8, 8, 4, 16]),
            inner=st.sampled_from([48, 48, 32]),
            hidden=st.sampled_from([32, 32, 64]),
            prefix=st.sampled_from(["mlp.", "mlp.", "mlp.", "mpl."]),
            layouts=st.sampled_from([(False, False), (True, True), (True, False), (False, True)]),
        )
        def load_a_checkpoint(experts: int, inner: int, hidden: int, prefix: str, layouts: tuple[bool, bool]) -> None:
            nonlocal ran
            fields = {"num_moe_experts": experts, "moe_ffn_hidden_size": inner, "hidden_size": hidden}
            built = layers.layer(layers.config("mok", **fields), seed=8)
            fits = (experts, inner, hidden, prefix) == (8, 48, 32, "mlp.") and layouts[0] == layouts[1]
            try:
                path = str(Path(folder, str(layouts[0])))
                state = dist_checkpointing.load(entries(built, layouts[1], prefix), path)
                built.load_state_dict({key.removeprefix(prefix): value for key, value in state["model"].items()})
            except BaseException as error:  # torch's CheckpointException is not an Exception
                assert not fits and prefix in str(error), error
            else:
                assert fits, fields
                for mine, theirs in zip(built.parameters(), saved.parameters(), strict=True):
                    assert torch.equal(mine, theirs)
            ran += 1

        load_a_checkpoint()
    return ran


STATE_DICTS = CASES["load_a_state_dict"] = 100
CHECKPOINTS = CASES["load_a_checkpoint"] = 40


def test_state_dicts() -> None:
    """Loaded to the bit, or refused with the keys that do not fit."""
    assert run_on_ranks(1, check_state_dicts)[0] >= STATE_DICTS


def test_distributed_checkpoints() -> None:
    """Read to the bit, or refused with a key that does not fit."""
    assert run_on_ranks(1, check_checkpoints)[0] >= CHECKPOINTS
