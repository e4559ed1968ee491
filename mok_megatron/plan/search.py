"""Which parallel sizes: every combination that divides and fits is timed, and the fastest is the plan.

Order of preference: the largest EP that fits whole nodes of an NVLink domain; then, among the plans within 5 % of the
shortest predicted time a sequence, the least TP x CP (the formulas do not see that smaller products are slower).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass, field

from mok_megatron.plan.memory import RECOMPUTE, StageMemory, Training, memory_limit, optimizer_bytes, stage_memory
from mok_megatron.plan.parameters import total_parameters
from mok_megatron.plan.request import (
    PlanError,
    Request,
    check_request,
    divisors,
    domain_ep_sizes,
    ep_candidates,
    global_batch,
    tp_works,
)
from mok_megatron.plan.stages import Stage, layer_kinds, split_layers
from mok_megatron.plan.timing import LayerTimes, layer_times
from mok_megatron.plan.traffic import Traffic, gradient_traffic, step_traffic
from mok_megatron.topology import ParallelSizes, Placement
from mok_megatron.topology.placement import usable_gpus

MAX_GPUS = 16384
TP_SIZES = (1, 2, 4, 8)
CP_SIZES = (1, 2, 4, 8)
TIME_TOLERANCE = 1.05
LINEAR_STEPS = 16
"""How many larger sizes are tried one by one, before they are doubled, in search of one that works."""


@dataclass(frozen=True)
class Plan:
    """Parallel sizes that fit, and what they cost. Times in seconds, memory and traffic in bytes."""

    request: Request
    sizes: ParallelSizes
    placement: Placement
    training: Training
    stages: list[Stage]
    memory: list[StageMemory]
    times: LayerTimes
    global_batch: int
    microbatches: int
    step_seconds: float
    bubble: float
    """Share of the step in which a GPU waits for the pipeline to fill and drain."""
    alternatives: list[Plan] = field(default_factory=list, repr=False)
    larger_ep: list[int] = field(default_factory=list)
    """Expert-parallel sizes that the domain could hold, but for which this job has no plan."""

    @property
    def worst(self) -> StageMemory:
        """The stage that needs most memory."""
        return max(self.memory, key=lambda stage: stage.total)

    @property
    def busiest(self) -> int:
        """The stage with the most MoE layers: the one whose traffic is reported."""
        return max(range(len(self.stages)), key=lambda i: self.stages[i].moe + self.stages[i].mtp)

    @property
    def traffic(self) -> list[Traffic]:
        content = self.stages[self.busiest]
        return step_traffic(self.request.model, self.sizes, self.placement, content, self.training, self.microbatches)

    @property
    def seconds_per_sequence(self) -> float:
        return self.step_seconds / self.global_batch

    @property
    def fits(self) -> bool:
        return self.worst.total <= memory_limit(self.request.cluster)


def make_plan(request: Request) -> Plan:
    """The best plan for a request.

    Raises:
        PlanError: nothing that was asked for can work, with the constraints and the nearest sizes that do.
    """
    check_request(request)
    smallest: Plan | None = None
    for ep in ep_candidates(request):
        plans = list(_plans(request, ep))
        fitting = sorted((plan for plan in plans if plan.fits), key=lambda plan: plan.seconds_per_sequence)
        if fitting:
            fast = [p for p in fitting if p.seconds_per_sequence <= TIME_TOLERANCE * fitting[0].seconds_per_sequence]
            chosen = min(fast, key=lambda p: (p.sizes.tp * p.sizes.cp, p.sizes.cp, p.seconds_per_sequence, p.sizes.pp))
            others = [plan for plan in _distinct(fitting) if plan.sizes != chosen.sizes]
            larger = [size for size in domain_ep_sizes(request) if size > ep]
            return dataclasses.replace(chosen, alternatives=others[:5], larger_ep=larger)
        if request.global_batch is not None:
            _require_batch(request, ep)
        smallest = min([*plans, *([smallest] if smallest else [])], key=lambda plan: plan.worst.total, default=None)
    raise PlanError(_no_plan(request, smallest))


def _require_batch(request: Request, ep: int) -> None:
    """If this EP has plans, only not with the global batch that was asked for, say which batches it has."""
    free = [plan for plan in _plans(dataclasses.replace(request, global_batch=None), ep) if plan.fits]
    if not free:
        return
    sizes = min(free, key=lambda plan: plan.seconds_per_sequence).sizes
    unit, asked = sizes.dp * request.micro_batch, request.global_batch or 0
    low = asked // unit * unit
    raise PlanError(
        "this plan cannot be made:\n"
        f"  1. --global-batch {asked} is not a multiple of DP x micro-batch = {unit} (TP {sizes.tp}, CP {sizes.cp}, "
        f"EP {ep}, PP {sizes.pp}), nor of any other plan with EP {ep}; the nearest that work: "
        f"{f'{low} or ' if low else ''}{low + unit}"
    )


def _plans(request: Request, ep: int) -> Iterator[Plan]:
    """Every combination of TP, CP, PP and recomputation for one EP."""
    model, cluster = request.model, request.cluster
    kinds = layer_kinds(model)
    recomputes = [request.recompute] if request.recompute else list(RECOMPUTE)
    for tp in [request.tp] if request.tp else [tp for tp in TP_SIZES if tp_works(model, tp)]:
        per_domain = usable_gpus(cluster, ep, tp)
        world = request.gpus if request.gpus is not None else per_domain * (request.domains or 0)
        if per_domain == 0 or tp > cluster.node.gpus or world % ep:
            continue
        for cp in [request.cp] if request.cp else CP_SIZES:
            if model.moe.sequence_length % (2 * cp) or world % (tp * cp):
                continue
            times = layer_times(
                model,
                cluster,
                tp=tp,
                cp=cp,
                ep=ep,
                micro_batch=request.micro_batch,
                config=request.config,
                comm_sms=request.comm_sms,
            )
            costs = {kind: times.forward[kind] + times.backward[kind] for kind in times.forward}
            for pp in [request.pp] if request.pp else divisors(world // ep):
                if pp > model.moe.num_layers or world % (tp * cp * pp) or world // ep % pp:
                    continue
                sizes = ParallelSizes(world, tp=tp, cp=cp, ep=ep, pp=pp)
                batch = global_batch(request, sizes)
                if batch is None:
                    continue
                stages = split_layers(kinds, costs, pp, 0.0, times.loss)
                placement = Placement(cluster, sizes, per_domain)
                for recompute in recomputes:
                    training = Training(request.micro_batch, recompute, request.bf16_moments, request.config)
                    yield _evaluate(request, sizes, placement, stages, times, training, batch)


def _evaluate(
    request: Request,
    sizes: ParallelSizes,
    placement: Placement,
    stages: list[Stage],
    times: LayerTimes,
    training: Training,
    batch: int,
) -> Plan:
    microbatches = batch // (sizes.dp * training.micro_batch)
    memory = [
        stage_memory(request.model, sizes, i, stage, training, min(microbatches, sizes.pp - i))
        for i, stage in enumerate(stages)
    ]
    forward = max(_stage_seconds(stage, times.forward) for stage in stages)
    slowest = max(_microbatch_seconds(stage, times, training) for stage in stages)
    exposed = _exposed_gradients(request, sizes, placement, stages, forward, slowest)
    pipeline = (microbatches + sizes.pp - 1) * slowest
    return Plan(
        request=request,
        sizes=sizes,
        placement=placement,
        training=training,
        stages=stages,
        memory=memory,
        times=times,
        global_batch=batch,
        microbatches=microbatches,
        step_seconds=pipeline + exposed,
        bubble=(sizes.pp - 1) / (microbatches + sizes.pp - 1),
    )


def _stage_seconds(stage: Stage, seconds: dict[str, float]) -> float:
    return stage.dense * seconds["dense"] + stage.moe * seconds["moe"] + stage.mtp * seconds["mtp"]


def _microbatch_seconds(stage: Stage, times: LayerTimes, training: Training) -> float:
    total = _stage_seconds(stage, times.forward) + _stage_seconds(stage, times.backward)
    if training.recompute == "full":
        total += _stage_seconds(stage, times.forward)
    elif training.recompute == "moe":
        total += (stage.moe + stage.mtp) * times.moe_forward.total
    return total + (times.loss if stage.last else 0.0)


def _exposed_gradients(
    request: Request,
    sizes: ParallelSizes,
    placement: Placement,
    stages: list[Stage],
    forward: float,
    slowest: float,
) -> float:
    """Time of gradient and weight traffic beyond one microbatch's backward and forward, which cover it."""
    cluster = request.cluster
    nvlink = cluster.nvlink.bandwidth * 1e9 * cluster.rates.nvlink_pull
    network = cluster.network.bandwidth * 1e9 * cluster.rates.network
    largest = max(stages, key=lambda stage: stage.layers)
    reduce = gather = 0.0
    for item in gradient_traffic(request.model, sizes, placement, largest):
        seconds = item.nvlink / nvlink + (item.network / network if item.network else 0.0)
        if "gradients" in item.name:
            reduce += seconds
        else:
            gather += seconds
    return max(0.0, reduce - (slowest - forward)) + max(0.0, gather - forward)


