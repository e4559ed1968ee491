"""A plan as tables for people and as a dictionary for programs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from mok_megatron.plan import launch, parameters
from mok_megatron.plan.memory import FRAGMENTATION, memory_limit, moe_activations, ring_rows, workspace
from mok_megatron.plan.placed import ExpertGroup, expert_groups, group_proof
from mok_megatron.plan.search import Plan, nearest_that_fits
from mok_megatron.plan.stages import layout_string
from mok_megatron.plan.timing import ATTENTION_SHARE, FORMULAS, MoeTime

GB = 1e9
MAX_GROUPS = 8


def table(headers: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Columns under headers: text to the left, numbers to the right."""
    texts = [[_cell(value) for value in row] for row in rows]
    widths = [max(len(line[i]) for line in [list(headers), *texts]) for i in range(len(headers))]
    numeric = [bool(rows) and all(isinstance(row[i], int | float) for row in rows) for i in range(len(headers))]

    def line(cells: Sequence[str]) -> str:
        aligned = (
            cell.rjust(w) if right else cell.ljust(w) for cell, w, right in zip(cells, widths, numeric, strict=True)
        )
        return "  " + "  ".join(aligned).rstrip()

    return "\n".join([line(headers), line(["-" * width for width in widths]), *(line(row) for row in texts)])


def _cell(value: Any) -> str:
    if isinstance(value, float):
        if 0 < abs(value) < 0.005:
            return "<0.01"
        return f"{value:.2f}" if abs(value) < 1000 else f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def text_report(plan: Plan) -> str:
    """The whole plan, section by section."""
    sections = [
        _head(plan),
        "Parallel sizes\n" + _sizes(plan),
        "Placement\n" + _placement(plan),
        f"Memory of a GPU of stage {plan.worst.stage}, the fullest\n" + _memory(plan),
        "Traffic of a GPU in one step, received (as much is sent)\n" + _traffic(plan),
        "Predicted time of a layer and microbatch\n" + _times(plan),
        "Predicted step\n" + _step(plan),
    ]
    if plan.alternatives:
        sections.append("Other sizes that fit, fastest first\n" + _alternatives(plan))
    sections.append("Start\n" + _launch(plan))
    notes = plan.request.model.notes
    if notes:
        sections.append("Notes on the model\n" + "\n".join(f"  - {note}" for note in notes))
    return "\n\n".join(sections) + "\n"


def _head(plan: Plan) -> str:
    model, cluster, placement = plan.request.model, plan.request.cluster, plan.placement
    name = cluster.domain.name
    domains = f"{placement.domains} {name}{'s' * (placement.domains > 1)}"
    total = placement.domains * cluster.domain_gpus
    rates = "measured on it" if cluster.rates.measured else "ASSUMED shares of the product page's figures"
    count = parameters.total_parameters(model)
    size = f"{count / 1e9:,.1f} billion" if count >= 1e9 else f"{count / 1e6:,.1f} million"
    return (
        f"{model.title} ({size} parameters, counted) on {domains} of {cluster.title}: "
        f"{plan.sizes.world:,} of {total:,} GPUs\n"
        f"Everything below is a prediction from shapes and rates; the rates of this cluster are {rates}."
    )


def _sizes(plan: Plan) -> str:
    sizes, training = plan.sizes, plan.training
    rows = [
        (
            "TP",
            sizes.tp,
            "tensor parallel, inside a node; with sequence parallelism" if sizes.tp > 1 else "tensor parallel",
        ),
        ("CP", sizes.cp, "context parallel"),
        ("EP", sizes.ep, f"expert parallel: {plan.request.model.moe.num_experts // sizes.ep} experts a GPU"),
        ("PP", sizes.pp, f"pipeline stages: {layout_string(plan.stages)}"),
        ("DP", sizes.dp, "replicas of the dense layers"),
        ("expert DP", sizes.edp, "replicas of the experts"),
        ("micro-batch", training.micro_batch, f"sequences of {plan.request.model.moe.sequence_length:,} tokens"),
        ("microbatches", plan.microbatches, "a step and pipeline"),
        ("global batch", plan.global_batch, "sequences a step"),
    ]
    text = table(["size", "", "meaning"], rows) + f"\n  recomputed in the backward: {training.recompute}"
    if plan.larger_ep:
        ep = ", ".join(map(str, plan.larger_ep))
        text += f"\n  a larger EP ({ep}) has no plan here: it does not divide the job or does not fit memory"
        nearest = nearest_that_fits(replace(plan.request, ep=plan.larger_ep[-1]))
        if nearest:
            text += f";\n  EP {plan.larger_ep[-1]} works from {nearest}"
    return text


