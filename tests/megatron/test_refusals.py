"""What the fused layer cannot run is refused in one message that names the flag and the remedy, on every rank."""

from __future__ import annotations

import argparse
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from megatron.core.transformer import TransformerConfig

from mok_megatron import MokConfig, tuned, versions
from mok_megatron.errors import MokConfigError
from mok_megatron.megatron.validate import SMS_FOR_NCCL, mok_config
from tests.megatron import layers
from tests.megatron.once import run_once

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

# What is set, and what the message must say about it.
BAD_FIELDS: list[tuple[dict[str, Any], str]] = [
    ({"gated_linear_unit": False}, "pass --swiglu"),
    ({"activation_func": F.gelu}, "pass --swiglu"),
    ({"add_bias_linear": True}, "pass --disable-bias-linear"),
    ({"activation_func_clamp_value": 7.0}, "--activation-func-clamp-value is 7.0"),
    ({"glu_linear_offset": 1.0}, "--glu-linear-offset is 1.0"),
    ({"moe_mlp_glu_interleave_size": 32}, "--moe-mlp-glu-interleave-size is 32"),
    ({"moe_apply_probs_on_input": True}, "--moe-apply-probs-on-input is True"),
    ({"moe_single_grouped_weight": True}, "--moe-single-grouped-weight is True"),
    ({"moe_router_padding_for_quantization": True}, "--moe-router-padding-for-quantization is True"),
    ({"expert_model_parallel_size": 3}, "--num-experts 8 does not divide by --expert-model-parallel-size 3"),
    ({"expert_tensor_parallel_size": 2}, "pass --expert-tensor-parallel-size 1"),
    ({"tensor_model_parallel_size": 2}, "pass --expert-tensor-parallel-size 1"),
    ({"expert_tensor_parallel_num_weight_shards": 2}, "--expert-tensor-parallel-num-weight-shards 2"),
    ({"expert_gtp_weight_remat_size": 2}, "--expert-tensor-parallel-num-weight-shards 2"),
    ({"overlap_moe_expert_parallel_comm": True}, "--overlap-moe-expert-parallel-comm is set"),
    ({"overlap_dispatch_backward_with_experts_wgrad": True}, "--overlap-dispatch-backward-with-experts-wgrad is set"),
    ({"delay_wgrad_compute": True}, "--delay-wgrad-compute is set"),
    ({"moe_paged_stash": True}, "--mok-macrobatch-size bounds the memory"),
    (
        {"fine_grained_activation_offloading": True, "offload_modules": ["moe_act", "attn_norm"]},
        "--offload-modules names moe_act",
    ),
    ({"cuda_graph_impl": "local"}, "--cuda-graph-modules attn moe_router moe_preprocess"),
    ({"cuda_graph_impl": "transformer_engine", "cuda_graph_modules": ["attn", "moe"]}, "--cuda-graph-impl"),
    ({"cuda_graph_impl": "transformer_engine", "cuda_graph_modules": "attn,moe"}, "--cuda-graph-impl"),
    ({"cuda_graph_impl": "local", "cuda_graph_modules": []}, "--cuda-graph-impl local"),
    ({"transformer_impl": "inference_optimized"}, "--transformer-impl inference_optimized"),
    ({"moe_router_padding_for_fp8": True}, "--moe-router-padding-for-fp8 is True"),
    ({"fp4": "e2m1"}, "--fp4-format is e2m1"),
]
BAD_ARGUMENTS: list[tuple[dict[str, Any], str]] = [
    ({"use_megatron_fsdp": True}, "--use-megatron-fsdp is set"),
    ({"use_torch_fsdp2": True}, "--use-torch-fsdp2 is set"),
    ({"moe_use_upcycling": True}, "--moe-use-upcycling is set"),
    ({"optimizer": "muon"}, "--optimizer muon"),
    ({"mok_minibatch_size": 100}, "--mok-minibatch-size 100 is not a positive multiple of 128"),
    ({"mok_backend": "fast"}, "--mok-backend 'fast' is unknown"),
]


def refusal(**fields: Any) -> str:
    with pytest.raises(MokConfigError) as error:
        TransformerConfig(**{**GOOD, **fields})
    return str(error.value)


def lines(message: str) -> list[str]:
    return [line for line in message.splitlines() if line.startswith("  ")]


def parsed_arguments(monkeypatch: pytest.MonkeyPatch, **values: Any) -> None:
    """As if Megatron's training framework had parsed a command line."""
    module = SimpleNamespace(_GLOBAL_ARGS=argparse.Namespace(**values))
    monkeypatch.setitem(sys.modules, "megatron.training.global_vars", module)


@pytest.mark.parametrize(("fields", "expected"), BAD_FIELDS, ids=lambda value: str(value)[:60])
def test_each_field(fields: dict[str, Any], expected: str) -> None:
    message = refusal(**fields)
    assert expected in message
    assert message.startswith("--moe-token-dispatcher-type mok cannot run this configuration:")
    assert len(lines(message)) == 1


@pytest.mark.parametrize(("values", "expected"), BAD_ARGUMENTS, ids=lambda value: str(value)[:60])
def test_each_argument(monkeypatch: pytest.MonkeyPatch, values: dict[str, Any], expected: str) -> None:
    parsed_arguments(monkeypatch, **values)
    assert expected in refusal()


def test_all_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    parsed_arguments(monkeypatch, use_megatron_fsdp=True)
    message = refusal(add_bias_linear=True, fp4="e2m1", expert_model_parallel_size=3, delay_wgrad_compute=True)
    assert [line[:5] for line in lines(message)] == [f"  {number}. " for number in range(1, 6)]
    for expected in ("bias", "fp4", "--expert-model-parallel-size 3", "--delay-wgrad", "--use-megatron-fsdp"):
        assert expected in message


