"""The discrete-event model of one launch on one rank.

CTAs take tiles from one list, a little before they finish the tile in hand; a tile waits for its inputs as in `ready`
of kernels/forward.cuh and backward.cuh; a finished product goes through its epilogue, which shares memory and NVLink
with those of other CTAs; pulling warps share NVLink and each moves bytes at the rate of its CTA; before a CTA's first
tile the warps that will multiply pull too. All ranks of a group are taken to do the same at the same time, so what
peers push here is what this rank pushes, and both directions of the link carry its pulls and its pushes.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from mok_megatron.config import TILE_ROWS
from mok_megatron.simulate.order import DHIDDEN, DW1, DW2, DX, FC1, FC2, Tile
from mok_megatron.simulate.rates import (
    CLAIM_STAGES,
    FIRST_PULL,
    MEMORY_BYTES,
    PULL_PIECE,
    PULL_PIECES,
    TILE_BYTES,
    KernelRates,
)

ROWS = "rows"
Flag = tuple[str, bool, int]
"""What is waited for, of the shared expert or not, block (-1: of all blocks)."""


@dataclass
class Outcome:
    """Times in microseconds; those a CTA are means."""

    end: float = 0.0
    """All tiles are stored and all rows pushed."""
    products: float = 0.0
    epilogues: float = 0.0
    """Where they keep the CTA from its next product."""
    waits: float = 0.0
    """For inputs, while the CTA has nothing to multiply, and at the end of the list."""
    row_waits: float = 0.0
    """For rows only, between the tiles of a CTA."""
    first_tile: float = math.inf
    """When the first of all tiles starts."""
    link_busy: float = 0.0
    finished: list[Tile] = field(default_factory=list)
    """Tiles in the order in which they were stored."""


def waits_for(tile: Tile) -> Flag | None:
    """The flag that must be complete before `tile` may start; None: nothing."""
    if tile.kind in (FC1, DHIDDEN):
        return None if tile.shared else (ROWS, False, tile.block)
    if tile.kind == FC2:
        return (FC1, tile.shared, tile.block)
    if tile.kind == DX:
        return (DHIDDEN, tile.shared, tile.block)
    return (DHIDDEN, tile.shared, -1)


def sets(tile: Tile) -> Iterator[Flag]:
    """The flags that a stored tile counts for."""
    yield (tile.kind, tile.shared, tile.block)
    if tile.kind == DHIDDEN:
        yield (tile.kind, tile.shared, -1)


class Engine:
    """One launch. `pulls`: blocks in the order of their pulls; `pull_rows` rows a job, of `row_bytes` each, at
    `pull_rate` bytes a us by each of `pullers` CTAs."""

    def __init__(
        self,
        tiles: Sequence[Tile],
        pulls: Sequence[int],
        rates: KernelRates,
        ctas: int,
        pullers: int,
        pull_rate: float,
        pull_rows: int,
        row_bytes: int,
    ) -> None:
        self.tiles, self.rates, self.ctas = tiles, rates, ctas
        self.pull_rows, self.row_bytes, self.pull_rate = pull_rows, row_bytes, pull_rate
        self.jobs = (block for block in pulls for _ in range(TILE_ROWS // pull_rows))
        self.missing: Counter[Flag] = Counter(flag for tile in tiles for flag in sets(tile))
        self.waiting: dict[Flag, list[tuple[int, Tile]]] = defaultdict(list)
        self.next_tile = 0
        self.pending: list[Tile | None] = [None] * ctas
        self.busy = [False] * ctas
        self.started = [False] * ctas
        self.idle_since = [0.0] * ctas
        self.drained = [0.0] * ctas  # when the CTA's latest epilogue ends
        self.link_free = self.memory_free = 0.0
        self.outcome = Outcome()
        self.events: list[tuple[float, int, Any, tuple[Any, ...]]] = []
        self.number = count()
        if not rates.free_communication:
            for block in pulls:
                self.missing[(ROWS, False, block)] = TILE_ROWS
            for _ in range(pullers):
                self.at(0.0, self.pull, self.pull_rate)
            for cta in range(ctas):
                self.at(0.0, self.pull, FIRST_PULL, cta)
        for cta in range(ctas):
            self.at(0.0, self.claim, cta)

    def at(self, time: float, action: Any, *arguments: Any) -> None:
        heapq.heappush(self.events, (time, next(self.number), action, arguments))

    def run(self) -> Outcome:
        """Runs to the end. RuntimeError if tiles are left: the list would deadlock."""
        outcome = self.outcome
        while self.events:
            now, _, action, arguments = heapq.heappop(self.events)
            action(now, *arguments)
        if len(outcome.finished) != len(self.tiles):
            flags = sorted(flag for flag, waiting in self.waiting.items() if waiting)
            raise RuntimeError(f"{len(self.tiles) - len(outcome.finished)} tiles never ran; waiting for {flags[:5]}")
        outcome.products /= self.ctas
        outcome.epilogues /= self.ctas
        outcome.row_waits /= self.ctas
        outcome.waits = outcome.end - outcome.products - outcome.epilogues
        return outcome

    def claim(self, now: float, cta: int) -> None:
        if self.next_tile == len(self.tiles):
            return
        tile = self.tiles[self.next_tile]
        self.next_tile += 1
        flag = waits_for(tile)
        if flag is not None and self.missing[flag] > 0:
            self.waiting[flag].append((cta, tile))
        else:
            self.show(now, cta, tile)

    def show(self, now: float, cta: int, tile: Tile) -> None:
        if self.busy[cta]:
            self.pending[cta] = tile
        else:
            self.multiply(now, cta, tile)

    def multiply(self, now: float, cta: int, tile: Tile) -> None:
        self.outcome.first_tile = min(self.outcome.first_tile, now)
        if tile.kind in (FC1, DHIDDEN) and not tile.shared and self.started[cta]:
            self.outcome.row_waits += now - self.idle_since[cta]
        self.busy[cta] = self.started[cta] = True
        stage = self.rates.stage[tile.kind]
        length = self.rates.tile_start + tile.stages * stage
        self.outcome.products += length
        self.at(now + length, self.store, cta, tile)
        self.at(now + length - min(tile.stages, CLAIM_STAGES) * stage, self.claim, cta)

    def store(self, now: float, cta: int, tile: Tile) -> None:
        rates = self.rates
        before = max(now, self.drained[cta])
        end = before + rates.epilogue[tile.kind]
        if size := MEMORY_BYTES[tile.kind]:
            rate = rates.main_grad if tile.kind in (DW1, DW2) else rates.memory
            self.memory_free = max(self.memory_free, before) + size / rate
            end = max(end, self.memory_free)
        if tile.kind in (FC2, DX) and not tile.shared and rates.remote > 0:
            end = max(end, self.link(before, TILE_BYTES * rates.remote, rates.push))
        free = before if rates.overlap else end
        self.drained[cta] = end
        self.outcome.epilogues += free - now
        self.at(free, self.free, cta)
        self.at(end, self.stored, tile)

    def free(self, now: float, cta: int) -> None:
        self.busy[cta] = False
        self.idle_since[cta] = now
        tile, self.pending[cta] = self.pending[cta], None
        if tile is not None:
            self.multiply(now, cta, tile)

    def stored(self, now: float, tile: Tile) -> None:
        self.outcome.finished.append(tile)
        self.outcome.end = max(self.outcome.end, now)
        for flag in sets(tile):
            self.counted(now, flag, 1)

    def counted(self, now: float, flag: Flag, n: int) -> None:
        self.missing[flag] -= n
        if self.missing[flag] == 0:
            for cta, tile in self.waiting.pop(flag, ()):
                self.show(now, cta, tile)

    def pull(self, now: float, rate: float, cta: int | None = None) -> None:
        """One job at `rate`, then the next; by the multiplying warps of `cta` until they have a tile."""
        if cta is not None and self.started[cta]:
            return
        block = next(self.jobs, None)
        if block is None:
            return
        size = self.pull_rows * self.row_bytes
        end = max(now + size / rate, self.link(now, size * self.rates.remote, self.rates.pull))
        self.at(end, self.pull, rate, cta)
        self.at(end + PULL_PIECES * PULL_PIECE / rate, self.pulled, block)

    def pulled(self, now: float, block: int) -> None:
        self.counted(now, (ROWS, False, block), self.pull_rows)

    def link(self, now: float, size: float, rate: float) -> float:
        """When `size` bytes that ask for the link at `now` are across."""
        self.link_free = max(self.link_free, now) + size / rate
        self.outcome.link_busy += size / rate
        return self.link_free
