"""Where a launch's time goes: the tiles that each CTA recorded, as a picture, a Chrome trace and a few sums.

The kernel records, for every tile of a compute CTA, four instants of the device's clock (MokTraceTile in
kernels/mok_api.h): the CTA is free; the tile's inputs are there; the product is done; the outputs are stored.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

# As MokTraceTile.
TILE = np.dtype(
    [("kind", "<i4"), ("block", "<i4"), ("column", "<i4"), ("sm", "<i4")]
    + [(name, "<u8") for name in ("waiting", "started", "multiplied", "stored")]
)
KINDS = {1: "FC1", 2: "FC2", 3: "dHidden", 4: "dX", 5: "dW1", 6: "dW2", 7: "sum over k"}
COLOURS = {1: "#4477aa", 2: "#66ccee", 3: "#228833", 4: "#ccbb44", 5: "#ee6677", 6: "#aa3377", 7: "#bbbbbb"}


@dataclass(frozen=True)
class Trace:
    """Tiles of one launch on one rank, by CTA and in order of time; ``title`` says of what."""

    title: str
    tiles: np.ndarray  # of TILE, one dimension, only tiles that were handled
    cta: np.ndarray  # int, the CTA of each tile

    @property
    def start(self) -> int:
        return int(self.tiles["waiting"].min())

    @property
    def end(self) -> int:
        return int(self.tiles["stored"].max())

    def microseconds(self, instant: str) -> np.ndarray:
        """An instant of every tile, in microseconds since the first."""
        return (self.tiles[instant] - np.uint64(self.start)).astype(np.float64) / 1e3


def read(buffer: Any, ctas: int, title: str) -> Trace:
    """The trace in the bytes that the kernel wrote: [ctas, tiles a CTA] of MokTraceTile; kind 0 is no tile.

    ValueError when it holds no tile, or one that is not in order: then the layouts disagree.
    """
    records = np.frombuffer(buffer, dtype=TILE).reshape(ctas, -1)
    handled = records["kind"] != 0
    if not handled.any():
        raise ValueError(f"the trace of {title} is empty: no CTA recorded a tile")
    cta, _ = np.nonzero(handled)
    tiles = records[handled]
    order = [tiles[name] for name in ("waiting", "started", "multiplied", "stored")]
    if not all((before <= after).all() for before, after in pairwise(order)):
        raise ValueError(f"the trace of {title} has tiles that end before they start: rebuild the kernels")
    if not set(np.unique(tiles["kind"])) <= set(KINDS):
        raise ValueError(f"the trace of {title} has tiles of unknown kinds: rebuild the kernels")
    return Trace(title, tiles, cta)


def summary(trace: Trace) -> dict[str, float]:
    """Shares of the compute CTAs' time, from the first tile to the last: they add up to 1.

    "multiply": products. "wait": for inputs (a peer's rows, or tiles before). "store": outputs that no product hides.
    "idle": before a CTA's first tile, after its last, and between; below 0 where tiles of a CTA overlap.
    """
    names = ("waiting", "started", "multiplied", "stored")
    waiting, started, multiplied, stored = (trace.microseconds(name) for name in names)
    ctas = len(np.unique(trace.cta))
    whole = ctas * (trace.end - trace.start) / 1e3
    shares = {
        "multiply": (multiplied - started).sum() / whole,
        "wait": (started - waiting).sum() / whole,
        "store": (stored - multiplied).sum() / whole,
    }
    return {**{name: float(share) for name, share in shares.items()}, "idle": float(1 - sum(shares.values()))}


def by_kind(trace: Trace) -> dict[str, dict[str, float]]:
    """For each kind of tile: how many, and the mean microseconds that one waits, multiplies and stores."""
    found = {}
    for kind, name in KINDS.items():
        chosen = trace.tiles["kind"] == kind
        if chosen.any():
            at = {what: trace.microseconds(what)[chosen] for what in ("waiting", "started", "multiplied", "stored")}
            found[name] = {
                "tiles": float(chosen.sum()),
                "wait": float((at["started"] - at["waiting"]).mean()),
                "multiply": float((at["multiplied"] - at["started"]).mean()),
                "store": float((at["stored"] - at["multiplied"]).mean()),
            }
    return found


def text(trace: Trace) -> str:
    """The sums as lines."""
    shares = ", ".join(f"{name} {share:.1%}" for name, share in summary(trace).items())
    lines = [f"{trace.title}: {(trace.end - trace.start) / 1e3:.0f} us; {shares}"]
    lines.append(f"  {'tile':<12}{'number':>8}{'wait':>10}{'multiply':>10}{'store':>10}   us a tile")
    for name, row in by_kind(trace).items():
        lines.append(
            f"  {name:<12}{row['tiles']:>8.0f}{row['wait']:>10.2f}{row['multiply']:>10.2f}{row['store']:>10.2f}"
        )
    return "\n".join(lines)


def kernels_text(kernels: Mapping[str, Mapping[str, float]]) -> str:
    """Microseconds of each kernel (`trace_run.kernel_times`) as a line."""
    parts = [f"{d} {name} {us:.0f}" for d, of in kernels.items() for name, us in of.items()]
    return f"rank 0, kernels in a row of calls, us: {', '.join(parts)}"


def chrome(traces: Mapping[str, Trace], about: Mapping[str, Any]) -> dict[str, Any]:
    """A Chrome trace (chrome://tracing, ui.perfetto.dev): a process a trace, a thread a CTA, microseconds.

    ``about``: what was traced; it goes into "otherData". A tile without a wait or a store still has one of length 0.
    """
    events: list[dict[str, Any]] = []
    for process, (name, trace) in enumerate(traces.items()):
        events.append({"ph": "M", "name": "process_name", "pid": process, "args": {"name": name}})
        columns = [trace.microseconds(what).round(3) for what in ("waiting", "started", "multiplied", "stored")]
        for tile, cta, *instants in zip(trace.tiles, trace.cta, *columns, strict=True):
            kind = KINDS[int(tile["kind"])]
            where = {"block": int(tile["block"]), "column": int(tile["column"]), "sm": int(tile["sm"])}
            labels = (f"wait for {kind}", kind, f"store {kind}")
            for label, (before, after) in zip(labels, pairwise(instants), strict=True):
                event = {"ph": "X", "pid": process, "tid": int(cta), "name": label}
                event |= {"ts": before, "dur": round(after - before, 3)}
                events.append(event | ({"args": where} if label == kind else {}))
    return {"traceEvents": events, "displayTimeUnit": "ns", "otherData": dict(about)}


def draw(trace: Trace, path: Path) -> None:
    """A PNG: a line an SM, products in their kind's colour, stores hatched by a lighter shade, waits left white."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.collections import PolyCollection
    from matplotlib.patches import Patch

    started, multiplied, stored = (trace.microseconds(name) for name in ("started", "multiplied", "stored"))
    sms, row = np.unique(trace.tiles["sm"], return_inverse=True)
    figure, axes = plt.subplots(figsize=(14, max(3, min(12, 0.08 * len(sms) + 1.5))))
    for kind in np.unique(trace.tiles["kind"]):
        chosen = trace.tiles["kind"] == kind
        for before, after, alpha in ((started, multiplied, 1.0), (multiplied, stored, 0.4)):
            left, right, y = before[chosen], after[chosen], row[chosen]
            corners = np.stack(
                [
                    np.stack([x, z], axis=1)
                    for x, z in ((left, y - 0.5), (left, y + 0.5), (right, y + 0.5), (right, y - 0.5))
                ],
                axis=1,
            )
            axes.add_collection(PolyCollection(list(corners), facecolors=COLOURS[int(kind)], alpha=alpha, linewidths=0))
    axes.set_xlim(0, (trace.end - trace.start) / 1e3)
    axes.set_ylim(len(sms) - 0.5, -0.5)
    axes.set_xlabel("microseconds")
    axes.set_ylabel(f"{len(sms)} SMs")
    axes.set_yticks([])
    shares = ", ".join(f"{name} {share:.1%}" for name, share in summary(trace).items())
    axes.set_title(f"{trace.title}\n{shares}", fontsize=10)
    handles = [Patch(color=COLOURS[k], label=KINDS[k]) for k in KINDS if (trace.tiles["kind"] == k).any()]
    handles.append(Patch(color="#888888", alpha=0.4, label="storing (lighter)"))
    handles.append(Patch(facecolor="white", edgecolor="#888888", label="waiting"))
    axes.legend(
        handles=handles,
        loc="upper center",
        bbox_to_anchor=(0.5, -0.55 / figure.get_figheight()),
        ncols=len(handles),
        frameon=False,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110, bbox_inches="tight")
    plt.close(figure)


def write(ranks: Sequence[Mapping[str, Trace]], folder: Path, about: Mapping[str, Any]) -> list[Path]:
    """``<name>.png`` for each trace of rank 0, and one ``trace.json`` of all ranks for Chrome; gives their paths.

    Every trace's time begins at its own first tile: the clocks of two devices do not agree.
    """
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, trace in ranks[0].items():
        paths.append(folder / f"{name}.png")
        draw(trace, paths[-1])
    paths.append(folder / "trace.json")
    everything = {f"rank {r} {name}": trace for r, traces in enumerate(ranks) for name, trace in traces.items()}
    paths[-1].write_text(json.dumps(chrome(everything, about)))
    return paths
