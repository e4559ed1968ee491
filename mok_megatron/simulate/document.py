"""`python -m mok_megatron.simulate.document docs/nvl72.md`: writes the simulation's tables of that page anew.

Each stands behind a marker such as ``<!-- check -->``; the text around is left alone.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from mok_megatron.config import MokConfig
from mok_megatron.configs import load_cluster, load_model
from mok_megatron.simulate.fit import DIRECTIONS, read_times
from mok_megatron.simulate.layer import LayerShape, simulate
from mok_megatron.simulate.order import KINDS
from mok_megatron.simulate.rates import measured_rates

RECORD = "results/layer_2xh200_ep2.json"
"""Beside the page."""
MODELS = ("deepseek_v3", "kimi_k2_7_code", "glm_5_2", "qwen3_5_397b_a17b", "deepseek_v4_pro")


def comparison(record: Path, cluster: str) -> list[list[str]]:
    """Rows of shape, direction, simulated and measured milliseconds and their difference, at the record's EP."""
    ranks, machine = json.loads(record.read_text())["ranks"], load_cluster(cluster)
    rows = []
    for shape, times in read_times(record).items():
        name = f"{shape.tokens}, {shape.hidden}, {shape.intermediate}, {shape.experts}, {shape.topk}"
        for direction in DIRECTIONS:
            simulated = simulate(shape, machine, ranks, MokConfig(), direction == "forward").total / 1e3
            measured = times[direction]
            difference = f"{100 * (simulated / measured - 1):+.1f} %"
            rows.append([name, direction, f"{simulated:.2f}", f"{measured:.2f}", difference])
    return rows


def check_table(page: Path) -> str:
    """Simulated against measured layer times."""
    heads = ["T, H, I, E, K", "direction", "simulated", "measured", "difference"]
    return _markdown(heads, comparison(page.parent / RECORD, measured_rates().cluster))


def rates_table(page: Path) -> str:
    """The measured rates by kind of tile."""
    rates = measured_rates()
    rows = [
        ["a stage of a product (128 x 256 x 64), us", *(f"{rates.stage_us[kind]:.3f}" for kind in KINDS)],
        ["epilogue, us", *(f"{rates.epilogue_us[kind]:.1f}" for kind in KINDS)],
    ]
    return _markdown(["", *KINDS], rows)


def simulated_table(page: Path) -> str:
    """The models at EP 64."""
    cluster = load_cluster("gb300_nvl72")
    columns = ["serial", "exposed", "overlapped", "exposed", "limit"]
    rows = []
    for name in MODELS:
        model = load_model(name)
        moe = model.moe
        sizes = (moe.hidden_size, moe.moe_ffn_hidden_size, moe.num_experts, moe.topk)
        shape = LayerShape(4096, *sizes, moe.shared_expert_intermediate_size)
        row = [model.title]
        for direction in DIRECTIONS:
            times = [simulate(shape, cluster, 64, MokConfig(), direction == "forward", o) for o in (False, True)]
            values = [value for each in times for value in (each.total, each.exposed)]
            row += [f"{value / 1e3:.2f}" for value in (*values, times[0].limit)]
        rows.append(row)
    heads = [f"{direction}, {columns[0]}" if i == 0 else columns[i] for direction in DIRECTIONS for i in range(5)]
    return _markdown(["model", *heads], rows)


TABLES: dict[str, Callable[[Path], str]] = {
    "check": check_table,
    "rates": rates_table,
    "simulated": simulated_table,
}


def rewrite(page: Path) -> None:
    """Replaces the table behind each marker of `TABLES`. ValueError if one is missing."""
    text = page.read_text()
    for name, make in TABLES.items():
        found = re.compile(rf"(<!-- {name} -->\n)(?:\|.*\n)*")
        table = make(page)
        text, count = found.subn(lambda match, table=table: match.group(1) + table, text)  # type: ignore[misc]
        if count != 1:
            raise ValueError(f"{page} has the marker <!-- {name} --> {count} times, not once")
    page.write_text(text)


def _markdown(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


if __name__ == "__main__":
    rewrite(Path(sys.argv[1]))
