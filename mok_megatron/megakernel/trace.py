"""When each CTA handled which tile: where the time of a launch goes."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch

from mok_megatron.megakernel.binding import MokTraceTile
from mok_megatron.megakernel.workspace import Workspace

KINDS = {1: "FC1", 2: "FC2", 3: "dHidden", 4: "dX", 5: "dW1", 6: "dW2", 7: "sum over k"}


@dataclass(frozen=True)
class TileRecord:
    """One tile as a CTA's first multiplying thread saw it; times in nanoseconds of the device's clock."""

    cta: int
    sm: int
    kind: str
    """One of `KINDS`; "sum over k" is the end of the launch, whose `started` is when all peers have signalled."""
    block: int
    """Block of 128 rows (of the schedule, or of tokens for the shared expert); weight gradients have none."""
    column: int
    waiting: int
    """Ready for a tile."""
    started: int
    """The tile and its inputs are there."""
    multiplied: int
    """The product is done."""
    stored: int
    """Outputs are stored."""


class Trace:
    """Records the launches of a workspace while the `with` block runs; the last launch wins.

    Args:
        workspace: its later launches are recorded. Those already captured in a CUDA graph are not.
        tiles: entries a CTA; further tiles of a launch are not recorded.
    """

    def __init__(self, workspace: Workspace, tiles: int = 1024) -> None:
        self._workspace, self._tiles, self._ctas = workspace, tiles, workspace.struct.num_ctas
        size = self._ctas * tiles * ctypes.sizeof(MokTraceTile)
        self._buffer = torch.zeros(size, dtype=torch.uint8, device=workspace.device)

    def __enter__(self) -> Trace:
        self._workspace.struct.trace = self._buffer.data_ptr()
        self._workspace.struct.trace_tiles = self._tiles
        return self

    def __exit__(self, *_: object) -> None:
        torch.cuda.synchronize(self._workspace.device)
        self._workspace.struct.trace = None
        self._workspace.struct.trace_tiles = 0

    def clear(self) -> None:
        """Forget what was recorded, so that the next launch is seen alone."""
        self._buffer.zero_()

    def records(self) -> list[TileRecord]:
        """What was recorded, by CTA and in the order of time. Waits for the device."""
        raw = self._buffer.cpu().numpy().tobytes()
        entries = (MokTraceTile * (self._ctas * self._tiles)).from_buffer_copy(raw)
        return [
            TileRecord(
                number // self._tiles,
                e.sm,
                KINDS[e.kind],
                e.block,
                e.column,
                e.waiting,
                e.started,
                e.multiplied,
                e.stored,
            )
            for number, e in enumerate(entries)
            if e.kind in KINDS
        ]