def _placement(plan: Plan) -> str:
    placement, cluster = plan.placement, plan.request.cluster
    node, domain = cluster.node.name, cluster.domain.name
    lines = [
        f"  rank order {plan.sizes.order} (fastest first), Megatron's default; rank r is in {domain} "
        f"r // {placement.per_domain}",
        "  " + group_proof(plan),
    ]
    if cluster.domain.nodes > 1:
        lines.append(
            f"  the job takes {placement.nodes} {node}s, at most {placement.nodes_per_domain} of the "
            f"{cluster.domain.nodes} of a {domain}; {placement.spare_nodes or 'none'} a {domain} "
            f"{'is' if placement.spare_nodes <= 1 else 'are'} spare"
            + (f", {placement.free_nodes} of the last {domain} are free" if placement.free_nodes else "")
        )
        if placement.spare_nodes:
            lines.append(
                f"  spare {node}s: a failed {node} is replaced inside its {domain}, so its expert group keeps one "
                "NVLink domain;\n  until then they can run what needs no NVLink to the job, such as evaluation"
            )
    groups = expert_groups(plan)
    rows = [(g.index, g.ranks, g.stage, g.domain, g.nodes) for g in groups[:MAX_GROUPS]]
    text = "\n".join(lines) + "\n" + table(["expert group", "ranks", "stage", domain, f"{node}s"], rows)
    return text + (f"\n  and {len(groups) - MAX_GROUPS} more groups" if len(groups) > MAX_GROUPS else "")


def _tokens(plan: Plan) -> int:
    sizes = plan.sizes
    return plan.training.micro_batch * plan.request.model.moe.sequence_length // (sizes.tp * sizes.cp)


def _memory(plan: Plan) -> str:
    rows = [(name, value / GB) for name, value in plan.worst.items.items()]
    rows.append(("total", plan.worst.total / GB))
    limit = f"usable of {plan.request.cluster.gpu.memory_gb:.0f} GB ({FRAGMENTATION:.0%} left to fragmentation)"
    rows.append((limit, memory_limit(plan.request.cluster) / GB))
    model, config = plan.request.model, plan.training.config
    parts = [(name, value / GB) for name, value in workspace(model, plan.sizes.ep, _tokens(plan), config).items()]
    kept = [(name, value / GB) for name, value in moe_activations(model, plan.sizes.ep, _tokens(plan), config).items()]
    ring = ring_rows(model, plan.sizes.ep, _tokens(plan), config)
    return (
        table(["item", "GB"], rows)
        + f"\n\n  The fused layer's workspace, shared by all layers (macrobatch {ring:,} rows):\n"
        + table(["buffer", "GB"], parts)
        + "\n\n  Kept by each MoE layer for each microbatch in flight"
        + (" (recomputed here, so kept once):\n" if plan.training.recompute != "none" else ":\n")
        + table(["tensor", "GB"], kept)
    )


def _traffic(plan: Plan) -> str:
    cluster = plan.request.cluster
    nvlink = cluster.nvlink.bandwidth * cluster.rates.nvlink_pull
    network = cluster.network.bandwidth * cluster.rates.network
    rows: list[tuple[str, float, float, float]] = []
    for item in plan.traffic:
        seconds = item.nvlink / GB / nvlink + (item.network / GB / network if item.network else 0.0)
        rows.append((item.name, item.nvlink / GB, item.network / GB, seconds * 1e3))
    rows.append(("total", sum(r[1] for r in rows), sum(r[2] for r in rows), sum(r[3] for r in rows)))
    rates = f"  at {nvlink:.0f} GB/s over NVLink" + (f" and {network:.0f} GB/s over the network" if network else "")
    return table(["what", "NVLink GB", "network GB", "link time ms"], rows) + "\n" + rates + "; most of it is hidden"


def _times(plan: Plan) -> str:
    times = plan.times
    moe = [
        _moe_row("MoE layer, forward", times.moe_forward),
        _moe_row("MoE layer, backward", times.moe_backward),
    ]
    headers = ["ms", "products", "memory", "NVLink", "edges", "total", "exposed", "comm SMs"]
    rest = [
        ("attention, forward", times.attention * 1e3),
        ("whole MoE transformer layer, forward", times.forward["moe"] * 1e3),
        ("whole MoE transformer layer, backward", times.backward["moe"] * 1e3),
        ("output layer and loss, both directions", times.loss * 1e3),
    ]
    formulas = "\n".join(f"  {text}" for text in FORMULAS.values())
    rates = plan.request.cluster.rates
    gpu, link = plan.request.cluster.gpu, plan.request.cluster.nvlink.bandwidth
    values = (
        f"  bf16 rate {gpu.bf16_tflops:.0f} TFLOP/s x {rates.bf16_product}; memory {gpu.memory_bandwidth:.0f} GB/s x "
        f"{rates.memory}; pull {link:.0f} GB/s x {rates.nvlink_pull}; push {link:.0f} GB/s x {rates.nvlink_push}; "
        f"attention {ATTENTION_SHARE} of the bf16 peak (assumed)"
    )
    return table(headers, moe) + "\n\n" + table(["", "ms"], rest) + "\n\n  Formulas\n" + formulas + "\n" + values


