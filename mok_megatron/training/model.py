"""A small model of DeepSeek-V3's shape, built by Megatron Core's own specs.

The shape follows the DeepSeek-V3 technical report (arXiv:2412.19437, sections 2 and 4.2) at a size that a laptop
trains: the first layer dense, then MoE layers; multi-head latent attention; a shared expert; a sigmoid router with
expert bias, group-limited top-k and a sequence-wise auxiliary loss; one multi-token-prediction layer.
"""

from dataclasses import dataclass

import torch
from megatron.core.distributed import finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_mtp_block_spec
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer.transformer_config import MLATransformerConfig

from mok_megatron.training.attention import accept_mla_channels
from mok_megatron.training.data import VOCABULARY

VOCABULARY_MULTIPLE = 64  # Megatron pads the vocabulary to a multiple, for the shape of the output product


@dataclass(frozen=True)
class ModelShape:
    """Sizes of the model; the defaults make the quick start's 3.9 million parameters."""

    layers: int = 3
    dense_layers: int = 1
    hidden: int = 128
    heads: int = 4
    dense_intermediate: int = 384
    experts: int = 8
    top_k: int = 2
    expert_groups: int = 4
    groups_per_token: int = 2
    expert_intermediate: int = 128
    shared_intermediate: int = 128
    q_rank: int = 64
    kv_rank: int = 32
    head_dim: int = 32
    rope_dim: int = 16
    mtp_layers: int = 1
    sequence_length: int = 128
    seed: int = 1234


def model_config(shape: ModelShape, dispatcher: str, dtype: torch.dtype, experts_ranks: int) -> MLATransformerConfig:
    """Megatron's configuration of ``shape`` under one token dispatcher.

    Args:
        shape: sizes of the model.
        dispatcher: ``moe_token_dispatcher_type``: ``mok``, ``alltoall``, ``allgather``, ...
        dtype: of parameters and activations, fp32 or bf16.
        experts_ranks: expert-parallel size; divides ``shape.experts``.

    Raises:
        ValueError: from Megatron Core or the dispatcher, when the configuration cannot work.
    """
    return MLATransformerConfig(
        num_layers=shape.layers,
        hidden_size=shape.hidden,
        ffn_hidden_size=shape.dense_intermediate,
        num_attention_heads=shape.heads,
        q_lora_rank=shape.q_rank,
        kv_lora_rank=shape.kv_rank,
        qk_head_dim=shape.head_dim,
        qk_pos_emb_head_dim=shape.rope_dim,
        v_head_dim=shape.head_dim,
        rope_type="rope",
        qk_layernorm=True,
        normalization="RMSNorm",
        layernorm_epsilon=1e-6,
        add_bias_linear=False,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        masked_softmax_fusion=False,  # Apex's kernel
        attention_dropout=0.0,
        hidden_dropout=0.0,
        num_moe_experts=shape.experts,
        moe_layer_freq=[0] * shape.dense_layers + [1] * (shape.layers - shape.dense_layers),
        moe_ffn_hidden_size=shape.expert_intermediate,
        moe_shared_expert_intermediate_size=shape.shared_intermediate,
        moe_router_topk=shape.top_k,
        moe_router_num_groups=shape.expert_groups,
        moe_router_group_topk=shape.groups_per_token,
        moe_router_score_function="sigmoid",
        moe_router_topk_scaling_factor=2.5,
        moe_router_enable_expert_bias=True,
        moe_router_bias_update_rate=1e-3,
        moe_router_dtype="fp32",
        moe_router_load_balancing_type="seq_aux_loss",
        moe_aux_loss_coeff=1e-4,
        moe_token_dispatcher_type=dispatcher,
        expert_model_parallel_size=experts_ranks,
        mtp_num_layers=shape.mtp_layers or None,
        mtp_loss_scaling_factor=0.3,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        finalize_model_grads_func=finalize_model_grads,
        deterministic_mode=True,
    )


def build_model(config: MLATransformerConfig, shape: ModelShape) -> GPTModel:
    """The model on this rank's device, by Megatron's block specs; the seed decides its initial weights.

    Needs Megatron's parallel groups.
    """
    model_parallel_cuda_manual_seed(shape.seed, force_reset_rng=True)
    accept_mla_channels()
    block = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization=config.normalization)
    mtp = get_gpt_mtp_block_spec(config, block, use_transformer_engine=False) if config.mtp_num_layers else None
    return GPTModel(
        config,
        block,
        vocab_size=-(-VOCABULARY // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE,
        max_sequence_length=shape.sequence_length,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
        mtp_block_spec=mtp,
    )
