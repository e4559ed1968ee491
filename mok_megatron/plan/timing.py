"""Predicted times. A roofline: each part takes the longest of its arithmetic, its memory traffic and its NVLink
traffic at the rates of the cluster's file. Predictions, not measurements; `FORMULAS` states them for the reader.
"""

from __future__ import annotations

from dataclasses import dataclass

from mok_megatron.config import TILE_ROWS, MokConfig
from mok_megatron.configs import ClusterConfig, ModelConfig
from mok_megatron.plan import parameters

BF16 = 2
ATTENTION_SHARE = 0.5
"""Share of the bf16 peak that a fused attention kernel reaches: an assumption, not measured here."""
CommSms = tuple[int | None, int | None]
"""Communication SMs of forward and backward; None: the plan chooses."""
MAX_COMM_SMS = 16
COMM_TOLERANCE = 1.005
"""The least communication SMs within this factor of the shortest total are taken."""

FORMULAS = {
    "rows": "rows = T x K: routed rows of a GPU under balanced routing; T = micro-batch x sequence / (TP x CP)",
    "padded": f"padded = rows + E/EP x {TILE_ROWS}/2: each expert's segment ends in a partly filled tile",
    "products": "products = (6 x padded x H x I + 6 x T x H x Is) / (bf16 rate x (1 - communication SMs / SMs))",
    "weights": "memory = (3 x H x (E/EP x I + Is) x 2 B + rows x (2H + 6I) x 2 B) / memory rate",
    "nvlink": "nvlink = rows x H x 2 B x (EP - 1)/EP x max(1/pull rate + 1/push rate, 1/(SMs x pull rate of one SM))",
    "sms": "communication SMs: as few as come within 0.5 % of the shortest total, unless given",
    "edges": "edges = first minibatch pulled, less the shared expert's time, + final sum over K read from memory",
    "forward": "forward = max(products, memory, nvlink) + edges",
    "backward": "backward = the same with twice the products (input and weight gradients), pull of dY, push of dX",
    "exposed": "exposed = forward or backward, less its products",
    "step": "step = (microbatches + PP - 1) x slowest stage + gradient and parameter traffic that finds no cover",
}


@dataclass(frozen=True)
class MoeTime:
    """One direction of one MoE layer on one GPU, in seconds."""

    products: float
    memory: float
    nvlink: float
    edges: float
    comm_sms: int
    """Communication SMs that the times assume."""

    @property
    def total(self) -> float:
        return max(self.products, self.memory, self.nvlink) + self.edges

    @property
    def exposed(self) -> float:
        """What communication and memory add to the arithmetic."""
        return self.total - self.products


@dataclass(frozen=True)
class LayerTimes:
    """Forward and backward of one layer of each kind and of the ends, in seconds, for one microbatch."""

    forward: dict[str, float]
    backward: dict[str, float]
    moe_forward: MoeTime
    moe_backward: MoeTime
    attention: float
    """Forward of one attention, communication of TP and CP included."""
    loss: float
    """Output layer and loss, forward and backward."""


def routed_rows(model: ModelConfig, tokens: int) -> int:
    """Rows that one GPU computes under balanced routing of `tokens` tokens a rank."""
    return tokens * model.moe.topk


