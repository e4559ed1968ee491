"""One MoE layer on the fullest rank of a balanced expert group: prepare, the kernel, the sum over k."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

import numpy as np

from mok_megatron.config import TILE_ROWS, MokConfig, flag_name
from mok_megatron.configs import ClusterConfig
from mok_megatron.errors import MokConfigError, Problems
from mok_megatron.simulate.engine import Engine, Outcome
from mok_megatron.simulate.order import (
    STAGE_K,
    Launch,
    backward_tiles,
    blocks_of,
    columns_of,
    forward_tiles,
    pull_blocks,
    pull_rows,
)
from mok_megatron.simulate.rates import (
    COMM_PULL,
    FLAG_DELAY,
    ROUTES_A_SORTER,
    SORT_CTAS,
    SORT_LANES,
    SORT_STEP,
    KernelRates,
    kernel_rates,
)

SEED = 1
MOST_SIZE, MOST_EXPERTS, MOST_TILES = 1 << 20, 1 << 16, 1_000_000
"""Of what is simulated: a few minutes."""
BF16 = 2
ROUTE_BYTES = 8
"""Expert number and router weight, sent to every peer."""


@dataclass(frozen=True)
class LayerShape:
    """One layer: T tokens a rank, hidden, expert intermediate, experts in all, top-k, shared intermediate."""

    tokens: int
    hidden: int
    intermediate: int
    experts: int
    topk: int
    shared: int = 0


@dataclass(frozen=True)
class DirectionTimes:
    """One direction of the layer on one GPU, in microseconds."""

    total: float
    prepare: float
    products: float
    """A CTA, mean."""
    epilogues: float
    waits: float
    sum_over_k: float
    without_communication: float
    """The total if rows were there from the start and results stayed local."""
    link: float
    """NVLink's time at full rate for what crosses it."""
    limit: float
    """The longer of `link` and the products' stages spread evenly over all SMs, without tile starts or padding."""

    @property
    def exposed(self) -> float:
        """What communication adds."""
        return self.total - self.without_communication


def check(shape: LayerShape, cluster: ClusterConfig, ep: int, config: MokConfig) -> None:
    """MokConfigError that lists every size that cannot be simulated."""
    problems = Problems()
    for name in ("tokens", "hidden", "intermediate", "experts", "topk"):
        value = getattr(shape, name)
        problems.require(value >= 1, f"{name} is {value}", "give at least 1")
    problems.require(shape.shared >= 0, f"shared is {shape.shared}", "give 0 or more")
    most = {"experts": MOST_EXPERTS}
    for name, value in dataclasses.asdict(shape).items():
        limit = most.get(name, MOST_SIZE)
        problems.require(value <= limit, f"{name} is beyond {limit}", "simulate a smaller layer")
    if not problems and ep >= 1:
        count = _tiles_of_backward(shape, ep)
        problems.require(
            count <= MOST_TILES, f"this layer has about {count:,} tiles a GPU", f"at most {MOST_TILES:,} are simulated"
        )
    for name in ("hidden", "intermediate", "shared"):
        value = getattr(shape, name)
        problems.require(
            value % STAGE_K == 0, f"{name} is {value}, no multiple of {STAGE_K}", "take one: the kernel needs it"
        )
    sms = config.num_sms or cluster.gpu.sms
    problems.require(
        sms <= cluster.gpu.sms, f"--mok-num-sms {sms} exceeds the {cluster.gpu.sms} of {cluster.gpu.name}", "lower it"
    )
    for name in ("fwd_comm_sms", "bwd_comm_sms"):
        value = getattr(config, name)
        problems.require(
            value < sms, f"{flag_name(name)} {value} leaves none of {sms} SMs for the products", "lower it"
        )
    problems.require(ep >= 1, f"--ep is {ep}", "give at least 1")
    problems.require(shape.topk <= shape.experts, f"top-k {shape.topk} exceeds {shape.experts} experts", "lower it")
    if ep >= 1:
        nearest = max(1, round(shape.experts / ep)) * ep
        problems.require(
            shape.experts % ep == 0,
            f"{shape.experts} experts do not divide over --ep {ep}",
            f"the nearest number of experts that does is {nearest}",
        )
        problems.require(
            ep <= cluster.domain_gpus,
            f"--ep {ep} exceeds the {cluster.domain_gpus} GPUs of one NVLink domain of {cluster.title}",
            "lower it or choose another cluster",
        )
    problems.raise_if_any(MokConfigError, "this layer cannot be simulated:")


