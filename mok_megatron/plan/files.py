"""A plan as files: what a user submits, and what a colleague reads."""

from __future__ import annotations

import json
from pathlib import Path

from mok_megatron.plan import launch
from mok_megatron.plan.draw import draw_racks
from mok_megatron.plan.report import as_dictionary, text_report
from mok_megatron.plan.search import Plan


def write_files(plan: Plan, folder: Path) -> list[Path]:
    """Write the plan's files into `folder` (made if missing) and give their paths. OSError: it cannot be written."""
    folder.mkdir(parents=True, exist_ok=True)
    texts = {
        "plan.txt": text_report(plan),
        "plan.json": json.dumps(as_dictionary(plan), indent=2) + "\n",
        "node.sh": launch.node_script(plan),
    }
    if plan.placement.nodes > 1:
        texts["job.sh"] = launch.job_script(plan)
    if launch.uses_segments(plan):
        texts["topology.conf"] = launch.topology_conf(plan)
    written = []
    for name, text in texts.items():
        path = folder / name
        path.write_text(text, encoding="utf-8")
        written.append(path)
    picture = folder / "racks.png"
    draw_racks(plan, picture)
    return [*written, picture]
