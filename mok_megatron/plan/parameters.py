"""Parameters and arithmetic of a model, counted from its configuration file.

Counts are of elements and of multiply-adds x 2 (FLOPs), forward only, for one layer and one token unless said
otherwise. Norm weights are counted, biases are not (these models have none in the products).
"""

from __future__ import annotations

from dataclasses import dataclass

from mok_megatron.configs import AttentionShape, ModelConfig


@dataclass(frozen=True)
class LayerCounts:
    """Parameters of one transformer layer, split by how Megatron shards them."""

    dense: int
    """Sharded over TP, replicated over data parallelism: attention, norms, router, shared expert, dense MLP."""
    experts: int
    """Sharded over EP: all routed experts of the layer together."""
    active: int
    """Parameters that one token meets, norms excluded: FLOPs of the products are 2 x this."""


def attention_parameters(model: ModelConfig) -> int:
    """Parameters of one layer's attention; the average over layers where the model mixes two kinds."""
    a, hidden = model.attention, model.moe.hidden_size
    if a.kind == "mla":
        return _mla(a, hidden)
    if a.kind == "gqa":
        return _gqa(a, hidden)
    if a.kind == "gated_delta_hybrid":
        interval = a.size("full_attention_interval")
        return (_gqa(a, hidden) + (interval - 1) * _gated_delta(a, hidden)) // interval
    return _compressed(a, hidden)


def _mla(a: AttentionShape, hidden: int) -> int:
    """Latent attention of DeepSeek-V2 (arXiv 2405.04434, section 2.1), with a DSA indexer where there is one."""
    q_rank, kv_rank = a.size("q_lora_rank"), a.size("kv_lora_rank")
    rope, nope, v = a.size("qk_rope_head_dim"), a.size("qk_nope_head_dim"), a.size("v_head_dim")
    down = hidden * (q_rank + kv_rank + rope) + q_rank + kv_rank
    up = q_rank * a.num_heads * (nope + rope) + kv_rank * a.num_heads * (nope + v)
    return down + up + a.num_heads * v * hidden + _indexer(a, hidden)


def _indexer(a: AttentionShape, hidden: int) -> int:
    """Indexer of DeepSeek sparse attention: queries from the latent, one key head, one weight a head."""
    if a.indexer_heads is None or a.indexer_head_dim is None:
        return 0
    queries = a.size("q_lora_rank") * a.indexer_heads * a.indexer_head_dim
    return queries + hidden * (a.indexer_head_dim + a.indexer_heads)


def _gqa(a: AttentionShape, hidden: int) -> int:
    dim, groups = a.size("head_dim"), a.size("num_query_groups")
    queries = a.num_heads * dim * (2 if a.output_gate else 1)
    return hidden * (queries + 2 * groups * dim) + a.num_heads * dim * hidden + 2 * dim


def _gated_delta(a: AttentionShape, hidden: int) -> int:
    """Gated delta net (arXiv 2412.06464) as in Qwen3-Next: q, k, v, gate, two scalars a value head, convolution."""
    dim = a.size("linear_head_dim")
    keys, values = a.size("linear_key_heads") * dim, a.size("linear_value_heads") * dim
    projections = hidden * (2 * keys + 2 * values + 2 * a.size("linear_value_heads"))
    return projections + (2 * keys + values) * a.size("linear_conv_kernel") + values * hidden


def _compressed(a: AttentionShape, hidden: int) -> int:
    """DeepSeek-V4: low-rank queries, one key-value head, grouped low-rank output. Compressors are not counted."""
    dim, q_rank = a.size("head_dim"), a.size("q_lora_rank")
    queries = hidden * q_rank + q_rank * a.num_heads * dim
    output = a.num_heads * dim * a.size("o_lora_rank") + a.size("o_groups") * a.size("o_lora_rank") * hidden
    return queries + hidden * dim + output + _indexer(a, hidden)


def moe_layer(model: ModelConfig) -> LayerCounts:
    """One MoE layer with its attention."""
    moe = model.moe
    hidden = moe.hidden_size
    attention = attention_parameters(model)
    shared = 3 * hidden * moe.shared_expert_intermediate_size + (hidden if moe.shared_expert_gate else 0)
    router = hidden * moe.num_experts
    expert = 3 * hidden * moe.moe_ffn_hidden_size
    return LayerCounts(
        dense=attention + shared + router + 2 * hidden,
        experts=moe.num_experts * expert,
        active=attention + shared + router + moe.topk * expert,
    )


