"""The kernel's list of tiles and its order of pulls, in Python.

Mirrors kernels/scheduler/tile.cuh (the functions of the same names) and `tile` and `pull_job` of kernels/forward.cuh
and kernels/backward.cuh for a launch whose rows fit one macrobatch. Tests compile tile.cuh for the host and compare.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from mok_megatron.config import TILE_ROWS

TILE_COLS = 256
STAGE_K = 64
"""Elements of K that one pipeline stage holds."""
BAND = 8

FC1, FC2, DHIDDEN, DX, DW1, DW2 = "FC1", "FC2", "dHidden", "dX", "dW1", "dW2"
KINDS = (FC1, FC2, DHIDDEN, DX, DW1, DW2)


class Tile(NamedTuple):
    """One 128 x 256 tile. `stages`: stages of 64 along K. `block`: rows, or for weight gradients rows of the weight."""

    kind: str
    shared: bool
    block: int
    column: int
    expert: int
    stages: int


@dataclass(frozen=True)
class Launch:
    """What a rank's list of tiles depends on. Sizes in elements and rows; T = `tokens`."""

    tokens: int
    hidden: int
    intermediate: int
    shared: int
    """Intermediate size of the shared expert; 0: none."""
    expert_rows: tuple[int, ...]
    """Routed rows of each local expert, without padding."""
    minibatch_rows: int
    ring_rows: int
    rank: int
    ranks: int
    compute_ctas: int

    @property
    def expert_blocks(self) -> list[int]:
        """Local expert of each block of 128 routed rows."""
        return [e for e, rows in enumerate(self.expert_rows) for _ in range(blocks_of(rows))]

    @property
    def first_block(self) -> int:
        """The block that comes first."""
        first = next((rows for rows in self.expert_rows if rows > 0), 0)
        return first_block(blocks_of(first), self.rank, self.ranks)

    @property
    def token_blocks(self) -> int:
        """Blocks of the shared expert's rows."""
        return blocks_of(self.tokens) if self.shared else 0


def blocks_of(rows: int) -> int:
    """Blocks of 128 rows."""
    return -(-rows // TILE_ROWS)


def columns_of(width: int, tile: int = TILE_COLS) -> int:
    """Tiles across `width` columns. FC1's tile holds 128 hidden columns, gate and up."""
    return -(-width // tile)


def group_blocks(minibatch: int, ring: int, n0: int, ctas: int) -> int:
    """Blocks of a group of minibatches; `minibatch` and `ring` in blocks, `n0` columns of the first phase."""
    minibatches = (5 * ctas // 4 + minibatch * n0 - 1) // (minibatch * n0)
    return minibatch * max(1, min(minibatches, ring // minibatch // 2))


def first_block(expert_blocks: int, rank: int, ranks: int) -> int:
    """Where the list begins: at this rank's own rows of the first expert."""
    return rank * expert_blocks // ranks


def phase_tiles(
    blocks: int, per: int, n0: int, n1: int, lag: bool, rank: int, ranks: int, start: int = 0
) -> Iterator[tuple[int, int, int]]:
    """(phase, block, column) of every tile of two phases over `blocks` blocks in groups of `per`, in order.

    With `lag` the second phase runs one group behind the first. The list begins at block `start`, and those before it
    come last.
    """
    firsts = list(range(0, blocks, per))
    steps = [(0, first) for first in firsts[:1]] if lag else []
    if lag:
        for behind, first in pairwise(firsts):
            steps += [(0, first), (1, behind)]
        steps += [(1, first) for first in firsts[-1:]]
    else:
        steps = [(phase, first) for first in firsts for phase in (0, 1)]
    for phase, first in steps:
        size = min(per, blocks - first)
        for index in range(size * (n1 if phase else n0)):
            yield phase, (first + (index + rank * size // ranks) % size + start) % blocks, index // size


def banded_tiles(m_tiles: int, n_tiles: int) -> Iterator[tuple[int, int]]:
    """(row tile, column tile) of a grid in bands of eight rows."""
    for band in range(0, m_tiles, BAND):
        height = min(BAND, m_tiles - band)
        for r in range(height * n_tiles):
            yield band + r % height, r // height


def _group(launch: Launch, n0: int) -> int:
    return group_blocks(launch.minibatch_rows // TILE_ROWS, launch.ring_rows // TILE_ROWS, n0, launch.compute_ctas)


def _first_columns(launch: Launch, forward: bool) -> int:
    return columns_of(launch.intermediate, 128 if forward else TILE_COLS)


def forward_tiles(launch: Launch) -> Iterator[Tile]:
    """The forward's list: shared FC1 and FC2, then routed FC1 and FC2 group by group."""
    yield from _rows_tiles(launch, FC1, FC2, forward=True)


def backward_tiles(launch: Launch) -> Iterator[Tile]:
    """The backward's list: shared dHidden and dX, routed ones, weight gradients, the shared expert's last."""
    yield from _rows_tiles(launch, DHIDDEN, DX, forward=False)
    for expert, rows in enumerate(launch.expert_rows):
        yield from _weight_tiles(launch, launch.intermediate, rows, expert, False)
    if launch.shared:
        yield from _weight_tiles(launch, launch.shared, launch.tokens, 0, True)


def _rows_tiles(launch: Launch, first: str, second: str, forward: bool) -> Iterator[Tile]:
    width = 128 if forward else TILE_COLS
    n0, n1 = _first_columns(launch, forward), columns_of(launch.hidden)
    k0, k1 = launch.hidden // STAGE_K, (1 if forward else 2) * launch.intermediate // STAGE_K
    shared_k1 = (1 if forward else 2) * launch.shared // STAGE_K
    for m, n in banded_tiles(launch.token_blocks, columns_of(launch.shared, width)):
        yield Tile(first, True, m, n, 0, k0)
    for m, n in banded_tiles(launch.token_blocks, n1):
        yield Tile(second, True, m, n, 0, shared_k1)
    experts, per = launch.expert_blocks, _group(launch, n0)
    # Always with lag: the forward has none in a ring of one minibatch, and there one group is all of a macrobatch.
    sizes = (len(experts), per, n0, n1)
    for phase, block, column in phase_tiles(*sizes, True, launch.rank, launch.ranks, launch.first_block):
        yield Tile(second if phase else first, False, block, column, experts[block], k1 if phase else k0)


def _weight_tiles(launch: Launch, width: int, rows: int, expert: int, shared: bool) -> Iterator[Tile]:
    stages = -(-rows // STAGE_K)
    for kind, m_size, n_size in ((DW1, 2 * width, launch.hidden), (DW2, launch.hidden, width)):
        for m, n in banded_tiles(blocks_of(m_size), columns_of(n_size)):
            yield Tile(kind, shared, m, n, expert, stages)


def pull_rows(hidden: int) -> int:
    """Rows that a warp pulls at a time: up to 8, about 16 KB (`pull_rows` of kernels/host/api.cu)."""
    rows = 1
    while rows < 8 and 2 * rows * hidden * 2 <= 16384:
        rows *= 2
    return rows


def pull_blocks(launch: Launch, forward: bool) -> Iterator[int]:
    """Blocks in the order in which their rows are pulled: that in which the first phase needs them."""
    blocks, per = len(launch.expert_blocks), _group(launch, _first_columns(launch, forward))
    for _, block, _ in phase_tiles(blocks, per, 1, 0, False, launch.rank, launch.ranks, launch.first_block):
        yield block
