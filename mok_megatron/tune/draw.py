"""The surface of a search: time by communication SMs and minibatch, a panel a direction."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from mok_megatron.bench.problem import Shape
from mok_megatron.tune.points import Expected, Point
from mok_megatron.tune.search import Found

DIRECTIONS = ("forward", "backward")


def draw(
    shape: Shape,
    points: Sequence[Point],
    expected: dict[Point, Expected | str],
    found: Found | None,
    where: str,
    path: Path,
) -> None:
    """Writes a PNG. Cells that were only predicted stand in brackets and are hatched; the best of each panel is framed.

    Args:
        where: EP and machine, for the title.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    import numpy as np
    from matplotlib.patches import Rectangle

    flat = [point for point in points if point.macrobatch is None]
    columns = sorted({point.comm_sms for point in flat})
    rows = sorted({point.minibatch for point in flat})
    figure, panels = plt.subplots(1, 2, figsize=(12, 1.8 + 0.55 * len(rows)), layout="constrained")
    for panel, direction in zip(panels, DIRECTIONS, strict=True):
        values = np.full((len(rows), len(columns)), np.nan)
        texts: dict[tuple[int, int], str] = {}
        for point in flat:
            cell = rows.index(point.minibatch), columns.index(point.comm_sms)
            reading, value = found.readings.get(point) if found else None, expected.get(point)
            if reading is not None:
                values[cell] = getattr(reading.times, direction)
                texts[cell] = f"{values[cell]:.2f}"
            elif isinstance(value, Expected):
                values[cell] = getattr(value, direction)
                texts[cell] = f"({values[cell]:.2f})"
        image = panel.imshow(values, cmap="viridis_r", aspect="auto")
        middle = np.nanmean([np.nanmin(values), np.nanmax(values)]) if texts else 0.0
        for (row, column), text in texts.items():
            colour = "white" if values[row, column] > middle else "black"
            panel.text(column, row, text, ha="center", va="center", color=colour, fontsize=9)
            if text.startswith("("):
                panel.add_patch(_cell(Rectangle, row, column, hatch="//", edgecolor="#ffffff55", linewidth=0))
        measured = {cell: values[cell] for cell, text in texts.items() if not text.startswith("(") or found is None}
        if measured:
            best = min(measured, key=lambda cell: measured[cell])
            panel.add_patch(_cell(Rectangle, *best, edgecolor="#d62728", linewidth=2))
        panel.set_xticks(range(len(columns)), [str(sms) if sms else "0 (idle warps)" for sms in columns])
        panel.set_yticks(range(len(rows)), [str(size) for size in rows])
        panel.set_xlabel("communication SMs")
        panel.set_ylabel("minibatch, rows")
        panel.set_title(f"{direction}, ms")
        figure.colorbar(image, ax=panel)
    kind = "PREDICTED by simulation" if found is None else "measured; in brackets: predicted only"
    figure.suptitle(f"{shape}; {where}; {kind}", fontsize=10)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _cell(rectangle: type, row: int, column: int, **style: object) -> object:
    return rectangle((column - 0.5, row - 0.5), 1, 1, fill=False, **style)