@pytest.mark.parametrize("installed", ["0.19.1", "0.20.0", "1.0"])
def test_megatron_out_of_range(monkeypatch: pytest.MonkeyPatch, installed: str) -> None:
    monkeypatch.setattr(versions, "installed", lambda name: installed)
    message = refusal()
    assert f"megatron-core {installed} is installed; supported is >=0.19.2,<0.20" in message
    TransformerConfig(**{**GOOD, "moe_token_dispatcher_type": "alltoall"})  # is none of our business


@pytest.mark.parametrize("fields", [{"activation_func": F.gelu}, {"fp8": "e4m3"}], ids=str)
def test_other_dispatchers_are_left_alone(fields: dict[str, Any]) -> None:
    try:
        TransformerConfig(**{**GOOD, **fields, "moe_token_dispatcher_type": "alltoall"})
    except MokConfigError:
        pytest.fail("refused for mok's sake")
    except Exception:  # Megatron's own opinion
        pass


def test_a_model_without_experts_is_left_alone() -> None:
    TransformerConfig(num_layers=1, hidden_size=32, num_attention_heads=4, moe_token_dispatcher_type="mok")


def test_precision_and_sizes_of_the_megakernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(tuned, "gpu_name", lambda: None)
    message = refusal()
    assert "pass --bf16" in message
    assert "the hidden size 32 is not a multiple of 64; use 64" in message
    assert "the expert intermediate size 48 is not a multiple of 64; use 64" in message
    parsed_arguments(monkeypatch, mok_backend="reference")
    TransformerConfig(**GOOD)


def test_shared_expert_overlap_is_what_happens_anyway() -> None:
    config = TransformerConfig(**GOOD, moe_shared_expert_intermediate_size=32, moe_shared_expert_overlap=True)
    assert not config.moe_shared_expert_overlap


def test_settings_come_from_the_config_then_from_the_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    config = TransformerConfig(**GOOD)
    assert mok_config(config) == MokConfig()
    parsed_arguments(monkeypatch, mok_minibatch_size=256)
    assert mok_config(config).minibatch_size == 256
    config.mok = MokConfig(minibatch_size=512)  # type: ignore[attr-defined]
    assert mok_config(config).minibatch_size == 512


@pytest.mark.parametrize("flag", ["overlap_grad_reduce", "overlap_param_gather"])
def test_sms_are_left_to_overlapped_collectives(monkeypatch: pytest.MonkeyPatch, flag: str) -> None:
    config = TransformerConfig(**GOOD)
    parsed_arguments(monkeypatch, **{flag: False})
    assert mok_config(config).reserved_sms is None
    parsed_arguments(monkeypatch, **{flag: True})
    assert mok_config(config).reserved_sms == SMS_FOR_NCCL > 0
    alone = {"world_size": 1, "tensor_model_parallel_size": 1, "expert_model_parallel_size": 1}
    parsed_arguments(monkeypatch, **{flag: True}, **alone)
    assert mok_config(config).reserved_sms is None  # nothing is reduced
    for sizes, reserved in (
        ({"world_size": 2}, SMS_FOR_NCCL),
        ({"world_size": 2, "expert_model_parallel_size": 2}, SMS_FOR_NCCL),  # the rest of the model has two replicas
        ({"world_size": 2, "pipeline_model_parallel_size": 2}, None),
        ({"world_size": 2, "tensor_model_parallel_size": 2, "expert_tensor_parallel_size": 1}, SMS_FOR_NCCL),
        ({"world_size": 2, "tensor_model_parallel_size": 2, "expert_model_parallel_size": 2,
          "expert_tensor_parallel_size": 1}, None),
    ):  # fmt: skip
        parsed_arguments(monkeypatch, **{flag: True}, **(alone | sizes))
        assert mok_config(config).reserved_sms == reserved, sizes
    for given in ({"mok_reserved_sms": 0}, {"mok_num_sms": 100}):  # what the user says goes
        parsed_arguments(monkeypatch, **{flag: True}, **given)
        assert mok_config(config).reserved_sms == given.get("mok_reserved_sms")


def on_ranks(rank: int) -> dict[str, str]:
    """What each rank hears; a rank that heard nothing would be waited for in vain."""
    layers.start(rank, ep=2)
    heard = {}
    built = layers.layer(layers.config("mok"))
    built.experts.mok = MokConfig(backend="megakernel")
    ragged = layers.layer(layers.config("mok"))
    for name, action in {
        "configuration": lambda: layers.config("mok", fp8="e4m3", add_bias_linear=True),
        "experts do not divide": lambda: layers.config("mok", num_moe_experts=7),
        "megakernel": lambda: built(torch.randn(3, 2, layers.HIDDEN)),
        # One rank alone is wrong, and both must hear of it.
        "dtype": lambda: ragged(torch.randn(3, 2, layers.HIDDEN, dtype=(torch.float32, torch.float16)[rank])),
    }.items():
        try:
            action()
            heard[name] = "nothing"
        except Exception as error:
            heard[name] = f"{type(error).__name__}: {error}"
    return heard


@pytest.mark.parametrize(
    ("what", "expected"),
    [
        ("configuration", "MokConfigError"),
        ("experts do not divide", "--num-experts 7 does not divide by --expert-model-parallel-size 2"),
        ("megakernel", "MokBackendError: --mok-backend megakernel"),
        ("dtype", "on rank 1 of the group"),
    ],
)
def test_every_rank_hears_it(what: str, expected: str) -> None:
    heard = [found[what] for found in run_once(2, on_ranks)]
    assert len(set(heard)) == 1
    assert expected in heard[0]
