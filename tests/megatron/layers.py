"""Builds Megatron MoE layers under different dispatchers with the same weights, on CPU ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from mok_megatron import host


def start(rank: int, tp: int = 1, pp: int = 1, ep: int = 1, cp: int = 1, etp: int = 1, seed: int = 7) -> None:
    """Host mode, Megatron's parallel groups and random-number states for this rank."""
    host.enable()
    from megatron.core import parallel_state, tensor_parallel

    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        context_parallel_size=cp,
        expert_model_parallel_size=ep,
        expert_tensor_parallel_size=etp,
    )
    tensor_parallel.model_parallel_cuda_manual_seed(seed)


def config(dispatcher: str, **overrides: Any) -> Any:
    """A small TransformerConfig with experts; `overrides` are its fields."""
    from megatron.core.transformer import TransformerConfig

    sizes = dict(num_layers=1, hidden_size=32, num_attention_heads=4, ffn_hidden_size=64)
    moe = dict(num_moe_experts=8, moe_router_topk=2, moe_ffn_hidden_size=48, moe_router_dtype="fp32")
    activation = dict(gated_linear_unit=True, activation_func=F.silu, add_bias_linear=False)
    balancing = dict(moe_aux_loss_coeff=0.01, moe_router_load_balancing_type="aux_loss")
    other = dict(bias_activation_fusion=False, params_dtype=torch.float32)
    fields: dict[str, Any] = {**sizes, **moe, **activation, **balancing, **other, **overrides}
    return TransformerConfig(moe_token_dispatcher_type=dispatcher, **fields)


def layer(config: Any) -> Any:
    """Megatron's MoE layer for a config, by its own spec."""
    from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec

    spec = get_moe_module_spec(use_te=False, num_experts=config.num_moe_experts, moe_grouped_gemm=False)
    built = spec(config=config)
    built.set_layer_number(1)
    return built
