"""What a plan is asked for, and what can be said of it before anything is searched."""

from __future__ import annotations

from dataclasses import dataclass, field

from mok_megatron.config import MokConfig
from mok_megatron.configs import ClusterConfig, ModelConfig
from mok_megatron.errors import MokConfigError, Problems
from mok_megatron.plan.memory import RECOMPUTE
from mok_megatron.plan.timing import CommSms
from mok_megatron.topology import ParallelSizes

DEFAULT_GLOBAL_BATCH = 4096
"""Most sequences a step where the model's own training gives none: a planning value."""
MOST_GPUS = 1 << 17
MOST_SEQUENCES = 1 << 30
"""Larger jobs are not planned: the search tries divisors one by one."""
MICROBATCHES = 8
"""Sequences a GPU in a step, up to the model's own global batch: keeps pipelines of small plans filled."""


class PlanError(MokConfigError):
    """No plan exists for what was asked; the message names each constraint and the nearest sizes that work."""


@dataclass(frozen=True)
class Request:
    """What to plan. Sizes that are None are searched."""

    model: ModelConfig
    cluster: ClusterConfig
    gpus: int | None = None
    domains: int | None = None
    """Racks (or single nodes, where the domain is a node), instead of `gpus`."""
    tp: int | None = None
    cp: int | None = None
    ep: int | None = None
    pp: int | None = None
    micro_batch: int = 1
    global_batch: int | None = None
    recompute: str | None = None
    bf16_moments: bool = False
    comm_sms: CommSms = (None, None)
    """Of forward and backward; None: chosen."""
    config: MokConfig = field(default_factory=MokConfig)


def check_request(request: Request) -> None:
    """What can be said before any combination is tried, all at once."""
    model, cluster = request.model, request.cluster
    moe, problems = model.moe, Problems()
    if request.gpus is None and request.domains is None:
        problems.add("neither --gpus nor --racks is given", "give one of them")
    if request.gpus is not None and request.domains is not None:
        problems.add("--gpus and --racks are both given", "give one of them")
    for name in ("gpus", "domains", "tp", "cp", "ep", "pp", "micro_batch", "global_batch"):
        value = getattr(request, name)
        flag = "--" + ("racks" if name == "domains" else name.replace("_", "-"))
        problems.require(value is None or value >= 1, f"{flag} is {value}", "give at least 1")
        most = MOST_SEQUENCES if name.endswith("batch") else MOST_GPUS
        problems.require(value is None or value <= most, f"{flag} is beyond {most}", "plan for less")
    gpus = (request.domains or 0) * cluster.domain_gpus
    problems.require(gpus <= MOST_GPUS, f"--racks {request.domains} are {gpus} GPUs", f"plan for at most {MOST_GPUS}")
    if problems:
        problems.raise_if_any(PlanError, "this plan cannot be made:")
    limit = cluster.domain.limit
    if limit is not None:
        most = limit * cluster.domain_gpus
        asked = request.gpus or (request.domains or 0) * cluster.domain_gpus
        problems.require(
            asked <= most, f"{asked} GPUs are more than {cluster.title} has", f"plan for at most {most} GPUs"
        )
    node = cluster.node.gpus
    if request.gpus is not None and request.gpus > node and request.gpus % node:
        low = request.gpus // node * node
        problems.add(
            f"--gpus {request.gpus} is not a whole number of {cluster.node.name}s of {node} GPUs",
            f"the nearest that are: {low} or {low + node}",
        )
    if request.ep is not None:
        fitting = [ep for ep in divisors(moe.num_experts) if ep_fits(cluster, ep)]
        near = _nearest(fitting, request.ep)
        problems.require(
            moe.num_experts % request.ep == 0,
            f"--ep {request.ep} does not divide the {moe.num_experts} experts of {model.title}",
            f"the nearest sizes that work: {near}",
        )
        problems.require(
            ep_fits(cluster, request.ep),
            f"--ep {request.ep} does not fit whole {cluster.node.name}s of one NVLink domain of {cluster.title} "
            f"({cluster.domain_gpus} GPUs)",
            f"the nearest sizes that work: {near}",
        )
        if request.gpus is not None and request.gpus % request.ep:
            low = request.gpus // request.ep * request.ep
            problems.add(
                f"--ep {request.ep} does not divide --gpus {request.gpus}",
                f"the nearest numbers of GPUs are {f'{low} or ' if low else ''}{low + request.ep}",
            )
    if request.tp is not None:
        fitting = [tp for tp in divisors(node) if tp_works(model, tp)]
        problems.require(
            request.tp in fitting,
            f"--tp {request.tp} must divide the {model.attention.num_heads} heads and stay inside a "
            f"{cluster.node.name} of {node} GPUs",
            f"sizes that work: {', '.join(map(str, fitting))}",
        )
    if request.cp is not None:
        problems.require(
            moe.sequence_length % (2 * request.cp) == 0,
            f"--cp {request.cp}: the sequence of {moe.sequence_length} tokens is not a multiple of 2 x CP",
            "choose a divisor of half the sequence length",
        )
    if request.pp is not None:
        problems.require(
            request.pp <= moe.num_layers,
            f"--pp {request.pp} is more than the {moe.num_layers} layers of {model.title}",
            f"give at most {moe.num_layers}",
        )
    for flag, sms in zip(("--mok-fwd-comm-sms", "--mok-bwd-comm-sms"), request.comm_sms, strict=True):
        problems.require(
            sms is None or 0 <= sms < cluster.gpu.sms,
            f"{flag} {sms} leaves none of the {cluster.gpu.sms} SMs of a {cluster.gpu.name} for the products",
            f"give 0 to {cluster.gpu.sms - 1}",
        )
    problems.require(
        request.recompute is None or request.recompute in RECOMPUTE,
        f"--recompute {request.recompute!r} is unknown",
        f"choose one of {', '.join(RECOMPUTE)}",
    )
    problems.raise_if_any(PlanError, "this plan cannot be made:")


