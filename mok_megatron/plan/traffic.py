"""Bytes that one GPU receives in a step, as many as it sends, split into NVLink and network.

A group whose ranks lie in one NVLink domain uses NVLink alone. One that spans d domains with k ranks in each runs its
collectives hierarchically: (k - 1)/k of the data moves over NVLink, and 1/k of it crosses the network (d - 1)/d times.
"""

from __future__ import annotations

from dataclasses import dataclass

from mok_megatron.configs import ModelConfig
from mok_megatron.plan.memory import Training, stage_parameters
from mok_megatron.plan.stages import Stage
from mok_megatron.plan.timing import BF16, cp_ring_bytes, routed_rows
from mok_megatron.topology import ParallelSizes, Placement
from mok_megatron.topology.layout import Ranks


@dataclass(frozen=True)
class Traffic:
    """One use of the links: bytes received by a GPU in one step."""

    name: str
    nvlink: float
    network: float


def step_traffic(
    model: ModelConfig,
    sizes: ParallelSizes,
    placement: Placement,
    content: Stage,
    training: Training,
    microbatches: int,
) -> list[Traffic]:
    """Traffic of a GPU of the stage `content` in one step of `microbatches` microbatches."""
    moe = model.moe
    tokens = training.micro_batch * moe.sequence_length // (sizes.tp * sizes.cp)
    moe_layers = content.moe + content.mtp
    crossing = routed_rows(model, tokens) * moe.hidden_size * BF16 * (sizes.ep - 1) / sizes.ep
    # Forward and backward, each dispatch and combine; the forward twice where it is recomputed.
    passes = 2 * (3 if training.recompute != "none" else 2)
    items = [Traffic("experts: dispatch and combine", passes * crossing * moe_layers * microbatches, 0.0)]
    forwards = 3 if training.recompute == "full" else 2
    if sizes.tp > 1:
        # Two gathers and two scatters a layer and direction: attention, and the dense MLP or shared expert.
        each = (sizes.tp - 1) * tokens * moe.hidden_size * BF16
        count = 2 * content.layers + 2 * content.dense
        items.append(Traffic("tensor parallel: gather and scatter", forwards * count * each * microbatches, 0.0))
    if sizes.cp > 1:
        ring = cp_ring_bytes(model, sizes.cp, tokens * sizes.tp) / sizes.tp
        items.append(
            _over(
                placement,
                sizes.groups("cp"),
                "context parallel: keys and values",
                3 * ring * content.layers * microbatches,
            )
        )
    if sizes.pp > 1:
        sides = int(not content.first) + int(not content.last)
        volume = sides * tokens * moe.hidden_size * BF16 * microbatches
        # Stages are runs of ranks: neighbours in the pipeline stand a whole stage apart.
        crosses = placement.span(sizes.groups("pp"))[1] > 1
        items.append(Traffic("pipeline: hidden states and gradients", 0.0 if crosses else volume, volume * crosses))
    items += gradient_traffic(model, sizes, placement, content)
    return items


def gradient_traffic(model: ModelConfig, sizes: ParallelSizes, placement: Placement, content: Stage) -> list[Traffic]:
    """Once a step: fp32 gradients are scattered over the replicas, bf16 weights gathered from them."""
    dense, experts = stage_parameters(model, sizes, content)
    dense_groups, expert_groups = sizes.groups("dp-cp"), sizes.expert_groups("dp")
    items = []
    for kind, count, groups in (("dense", dense, dense_groups), ("expert", experts, expert_groups)):
        if groups.shape[1] > 1 and count:
            items.append(_over(placement, groups, f"{kind} gradients (fp32)", 4 * count))
            items.append(_over(placement, groups, f"{kind} weights (bf16)", 2 * count))
    return items


def _over(placement: Placement, groups: Ranks, name: str, volume: float) -> Traffic:
    inside, domains = placement.span(groups)
    nvlink = volume * (inside - 1) / inside
    network = volume / inside * (domains - 1) / domains
    return Traffic(name, nvlink, network)
