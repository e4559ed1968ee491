"""The comparison as one picture: loss curves, their differences, and the speed of each dispatcher.

``python -m mok_megatron.compare.draw SUMMARY.json PICTURE.png`` draws an earlier one.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

COLOURS = {"mok": "tab:blue", "alltoall": "tab:orange", "hybridep": "tab:green", "deepep": "tab:red"}


def draw(summary: dict[str, Any], path: Path) -> None:
    """Write the picture as a PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    results, base = summary["results"], summary["results"].get(summary["baseline"])
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.add_gridspec(2, 2, width_ratios=[3, 2], height_ratios=[3, 2])
    curves = figure.add_subplot(grid[0, 0])
    gaps = figure.add_subplot(grid[1, 0], sharex=curves)
    bars = figure.add_subplot(grid[:, 1])
    different = False
    width = 1.0 + 1.5 * len(results)
    for name, result in results.items():  # wide lines first, so that curves on top of one another all show
        steps = range(1, len(result["loss"]) + 1)
        curves.plot(steps, result["loss"], color=COLOURS[name], linewidth=width, alpha=0.6, label=name)
        width -= 1.5
        if base is not None and result is not base:
            differences = [abs(a - b) or None for a, b in zip(result["loss"], base["loss"], strict=False)]
            different = different or any(differences)
            gaps.semilogy(steps[: len(differences)], differences, ".", color=COLOURS[name], label=name)
    if not different:
        words = "no difference" if base is not None else f"{summary['baseline']} was not run"
        gaps.text(0.5, 0.5, words, ha="center", va="center", transform=gaps.transAxes)
    curves.set_ylabel("loss")
    curves.xaxis.set_major_locator(MaxNLocator(integer=True))
    curves.legend(frameon=False)
    gaps.set_ylabel(f"difference to\n{summary['baseline']}")
    gaps.set_xlabel("step")
    names = list(results)
    rates = [results[n]["tokens_per_s_per_gpu"] for n in names]
    drawn = bars.barh(names, rates, height=0.6, color=[COLOURS[n] for n in names])
    labels = [f"{results[n]['tokens_per_s_per_gpu']:,.0f}\n{results[n]['ms_per_step']:,.1f} ms a step" for n in names]
    bars.bar_label(drawn, labels, label_type="center", color="white", fontsize=9)
    bars.invert_yaxis()
    bars.set_xlabel("tokens/s per GPU")
    figure.suptitle(f"{summary['preset']}, {summary['steps']} steps", fontsize=10)
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    draw(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]))
