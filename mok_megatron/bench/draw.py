"""`python -m mok_megatron.bench.draw RECORD.json PICTURE.png`: a bench record as a picture and as a Markdown table.

The figures of the README and of docs/results are this table, printed from the record beside them.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

DIRECTIONS = ("forward", "both")
COLOURS = {
    "mok": "#1b6ca8",
    "mok blockwise": "#4f9fd6",
    "mok mxfp8": "#9ccbec",
    "nccl": "#c9c9c9",
    "alltoall": "#9aa5b1",
    "alltoall-blockwise": "#6f7d8c",
    "hybridep": "#e0a458",
    "hybridep-blockwise": "#b97f34",
    "deepep": "#b56576",
}


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
    names = _names(record)
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
    figure.suptitle(f"One MoE layer, {record['ranks']} x {hardware}, EP {record['ranks']}", fontsize=11)
    figure.savefig(picture, dpi=130)
    plt.close(figure)


def table_rows(record: dict[str, Any]) -> list[str]:
    """Markdown rows, one a shape: sizes, mok, every other implementation with its ratios to mok, products alone.

    Each cell is forward / forward and backward in milliseconds.
    """
    rows = []
    names = _names(record)
    for result in record["results"]:
        shape, floor = result["shape"], result["floor"]
        sizes = ", ".join(str(shape[name]) for name in ("tokens", "hidden", "intermediate", "experts", "topk"))
        times = {i["name"]: i["times"] for i in result["implementations"] if i["times"]}
        ours = times["mok"]
        cells = [sizes, f"{ours['forward']:.2f} / {ours['both']:.2f}"]
        for name in names[1:]:
            if name not in times:
                cells.append("-")
                continue
            other = times[name]
            ratios = ", ".join(f"{other[d] / ours[d]:.2f}x" for d in DIRECTIONS)
            cells.append(f"{other['forward']:.2f} / {other['both']:.2f} ({ratios})")
        cells.append(f"{floor['forward']:.2f} / {floor['forward'] + floor['backward']:.2f}")
        rows.append("| " + " | ".join(cells) + " |")
    return rows


def _names(record: dict[str, Any]) -> list[str]:
    """Implementations that were measured, in the order of the record, mok in bf16 first."""
    found = (i["name"] for r in record["results"] for i in r["implementations"] if i["times"])
    return list(dict.fromkeys(["mok", *found]))


def _time(result: dict[str, Any], name: str, direction: str) -> float:
    for implementation in result["implementations"]:
        if implementation["name"] == name and implementation["times"]:
            return implementation["times"][direction]
    return float("nan")


def _label(shape: dict[str, int]) -> str:
    first = f"T {shape['tokens']}, H {shape['hidden']}"
    return f"{first}\nI {shape['intermediate']}, E {shape['experts']}, K {shape['topk']}"


def main(record_path: str, picture: str) -> None:
    """Draw the record and print its table."""
    record = json.loads(Path(record_path).read_text())
    draw(record, Path(picture))
    print("\n".join(table_rows(record)))


if __name__ == "__main__":
    main(*sys.argv[1:])