def _moe_row(name: str, time: MoeTime) -> tuple[Any, ...]:
    parts = (time.products, time.memory, time.nvlink, time.edges, time.total, time.exposed)
    return (name, *(part * 1e3 for part in parts), time.comm_sms)


def _step(plan: Plan) -> str:
    tokens = plan.global_batch * plan.request.model.moe.sequence_length
    rows = [
        ("step", f"{plan.step_seconds:.3f} s"),
        ("waiting for the pipeline", f"{plan.bubble:.1%}"),
        ("tokens a second and GPU", f"{tokens / plan.step_seconds / plan.sizes.world:,.0f}"),
        ("tokens a second", f"{tokens / plan.step_seconds:,.0f}"),
    ]
    return table(["", "predicted"], rows)


def _alternatives(plan: Plan) -> str:
    rows = []
    for other in plan.alternatives:
        sizes = other.sizes
        needed = other.worst.total / GB
        per_sequence = other.seconds_per_sequence / plan.seconds_per_sequence
        rows.append((sizes.tp, sizes.cp, sizes.ep, sizes.pp, sizes.dp, other.training.recompute, needed, per_sequence))
    return table(["TP", "CP", "EP", "PP", "DP", "recompute", "GB a GPU", "time against the plan"], rows)


def _launch(plan: Plan) -> str:
    blocks = [("node.sh, on each node (data, tokenizer and learning-rate flags follow)", launch.node_script(plan))]
    if plan.placement.nodes > 1:
        blocks.insert(0, ("job.sh, for sbatch", launch.job_script(plan)))
    if launch.uses_segments(plan):
        conf = launch.topology_conf(plan).splitlines()
        shown = conf if len(conf) <= 6 else [*conf[:2], f"# ... {len(conf) - 4} more", *conf[-2:]]
        blocks.insert(0, ("topology.conf of Slurm (TopologyPlugin=topology/block)", "\n".join(shown) + "\n"))
    indented = (f"  # {title}\n" + "".join(f"  {line}\n" for line in body.splitlines()) for title, body in blocks)
    return "\n".join(indented).rstrip()


def as_dictionary(plan: Plan) -> dict[str, Any]:
    """The plan for programs. Times in seconds, memory and traffic in bytes; `prediction` is always true."""
    sizes, cluster, model = plan.sizes, plan.request.cluster, plan.request.model
    groups = expert_groups(plan)
    return {
        "prediction": True,
        "rates_measured": cluster.rates.measured,
        "model": model.name,
        "cluster": cluster.name,
        "gpus": sizes.world,
        "domains": plan.placement.domains,
        "sizes": {n: getattr(sizes, n) for n in ("tp", "cp", "ep", "pp", "etp", "dp", "edp", "order")},
        "micro_batch": plan.training.micro_batch,
        "global_batch": plan.global_batch,
        "microbatches": plan.microbatches,
        "recompute": plan.training.recompute,
        "pipeline_layout": layout_string(plan.stages),
        "placement": {
            "ranks_per_domain": plan.placement.per_domain,
            "nodes": plan.placement.nodes,
            "nodes_per_domain": plan.placement.nodes_per_domain,
            "spare_nodes_per_domain": plan.placement.spare_nodes,
            "expert_stride": sizes.expert_stride,
            "expert_groups": [_group(group) for group in groups],
        },
        "memory": {
            "limit": memory_limit(cluster),
            "worst_stage": plan.worst.stage,
            "items": plan.worst.items,
            "total_by_stage": [stage.total for stage in plan.memory],
            "workspace": workspace(model, sizes.ep, _tokens(plan), plan.training.config),
            "kept_by_a_moe_layer": moe_activations(model, sizes.ep, _tokens(plan), plan.training.config),
        },
        "traffic": [{"name": item.name, "nvlink": item.nvlink, "network": item.network} for item in plan.traffic],
        "times": {
            "moe_forward": _moe_dictionary(plan.times.moe_forward),
            "moe_backward": _moe_dictionary(plan.times.moe_backward),
            "attention_forward": plan.times.attention,
            "layer_forward": plan.times.forward,
            "layer_backward": plan.times.backward,
            "loss": plan.times.loss,
            "step": plan.step_seconds,
            "bubble": plan.bubble,
        },
        "formulas": FORMULAS,
        "megatron_arguments": launch.megatron_arguments(plan),
        "scripts": {"node.sh": launch.node_script(plan), "job.sh": launch.job_script(plan)},
    }


def _group(group: ExpertGroup) -> dict[str, Any]:
    return {"ranks": [group.first, group.last], "stage": group.stage, "domain": group.domain}


def _moe_dictionary(time: MoeTime) -> dict[str, float]:
    names = ("products", "memory", "nvlink", "edges", "total", "exposed", "comm_sms")
    return {name: getattr(time, name) for name in names}