def global_batch(request: Request, sizes: ParallelSizes) -> int | None:
    """Sequences a step; None where the one that was asked for does not divide."""
    unit = sizes.dp * request.micro_batch
    if request.global_batch is not None:
        return request.global_batch if request.global_batch % unit == 0 else None
    most = request.model.model.global_batch_size or DEFAULT_GLOBAL_BATCH
    wanted = min(most, MICROBATCHES * sizes.world * request.micro_batch)
    return max(1, -(-wanted // unit)) * unit


def domain_ep_sizes(request: Request) -> list[int]:
    """Expert-parallel sizes that divide the experts and fit a domain, ascending; one where it was given."""
    if request.ep is not None:
        return [request.ep]
    return [ep for ep in divisors(request.model.moe.num_experts) if ep_fits(request.cluster, ep)]


def ep_candidates(request: Request) -> list[int]:
    """Expert-parallel sizes to try, largest first."""
    if request.ep is not None:
        return [request.ep]
    sizes = domain_ep_sizes(request)
    if request.gpus is not None:
        sizes = [ep for ep in sizes if request.gpus % ep == 0]
    return sizes[::-1]


def ep_fits(cluster: ClusterConfig, ep: int) -> bool:
    """Whole nodes, or a whole share of one node, inside one domain."""
    node = cluster.node.gpus
    return ep <= cluster.domain_gpus and (ep % node == 0 or node % ep == 0)


def tp_works(model: ModelConfig, tp: int) -> bool:
    attention = model.attention
    groups = attention.num_query_groups or attention.num_heads
    return attention.num_heads % tp == 0 and (groups % tp == 0 or tp % groups == 0)


def divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]


def _nearest(sizes: list[int], wanted: int) -> str:
    near = sorted(sorted(sizes, key=lambda size: abs(size - wanted))[:3])
    return ", ".join(map(str, near)) or "none"