def dense_layer(model: ModelConfig) -> LayerCounts:
    """One layer with a dense MLP."""
    hidden = model.moe.hidden_size
    attention = attention_parameters(model)
    mlp = 3 * hidden * model.moe.dense_ffn_hidden_size
    return LayerCounts(dense=attention + mlp + 2 * hidden, experts=0, active=attention + mlp)


def mtp_layer(model: ModelConfig) -> LayerCounts:
    """One multi-token-prediction layer: a MoE layer and the projection of [hidden, embedding] to hidden."""
    layer, hidden = moe_layer(model), model.moe.hidden_size
    projection = 2 * hidden * hidden
    return LayerCounts(layer.dense + projection + 3 * hidden, layer.experts, layer.active + projection)


def embedding_parameters(model: ModelConfig) -> int:
    """Input embedding; the output layer of these models (untied) has as many."""
    return model.model.vocab_size * model.moe.hidden_size


def total_parameters(model: ModelConfig, *, mtp: bool = False) -> int:
    """Parameters of the whole model, MTP layers only if asked for: the way model cards count."""
    moe = model.moe
    total = moe.num_moe_layers * (moe_layer(model).dense + moe_layer(model).experts)
    total += moe.first_dense_layers * dense_layer(model).dense
    total += 2 * embedding_parameters(model) + moe.hidden_size
    if mtp:
        total += model.model.mtp_layers * (mtp_layer(model).dense + mtp_layer(model).experts)
    return total


def attention_core_flops(model: ModelConfig) -> float:
    """FLOPs of scores and weighted values of one layer, for one token of a causal sequence of the model's length.

    A token sees half the sequence on average. Sparse attention sees at most `indexer_topk` tokens; linear
    attention updates and reads a state of head_dim x head_dim for each value head instead.
    """
    a, length = model.attention, model.moe.sequence_length
    seen = length / 2
    if a.kind == "mla":
        if a.indexer_topk is not None:
            seen = min(seen, a.indexer_topk)
        width = a.size("qk_nope_head_dim") + a.size("qk_rope_head_dim") + a.size("v_head_dim")
        return 2 * seen * a.num_heads * width
    if a.kind == "gqa":
        return 2 * seen * a.num_heads * 2 * a.size("head_dim")
    if a.kind == "gated_delta_hybrid":
        interval = a.size("full_attention_interval")
        full = 2 * seen * a.num_heads * 2 * a.size("head_dim")
        linear = 2 * 3 * a.size("linear_value_heads") * a.size("linear_head_dim") ** 2
        return (full + (interval - 1) * linear) / interval
    return 2 * min(seen, a.size("indexer_topk") + 128) * a.num_heads * 2 * a.size("head_dim")


def attention_activations(model: ModelConfig) -> int:
    """Elements that one layer's attention keeps for its backward, for one token, with fused (flash) attention.

    Inputs of each product, q, k, v and the output; norms of latents keep their input and output.
    """
    a = model.attention
    if a.kind == "mla":
        qk = a.size("qk_nope_head_dim") + a.size("qk_rope_head_dim")
        latents = 2 * (a.size("q_lora_rank") + a.size("kv_lora_rank")) + a.size("qk_rope_head_dim")
        return latents + a.num_heads * (2 * qk + 2 * a.size("v_head_dim"))
    if a.kind == "gqa":
        return _gqa_activations(a)
    if a.kind == "gated_delta_hybrid":
        dim, interval = a.size("linear_head_dim"), a.size("full_attention_interval")
        keys, values = a.size("linear_key_heads") * dim, a.size("linear_value_heads") * dim
        linear = 2 * (2 * keys + values) + 3 * values  # before and after the convolution; gate, output, its norm
        return (_gqa_activations(a) + (interval - 1) * linear) // interval
    dim = a.size("head_dim")
    return 2 * a.size("q_lora_rank") + 2 * dim + 2 * a.num_heads * dim + a.size("o_groups") * a.size("o_lora_rank")


def _gqa_activations(a: AttentionShape) -> int:
    dim, groups = a.size("head_dim"), a.size("num_query_groups")
    gate = a.num_heads * dim if a.output_gate else 0
    return 3 * a.num_heads * dim + 3 * groups * dim + gate  # q and k also before their norm
