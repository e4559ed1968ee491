"""How long each part of the kernel takes on one GPU: measured on H200, scaled to other GPUs by their peaks.

Times in microseconds, sizes in bytes, rates in bytes a microsecond (GB/s = 1000 of them). What is measured stands in
``configs/kernel_rates/h200.yaml``, which `mok-megatron simulate --fit` writes from traces and a bench record; the
constants here were measured otherwise or are assumed. What other GPUs inherit is in docs/nvl72.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from mok_megatron.config import TILE_ROWS
from mok_megatron.configs import ClusterConfig, load_cluster
from mok_megatron.resources import data_folder
from mok_megatron.simulate.order import DHIDDEN, DW1, DW2, DX, FC1, FC2, KINDS, TILE_COLS
from mok_megatron.typed_yaml import load_typed

TILE_BYTES = TILE_ROWS * TILE_COLS * 2
COMM_PULL = 20e3
"""Bytes a us that a communication CTA pulls, by seven warps: docs/kernel.md, "What was tried"."""
FIRST_PULL = 20e3
"""Likewise of the warps that will multiply, until their CTA's first tile is there (`pull_until`); all CTAs together are
bound by NVLink or memory. Assumed."""
PULL_PIECE, PULL_PIECES = 4096, 10
"""Bytes of a piece (kPullPiece of kernels/comm/pull.cuh), and pieces from asking for a row's last one to its count: 4
on their way, 4 to 8 not yet counted."""
SORT_STEP = 1.0
"""us in which a warp reads the routes that it has in hand, assumed: two dependent reads. Each route is read twice."""
SORT_LANES, SORT_CTAS, ROUTES_A_SORTER = 16 * 32 * 8, (32, 128), 8192
"""Routes that a CTA has in hand at once: 16 warps of 32 lanes, 8 loads each; least and most CTAs that sort, and routes
for each beyond the least (kernels/scheduler/prepare.cu)."""
FLAG_DELAY = 2.0
"""us for a flag to reach a peer; assumed."""
CLAIM_STAGES = 12
"""Stages before the end of a product at which the next tile is taken: 8 (kClaimLead) and 4 loaded ahead."""

MEMORY_BYTES = {
    FC1: 1.5 * TILE_BYTES,
    FC2: 0.0,
    DHIDDEN: 5 * TILE_BYTES,
    DX: 0.0,
    DW1: 4 * TILE_BYTES,
    DW2: 4 * TILE_BYTES,
}
"""Bytes of memory traffic of an epilogue: gate, up and hidden; the same read and their gradients written; fp32
main_grad read and written. Pushes are counted as NVLink traffic."""


@dataclass(frozen=True)
class MeasuredRates:
    """``configs/kernel_rates/h200.yaml``: means over the traces' tiles, unless said otherwise."""

    cluster: str
    """The machine, one of configs/clusters: its peaks are what other GPUs are scaled from."""
    stage_us: dict[str, float]
    """By kind of tile: a stage of 128 x 256 x 64, in a row of calls."""
    tile_start_us: float
    """What a product takes beyond its stages."""
    epilogue_us: dict[str, float]
    """By kind of tile: from the end of a product to the next, in the trace where that is shortest."""
    main_grad_gb_per_s: float
    """Memory traffic of weight-gradient epilogues, all CTAs together, in the trace where that is fastest."""
    cta_pull_gb_per_s: float
    """What the idle warp of one CTA pulls. Fitted: simulated waits come nearest to the traced ones."""
    sum_gb_per_s: float
    """The sum over k, all CTAs together."""
    prepare_us: dict[str, float]
    """By direction: the prepare kernel, less input copy and sort."""
    between_us: float
    """What a direction takes longer than its two kernels."""
    sources: dict[str, str] = field(default_factory=dict)

    def check(self) -> Iterator[tuple[str, str]]:
        for name, keys in (("stage_us", KINDS), ("epilogue_us", KINDS), ("prepare_us", ("forward", "backward"))):
            values: dict[str, float] = getattr(self, name)
            if set(values) != set(keys):
                yield name, f"has the keys {', '.join(values)}, not {', '.join(keys)}"
            if any(value < 0 for value in values.values()):
                yield name, "has a value below 0"
        for name in ("tile_start_us", "main_grad_gb_per_s", "cta_pull_gb_per_s", "sum_gb_per_s", "between_us"):
            if getattr(self, name) < 0:
                yield name, "is below 0"


def rates_file() -> Path:
    """The rates that simulations use."""
    return data_folder("configs") / "kernel_rates" / "h200.yaml"


@cache
def measured_rates() -> MeasuredRates:
    """What `rates_file` says. ConfigFileError if it cannot be read."""
    return load_typed(rates_file(), MeasuredRates)


@dataclass(frozen=True)
class KernelRates:
    """Rates of one GPU. `remote`: share of routed rows that live on a peer, (EP - 1) / EP."""

    stage: dict[str, float]
    """us a stage, by kind of tile."""
    tile_start: float
    epilogue: dict[str, float]
    """us by kind of tile, if nothing else uses memory or NVLink."""
    memory: float
    main_grad: float
    """Memory rate of weight-gradient epilogues."""
    pull: float
    push: float
    remote: float
    cta_pull: float
    sum_over_k: float
    prepare: dict[str, float]
    """us by direction, without copy and sort, with what lies between kernels."""
    overlap: bool
    """Whether an epilogue runs beside the CTA's next product: not on Hopper; two accumulators in tensor memory allow it
    on Blackwell."""
    free_communication: bool = False
    """Rows are there from the start, pushes are local: what the layer would take without communication."""


def kernel_rates(
    cluster: ClusterConfig,
    ep: int,
    overlap: bool = False,
    free_communication: bool = False,
    measured: MeasuredRates | None = None,
) -> KernelRates:
    """Rates of one GPU of `cluster` in an expert group of `ep`; `measured` replaces those of `rates_file`."""
    measured = measured or measured_rates()
    gpu, origin, link = cluster.gpu, load_cluster(measured.cluster).gpu, cluster.nvlink.bandwidth
    # The same share of the peak of one SM, and of the memory bandwidth.
    slower = (gpu.sms / gpu.bf16_tflops) / (origin.sms / origin.bf16_tflops)
    memory = gpu.memory_bandwidth / origin.memory_bandwidth * 1e3
    return KernelRates(
        stage={kind: slower * us for kind, us in measured.stage_us.items()},
        tile_start=measured.tile_start_us,
        epilogue=measured.epilogue_us,
        memory=gpu.memory_bandwidth * cluster.rates.memory * 1e3,
        main_grad=memory * measured.main_grad_gb_per_s,
        pull=link * cluster.rates.nvlink_pull * 1e3,
        push=link * cluster.rates.nvlink_push * 1e3,
        remote=0.0 if free_communication else (ep - 1) / ep,
        cta_pull=measured.cta_pull_gb_per_s * 1e3,
        sum_over_k=memory * measured.sum_gb_per_s,
        prepare={direction: us + measured.between_us for direction, us in measured.prepare_us.items()},
        overlap=overlap,
        free_communication=free_communication,
    )
