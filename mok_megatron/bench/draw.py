"""`python -m mok_megatron.bench.draw RECORD.json PICTURE.png`: the times of a bench record as bars."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

DIRECTIONS = ("forward", "both")
COLOURS = {"mok": "#1b6ca8", "nccl": "#c9c9c9", "alltoall": "#9aa5b1", "hybridep": "#e0a458", "deepep": "#b56576"}


def draw(record: dict[str, Any], picture: Path) -> None:
    """One panel for the forward and one for forward and backward; a group of bars a shape.

    Args:
        record: what `mok-megatron bench` wrote; times in milliseconds.
        picture: the PNG to write.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    results = record["results"]
    names = list(dict.fromkeys(i["name"] for result in results for i in result["implementations"]))
    figure, panels = plt.subplots(1, len(DIRECTIONS), figsize=(12, 4.2), layout="constrained")
    for panel, direction in zip(panels, DIRECTIONS, strict=True):
        for place, name in enumerate(names):
            times = [_time(result, name, direction) for result in results]
            at = [group + (place - (len(names) - 1) / 2) * 0.8 / len(names) for group in range(len(results))]
            bars = panel.bar(at, times, 0.8 / len(names), label=name, color=COLOURS.get(name))
            panel.bar_label(bars, [f"{t:.1f}" if t == t else "" for t in times], fontsize=7)
        for group, result in enumerate(results):
            floor = result["floor"]["forward"] + (result["floor"]["backward"] if direction == "both" else 0)
            panel.hlines(floor, group - 0.45, group + 0.45, color="black", linestyle="--", linewidth=1)
        panel.set_xticks(range(len(results)), [_label(result["shape"]) for result in results], fontsize=8)
        panel.set_title("forward" if direction == "forward" else "forward and backward")
        panel.set_ylabel("ms")
    panels[0].plot([], [], "k--", linewidth=1, label="products alone")
    panels[0].legend(fontsize=8)
    hardware = record["hardware"]["device"]
    figure.suptitle(f"One MoE layer, bf16, {record['ranks']} x {hardware}, EP {record['ranks']}", fontsize=11)
    figure.savefig(picture, dpi=130)
    plt.close(figure)


def _time(result: dict[str, Any], name: str, direction: str) -> float:
    for implementation in result["implementations"]:
        if implementation["name"] == name and implementation["times"]:
            return implementation["times"][direction]
    return float("nan")


def _label(shape: dict[str, int]) -> str:
    first = f"T {shape['tokens']}, H {shape['hidden']}"
    return f"{first}\nI {shape['intermediate']}, E {shape['experts']}, K {shape['topk']}"


if __name__ == "__main__":
    draw(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]))
