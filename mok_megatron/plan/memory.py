"""Memory of one GPU, item by item, in bytes.

States follow Megatron's distributed optimizer in bf16: 2 bytes of weight and 4 of gradient an element, and 12 of
optimizer state (fp32 weight and two moments; 8 with bf16 moments) shared by the data-parallel ranks. Source:
"Distributed Optimizer" in Megatron Core's user guide. Activations are what a layer keeps for its backward, counted
from shapes.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from mok_megatron.config import TILE_ROWS, MokConfig
from mok_megatron.configs import ClusterConfig, ModelConfig
from mok_megatron.plan import parameters
from mok_megatron.plan.stages import Stage
from mok_megatron.plan.timing import BF16, routed_rows
from mok_megatron.topology import ParallelSizes

RECOMPUTE = ("none", "moe", "full")
"""What the backward computes again: nothing, the MoE part of each layer, or whole layers."""

RUNTIME_BYTES = 5e9
"""CUDA context, NCCL and cuBLAS buffers: an allowance, not measured here."""
FRAGMENTATION = 0.04
"""Share of a GPU's memory left to the allocator's fragmentation: an allowance."""


@dataclass(frozen=True)
class Training:
    """Settings of a run that decide its memory."""

    micro_batch: int = 1
    recompute: str = "none"
    bf16_moments: bool = False
    config: MokConfig = field(default_factory=MokConfig)


@dataclass(frozen=True)
class StageMemory:
    """Memory of a GPU of one pipeline stage. `items`: name -> bytes."""

    stage: int
    items: dict[str, float]

    @property
    def total(self) -> float:
        return sum(self.items.values())


def optimizer_bytes(bf16_moments: bool) -> int:
    """Optimizer state of one parameter: the fp32 weight and two moments, in fp32 or bf16."""
    return 8 if bf16_moments else 12


def memory_limit(cluster: ClusterConfig) -> float:
    """Bytes of a GPU that a plan may use."""
    return cluster.gpu.memory_gb * 1e9 * (1 - FRAGMENTATION)


def capacity_rows(model: ModelConfig, ep: int, tokens: int, config: MokConfig) -> int:
    """Rows that a rank's schedule can hold: --mok-capacity-rows, or what no routing can exceed.

    The arithmetic of `mok_megatron.ops.schedule.worst_case_capacity`, here without importing torch.
    """
    if config.capacity_rows is not None:
        return config.capacity_rows
    routes = ep * routed_rows(model, tokens)
    padding = min(model.moe.num_experts // ep, routes) * (TILE_ROWS - 1)
    return (routes + padding) // TILE_ROWS * TILE_ROWS


def ring_rows(model: ModelConfig, ep: int, tokens: int, config: MokConfig) -> int:
    """Rows of a macrobatch; a ring larger than the schedule would never fill."""
    minibatches = -(-capacity_rows(model, ep, tokens, config) // config.minibatch_size)
    return min(config.macrobatch_rows(routed_rows(model, tokens)), minibatches * config.minibatch_size)


def workspace(model: ModelConfig, ep: int, tokens: int, config: MokConfig) -> dict[str, float]:
    """The fused layer's buffers, one set an expert group, shared by all layers: name -> bytes.

    The large items of ``kernels/layout.h``; flags, counters and alignment are left out (a test compares the sums).

    Args:
        tokens: T, tokens of this rank.
    """
    moe = model.moe
    hidden, inner, shared = moe.hidden_size, moe.moe_ffn_hidden_size, moe.shared_expert_intermediate_size
    rows = routed_rows(model, tokens)
    ring = ring_rows(model, ep, tokens, config)
    evicts = capacity_rows(model, ep, tokens, config) > ring
    inputs = (1 + evicts) * tokens * hidden * BF16 if ep > 1 else 0
    items: dict[str, float] = {
        "symmetric: rows for the peers to pull [T, H] bf16, x and dY": inputs,
        "symmetric: slots that peers push into [T x K, H] bf16": rows * hidden * BF16,
        "symmetric: routes and weights of all ranks [EP, T, K]": ep * rows * 8,
        "ring: rows of dY [macrobatch, H] bf16": ring * hidden * BF16,
        "ring: hidden and gradients [macrobatch, 3I] bf16": ring * 3 * inner * BF16,
        "shared expert [T, 3Is + H] bf16": tokens * (3 * shared + hidden) * BF16 if shared else 0,
    }
    if evicts:
        tiles = -(-2 * inner // 128) * -(-hidden // 256) + -(-hidden // 128) * -(-inner // 256)
        items["sums of the experts that the ends of a macrobatch cut, fp32"] = 2 * tiles * 128 * 256 * 4
    return items


def moe_activations(model: ModelConfig, ep: int, tokens: int, config: MokConfig) -> dict[str, float]:
    """What one MoE layer keeps of one microbatch: name -> bytes. Bounded by the macrobatch, whatever the routing."""
    moe = model.moe
    kept = ring_rows(model, ep, tokens, config)
    return {
        "rows [macrobatch, H] bf16": kept * moe.hidden_size * BF16,
        "gate and up [macrobatch, 2I] bf16": kept * 2 * moe.moe_ffn_hidden_size * BF16,
        "shared expert's gate and up [T, 2Is] bf16": tokens * 2 * moe.shared_expert_intermediate_size * BF16,
        "schedule, 8 bytes a row of its capacity": capacity_rows(model, ep, tokens, config) * 8,
        "router logits and routes, fp32": tokens * (4 * moe.num_experts + 8 * moe.topk),
    }


def stage_memory(
    model: ModelConfig, sizes: ParallelSizes, stage: int, content: Stage, training: Training, in_flight: int
) -> StageMemory:
    """Memory of a GPU of pipeline stage `stage`.

    Args:
        content: the layers of the stage.
        in_flight: microbatches whose activations it holds at once; PP - stage in the 1F1B schedule.
    """
    moe = model.moe
    tokens = training.micro_batch * moe.sequence_length // (sizes.tp * sizes.cp)
    dense, experts = stage_parameters(model, sizes, content)
    optimizer = optimizer_bytes(training.bf16_moments)
    dense_shards, expert_shards = sizes.dp * sizes.cp, sizes.edp
    items: dict[str, float] = {
        "dense weights (bf16)": dense * 2,
        "expert weights (bf16)": experts * 2,
        "dense gradients (fp32)": dense * 4,
        "expert gradients (fp32)": experts * 4,
        f"dense optimizer state / {dense_shards}": dense * optimizer / dense_shards,
        f"expert optimizer state / {expert_shards}": experts * optimizer / expert_shards,
    }
    block = 4 * moe.hidden_size * BF16 * tokens  # input and output of the two norms
    attention = parameters.attention_activations(model) * BF16 * tokens
    dense_mlp = 3 * moe.dense_ffn_hidden_size * BF16 * tokens
    routed = sum(moe_activations(model, sizes.ep, tokens, training.config).values())
    per_moe_layer, per_dense_layer = block + attention + routed, block + attention + dense_mlp
    working = 0.0
    if training.recompute == "moe":
        per_moe_layer, working = block + attention, routed
    elif training.recompute == "full":
        working = max(per_moe_layer, per_dense_layer)
        per_moe_layer = per_dense_layer = moe.hidden_size * BF16 * tokens
    moe_layers = content.moe + content.mtp
    kept = moe_layers * per_moe_layer + content.dense * per_dense_layer
    items[f"activations of {content.layers} layers x {in_flight} microbatches"] = kept * in_flight
    if working:
        items["activations of the layer being recomputed"] = working
    if content.last:
        # Logits in bf16 and their gradient in fp32; vocabulary parallel over TP, all of the sequence.
        items["logits and their gradient"] = 6 * tokens * model.model.vocab_size
    if moe_layers:
        items["fused layer's workspace"] = sum(workspace(model, sizes.ep, tokens, training.config).values())
    items["runtime (allowance)"] = RUNTIME_BYTES
    return StageMemory(stage, items)


def stage_parameters(model: ModelConfig, sizes: ParallelSizes, content: Stage) -> tuple[float, float]:
    """(dense, expert) parameters that one GPU of a stage holds."""
    moe_layer, dense_layer = parameters.moe_layer(model), parameters.dense_layer(model)
    mtp = parameters.mtp_layer(model)
    dense = content.moe * moe_layer.dense + content.dense * dense_layer.dense + content.mtp * mtp.dense
    # The MTP layer embeds tokens too, so a last stage with one holds the embedding as well.
    ends = int(content.first) + int(content.last) + int(content.mtp > 0 and not content.first)
    dense += ends * parameters.embedding_parameters(model)
    experts = content.moe * moe_layer.experts + content.mtp * mtp.experts
    return dense / sizes.tp, experts / sizes.ep