def _distinct(plans: list[Plan]) -> list[Plan]:
    """The best plan of each set of sizes."""
    seen: dict[ParallelSizes, Plan] = {}
    for plan in plans:
        seen.setdefault(plan.sizes, plan)
    return list(seen.values())


def _no_plan(request: Request, smallest: Plan | None) -> str:
    """Why there is no plan, and the nearest number of GPUs or domains for which there is one."""
    model, cluster = request.model, request.cluster
    if smallest is None:
        sizes = ", ".join(f"{n.upper()} {getattr(request, n)}" for n in ("tp", "cp", "ep", "pp") if getattr(request, n))
        constraint = (
            f"no combination of sizes ({sizes or 'all searched'}) divides the job: TP x CP x PP and EP x PP must both "
            "divide the number of GPUs"
        )
        if request.global_batch is not None:
            constraint += f", and DP x micro-batch must divide --global-batch {request.global_batch}"
    else:
        worst, sizes_ = smallest.worst, smallest.sizes
        largest = max(worst.items, key=lambda name: worst.items[name])
        constraint = (
            f"memory: {model.title} on {sizes_.world} GPU{'s' * (sizes_.world > 1)} of {cluster.title} needs at least "
            f"{worst.total / 1e9:.0f} GB a GPU (TP {sizes_.tp}, CP {sizes_.cp}, EP {sizes_.ep}, PP {sizes_.pp}, "
            f"recompute {smallest.training.recompute}), and {memory_limit(cluster) / 1e9:.0f} GB can be used; the "
            f"largest item is {largest}, {worst.items[largest] / 1e9:.0f} GB"
        )
    nearest = nearest_that_fits(request)
    remedy = f"the nearest size that works: {nearest}" if nearest else "no larger size works either: free another size"
    if smallest is not None and not request.bf16_moments:
        remedy += "; --bf16-moments saves 4 bytes a parameter"
    return f"this plan cannot be made:\n  1. {constraint}; {remedy}"


