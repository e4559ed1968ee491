"""How long each part of the kernel takes on one GPU: measured on H200, scaled to other GPUs by their peaks.

Times in microseconds, sizes in bytes, rates in bytes a microsecond (GB/s = 1000 of them). Figures come from traces of
the kernel on two H200s (docs/kernel.md, "Figures") and from the cluster's file; which of them were derived by a fit,
and what other GPUs inherit, is in docs/nvl72.md.
"""

from __future__ import annotations

from dataclasses import dataclass

from mok_megatron.config import TILE_ROWS
from mok_megatron.configs import ClusterConfig
from mok_megatron.simulate.order import DHIDDEN, DW1, DW2, DX, FC1, FC2, STAGE_K, TILE_COLS

STAGE_FLOPS = 2 * TILE_ROWS * TILE_COLS * STAGE_K
TILE_BYTES = TILE_ROWS * TILE_COLS * 2
H200_NVLINK = 450.0
"""GB/s each way: what push epilogues were measured with."""
STAGE_SHARE = 0.778
"""Of the bf16 peak, within a product: 0.720 us a stage and SM. Fitted with TILE_START to the traces' four totals."""
TILE_START = 0.9
"""us a tile that its product takes beyond its stages; fitted likewise."""
SLOWER_GPU = 1.04
"""Products of the slower of two GPUs against the traced one: the traces' rest, 79 us of 1945 and 174 of 3800."""
EPILOGUE = {FC1: 3.0, DHIDDEN: 15.0, DW1: 4.4, DW2: 4.4}
"""us that a tile's epilogue takes. FC1: what is left of 150 us a CTA after 28 pushes; the others were traced."""
PUSH_LOCAL, PUSH_REMOTE = 1.8, 3.8
"""us of a push epilogue to local memory, and more if all rows go over NVLink (1.8 local; 3.3 to 4.1, half remote)."""
CTA_PULL = 20.0
"""GB/s that one CTA's copy engine moves in pieces of 4 KB."""
PULL_DELAY = 10 * 4096 / (CTA_PULL * 1e3)
"""us from asking for a row's last piece to its count: 4 pieces on their way and 4 to 8 not yet counted
(kernels/comm/pull.cuh), at CTA_PULL."""
SUM_SHARE = 3.3 / 4.8
"""Of the memory bandwidth, in the sum over k."""
PREPARE = {True: 28.0, False: 17.0}
"""us of the prepare kernel, forward and backward, besides copying its input (28 of 60 and of 45, for 58.7 MB) and
sorting (4)."""
SORT_STEP, SORT_LANES = 1.0, 16384
"""us in which a warp sorts 32 routes, assumed: two dependent reads; and routes that are in hand at once: 32 CTAs of 16
warps (kernels/scheduler/prepare.cu). Each route is read twice."""
FLAG_DELAY = 2.0
"""us for a flag to reach a peer; assumed."""
CLAIM_STAGES = 12
"""Stages before the end of a product at which the next tile is taken: 8 (kClaimLead) and 4 loaded ahead."""

MAIN_GRAD_SHARE = 0.51
"""Of the memory bandwidth, for adding to fp32 main_grad: 2.45 TB/s. Fitted to the 460 us a CTA of these epilogues in
the trace of the last shape."""

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
class KernelRates:
    """Rates of one GPU. `remote`: share of routed rows that live on a peer, (EP - 1) / EP."""

    stage: float
    """us a stage."""
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
    overlap: bool
    """Whether an epilogue runs beside the CTA's next product: not on Hopper; two accumulators in tensor memory allow it
    on Blackwell."""
    free_communication: bool = False
    """Rows are there from the start, pushes are local: what the layer would take without communication."""


def kernel_rates(
    cluster: ClusterConfig, ep: int, overlap: bool = False, free_communication: bool = False
) -> KernelRates:
    """Rates of one GPU of `cluster` in an expert group of `ep`."""
    gpu, link = cluster.gpu, cluster.nvlink.bandwidth
    remote = 0.0 if free_communication else (ep - 1) / ep
    push = PUSH_LOCAL + PUSH_REMOTE * remote * H200_NVLINK / link
    return KernelRates(
        stage=SLOWER_GPU * STAGE_FLOPS * gpu.sms / (gpu.bf16_tflops * 1e6 * STAGE_SHARE),
        tile_start=SLOWER_GPU * TILE_START,
        epilogue={**EPILOGUE, FC2: push, DX: push},
        memory=gpu.memory_bandwidth * cluster.rates.memory * 1e3,
        main_grad=gpu.memory_bandwidth * MAIN_GRAD_SHARE * 1e3,
        pull=link * cluster.rates.nvlink_pull * 1e3,
        push=link * cluster.rates.nvlink_push * 1e3,
        remote=remote,
        cta_pull=CTA_PULL * 1e3,
        sum_over_k=gpu.memory_bandwidth * SUM_SHARE * 1e3,
        overlap=overlap,
        free_communication=free_communication,
    )