def moe_times(
    model: ModelConfig,
    cluster: ClusterConfig,
    ep: int,
    tokens: int,
    config: MokConfig,
    comm_sms: CommSms = (None, None),
) -> tuple[MoeTime, MoeTime]:
    """Forward and backward of the fused MoE layer (router excluded), by `FORMULAS`.

    Args:
        tokens: T, tokens of this rank.
        comm_sms: communication SMs of forward and backward; 0: idle warps of the others pull, at the link's rate;
            None: the fewest within COMM_TOLERANCE of the shortest total.
    """
    moe, gpu, rates = model.moe, cluster.gpu, cluster.rates
    hidden, inner, shared = moe.hidden_size, moe.moe_ffn_hidden_size, moe.shared_expert_intermediate_size
    rows = routed_rows(model, tokens)
    local_experts = moe.num_experts / ep
    padded = rows + local_experts * TILE_ROWS / 2
    shared_flops = 6 * tokens * hidden * shared
    flops = 6 * padded * hidden * inner + shared_flops
    product_rate = gpu.bf16_tflops * 1e12 * rates.bf16_product
    memory_rate = gpu.memory_bandwidth * 1e9 * rates.memory
    pull, push = (cluster.nvlink.bandwidth * 1e9 * share for share in (rates.nvlink_pull, rates.nvlink_push))
    row_bytes = hidden * BF16
    pull_of_sm = row_bytes / (rates.pull_sm_latency_ns * 1e-9 + row_bytes / (rates.pull_sm_bandwidth * 1e9))
    weights = 3 * hidden * (local_experts * inner + shared) * BF16
    crossing = rows * row_bytes * (ep - 1) / ep
    first_pull = min(config.minibatch_size, rows) * row_bytes * (ep - 1) / ep
    final_sum = (rows + tokens) * row_bytes / memory_rate

    def direction(passes: int, sms: int) -> MoeTime:
        rate = product_rate * (1 - sms / gpu.sms)
        pulling = min(pull, sms * pull_of_sm) if sms else pull
        cover = passes * shared_flops / rate
        return MoeTime(
            products=passes * flops / rate,
            memory=passes * (weights + rows * (2 * hidden + 6 * inner) * BF16) / memory_rate,
            nvlink=max(crossing * (1 / pull + 1 / push), crossing / pulling),
            edges=max(0.0, first_pull / pulling - cover) + final_sum,
            comm_sms=sms,
        )

    def best(passes: int, sms: int | None) -> MoeTime:
        if sms is not None:
            return direction(passes, sms)
        times = [direction(passes, sms) for sms in range(1, min(MAX_COMM_SMS, gpu.sms - 1) + 1)]
        good = COMM_TOLERANCE * min(time.total for time in times)
        return next(time for time in times if time.total <= good)

    return best(1, comm_sms[0]), best(2, comm_sms[1])


def layer_times(
    model: ModelConfig,
    cluster: ClusterConfig,
    *,
    tp: int,
    cp: int,
    ep: int,
    micro_batch: int,
    config: MokConfig,
    comm_sms: CommSms = (None, None),
) -> LayerTimes:
    """Times of each kind of layer for one microbatch on one GPU."""
    moe, gpu, rates = model.moe, cluster.gpu, cluster.rates
    tokens = micro_batch * moe.sequence_length // (tp * cp)
    rate = gpu.bf16_tflops * 1e12 * rates.bf16_product
    core_rate = gpu.bf16_tflops * 1e12 * ATTENTION_SHARE
    nvlink = cluster.nvlink.bandwidth * 1e9 * rates.nvlink_pull
    moe_forward, moe_backward = moe_times(model, cluster, ep, tokens, config, comm_sms)

    projections = 2 * parameters.attention_parameters(model) * tokens / rate
    core = parameters.attention_core_flops(model) * tokens / core_rate
    # Sequence parallelism: gather before and scatter after each TP block, this rank's tokens to TP - 1 others.
    sharding = 2 * (tp - 1) * tokens * moe.hidden_size * BF16 / nvlink
    ring = cp_ring_bytes(model, cp, tokens * tp) / nvlink if cp > 1 else 0.0
    attention = projections + core + sharding + max(0.0, ring - core)
    attention_backward = 2 * projections + 2.5 * core + sharding + max(0.0, 2 * ring - 2.5 * core)
    router = 2 * moe.hidden_size * moe.num_experts * tokens / rate
    mlp = 6 * moe.hidden_size * moe.dense_ffn_hidden_size * tokens / rate + sharding
    projection = 4 * moe.hidden_size**2 * tokens / rate
    forward = {
        "dense": attention + mlp,
        "moe": attention + router + moe_forward.total,
        "mtp": attention + router + moe_forward.total + projection,
    }
    backward = {
        "dense": attention_backward + 2 * mlp,
        "moe": attention_backward + 2 * router + moe_backward.total,
        "mtp": attention_backward + 2 * router + moe_backward.total + 2 * projection,
    }
    loss = 6 * parameters.embedding_parameters(model) * tokens * (1 + model.model.mtp_layers) / rate
    return LayerTimes(forward, backward, moe_forward, moe_backward, attention, loss)


def cp_ring_bytes(model: ModelConfig, cp: int, tokens: int) -> float:
    """Bytes that one GPU sends around the context-parallel ring in one forward of one layer: keys and values.

    Args:
        tokens: tokens of one context-parallel rank, before TP shards them.
    """
    attention = model.attention
    if attention.kind == "mla":
        width = attention.size("kv_lora_rank") + attention.size("qk_rope_head_dim")
    else:
        width = 2 * (attention.num_query_groups or 1) * attention.size("head_dim")
    return (cp - 1) * tokens * width * BF16