def _tiles_of_backward(shape: LayerShape, ep: int) -> int:
    """About how many: the work of a simulation."""
    experts = -(-shape.experts // ep)
    blocks = blocks_of(shape.tokens * shape.topk) + experts
    wide, inner = columns_of(shape.hidden), columns_of(shape.intermediate)
    shared = (blocks_of(shape.tokens) + 3 * wide) * columns_of(shape.shared)
    return blocks * (wide + inner) + experts * 6 * wide * inner + shared


def expert_rows(shape: LayerShape, ep: int) -> np.ndarray:
    """Routed rows of each expert [EP, experts / EP]: each token chooses K of E experts at random.

    A normal approximation with the exact variance N p (1 - p) and correlation -1 / (E - 1); N = T x EP, p = K / E.
    """
    count, p = shape.tokens * ep, shape.topk / shape.experts
    noise = np.random.default_rng(SEED).standard_normal(shape.experts)
    spread = np.sqrt(count * p * (1 - p) * shape.experts / max(1, shape.experts - 1))
    rows = np.rint(count * p + spread * (noise - noise.mean())).astype(int)
    return np.clip(rows, 0, count).reshape(ep, -1)


def make_launch(shape: LayerShape, cluster: ClusterConfig, ep: int, config: MokConfig, comm_sms: int) -> Launch:
    """The launch of the rank with most blocks of rows. MokConfigError if its rows do not fit one macrobatch."""
    ranks = expert_rows(shape, ep)
    blocks = [sum(map(blocks_of, rows)) for rows in ranks.tolist()]
    rank = int(np.argmax(blocks))
    ring = config.macrobatch_rows(shape.tokens * shape.topk)
    if blocks[rank] * TILE_ROWS > ring:
        needed = -(-blocks[rank] * TILE_ROWS // config.minibatch_size) * config.minibatch_size
        raise MokConfigError(
            f"{blocks[rank] * TILE_ROWS} rows of the fullest rank exceed the macrobatch of {ring}, and only one "
            f"macrobatch is simulated: give --mok-macrobatch-size {needed}"
        )
    return Launch(
        tokens=shape.tokens,
        hidden=shape.hidden,
        intermediate=shape.intermediate,
        shared=shape.shared,
        expert_rows=tuple(ranks[rank].tolist()),
        minibatch_rows=config.minibatch_size,
        ring_rows=ring,
        rank=rank,
        ranks=ep,
        compute_ctas=(config.num_sms or cluster.gpu.sms) - comm_sms,
    )


def run_launch(launch: Launch, rates: KernelRates, forward: bool, comm_sms: int) -> Outcome:
    """Simulates one launch of the kernel, without prepare and the sum."""
    engine = Engine(
        tiles=list(forward_tiles(launch) if forward else backward_tiles(launch)),
        pulls=list(pull_blocks(launch, forward)),
        rates=rates,
        ctas=launch.compute_ctas,
        pullers=comm_sms or launch.compute_ctas,
        pull_rate=COMM_PULL if comm_sms else rates.cta_pull,
        pull_rows=pull_rows(launch.hidden),
        row_bytes=launch.hidden * BF16,
    )
    return engine.run()


def simulate(
    shape: LayerShape, cluster: ClusterConfig, ep: int, config: MokConfig, forward: bool, overlap: bool = False
) -> DirectionTimes:
    """Times of one direction. `overlap`: epilogues run beside the next product (KernelRates.overlap)."""
    launch, comm_sms = launch_of(shape, cluster, ep, config, forward)
    rates = kernel_rates(cluster, ep, overlap)
    outcome = run_launch(launch, rates, forward, comm_sms)
    alone = run_launch(launch, kernel_rates(cluster, ep, overlap, free_communication=True), forward, comm_sms)
    prepare, slots = _before_and_after(shape, ep, rates, forward)
    routed, always = shape.tokens * shape.topk * shape.intermediate, shape.tokens * shape.shared
    flops = (6 if forward else 12) * shape.hidden * (routed + always)
    stages = flops / (2 * TILE_ROWS * 256 * STAGE_K)
    fastest = min(rates.stage.values())
    return DirectionTimes(
        total=prepare + outcome.end + FLAG_DELAY + slots,
        prepare=prepare,
        products=outcome.products,
        epilogues=outcome.epilogues,
        waits=outcome.waits,
        sum_over_k=slots,
        without_communication=prepare + alone.end + slots,
        link=outcome.link_busy,
        limit=max(outcome.link_busy, stages * fastest / (config.num_sms or cluster.gpu.sms)),
    )


def total_time(shape: LayerShape, cluster: ClusterConfig, ep: int, config: MokConfig, forward: bool) -> float:
    """`simulate(...).total`, in half the time."""
    launch, comm_sms = launch_of(shape, cluster, ep, config, forward)
    rates = kernel_rates(cluster, ep)
    prepare, slots = _before_and_after(shape, ep, rates, forward)
    return prepare + run_launch(launch, rates, forward, comm_sms).end + FLAG_DELAY + slots


def launch_of(
    shape: LayerShape, cluster: ClusterConfig, ep: int, config: MokConfig, forward: bool
) -> tuple[Launch, int]:
    """The launch of one direction and its communication SMs. MokConfigError lists every size that cannot work."""
    check(shape, cluster, ep, config)
    comm_sms = config.fwd_comm_sms if forward else config.bwd_comm_sms
    return make_launch(shape, cluster, ep, config, comm_sms), comm_sms


def sort_and_copy(shape: LayerShape, ep: int, rates: KernelRates, forward: bool) -> float:
    """Microseconds of the prepare kernel that grow with the sizes: the copy of the input and, forward, the routes."""
    length = 2 * shape.tokens * shape.hidden * BF16 / rates.memory if ep > 1 else 0.0
    if forward:
        routes = shape.tokens * shape.topk
        least, most = SORT_CTAS
        sorters = min(most, max(least, ep * routes // ROUTES_A_SORTER))
        length += 2 * SORT_STEP * math.ceil(ep * routes / (sorters * SORT_LANES))
        length += (ep - 1) * routes * ROUTE_BYTES / rates.push
    return length


def sum_bytes(shape: LayerShape) -> int:
    """Bytes that the sum over k reads and writes."""
    return shape.tokens * (shape.topk + 1 + (shape.shared > 0)) * shape.hidden * BF16


def _before_and_after(shape: LayerShape, ep: int, rates: KernelRates, forward: bool) -> tuple[float, float]:
    """Microseconds of the prepare kernel and of the sum over k."""
    prepare = rates.prepare["forward" if forward else "backward"] + sort_and_copy(shape, ep, rates, forward)
    return prepare, sum_bytes(shape) / rates.sum_over_k