def nearest_that_fits(request: Request) -> str | None:
    """The smallest larger job for which the request has a plan, as the flag that asks for it; None: none found."""
    cluster, by_domain = request.cluster, request.domains is not None
    if request.domains is not None:
        flag, unit, start = "--racks", 1, request.domains
        most = cluster.domain.limit or MAX_GPUS // cluster.domain_gpus
    else:
        step = request.ep or min(cluster.node.gpus, request.gpus or 1)
        flag, unit, start = "--gpus", step, -(-(request.gpus or 1) // step)
        most = (cluster.domain.limit or MAX_GPUS) * (cluster.domain_gpus if cluster.domain.limit else 1) // step

    # Each parameter is held somewhere, once at least: a bound that spares most of the search.
    states = total_parameters(request.model) * (6 + optimizer_bytes(request.bf16_moments))

    def works(count: int) -> bool:
        if states > count * unit * (cluster.domain_gpus if by_domain else 1) * memory_limit(cluster):
            return False
        asked = dataclasses.replace(
            request, gpus=None if by_domain else count * unit, domains=count if by_domain else None
        )
        return any(plan.fits for ep in ep_candidates(asked) for plan in _plans(asked, ep))

    close = min(most, start + LINEAR_STEPS)
    for count in range(start, close + 1):
        if works(count):
            return f"{flag} {count * unit}"
    low, high = close, close * 2
    while high <= most and not works(high):
        low, high = high, high * 2
    if high > most:
        return None
    while high - low > 1:  # not monotonic in general: still ends at a size that works
        middle = (low + high) // 2
        low, high = (low, middle) if works(middle) else (middle, high)
    return f"{flag} {high * unit}"
