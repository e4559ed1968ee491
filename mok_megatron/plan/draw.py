"""Racks (or nodes) with their GPUs coloured by expert group, as a PNG."""

from __future__ import annotations

import math
import os
from pathlib import Path

import numpy as np

from mok_megatron.plan.search import Plan

MAX_DRAWN = 24
"""Domains drawn; the title says how many there are."""
SPARE = "#e4e4e4"


def draw_racks(plan: Plan, path: str | os.PathLike[str]) -> int:
    """Write the picture to `path` and give the number of domains that it shows.

    One box a GPU with its rank, one row a node, one column a domain; nodes that the job leaves are grey.
    """
    import matplotlib

    matplotlib.use("Agg", force=False)
    from matplotlib import colormaps
    from matplotlib.figure import Figure
    from matplotlib.patches import Rectangle

    placement, sizes, cluster = plan.placement, plan.sizes, plan.request.cluster
    shown = min(placement.domains, MAX_DRAWN)
    nodes, gpus = cluster.domain.nodes, cluster.node.gpus
    columns = min(shown, 8 if nodes > 1 else 2)
    rows = math.ceil(shown / columns)
    figure = Figure(figsize=(max(6.0, 1.6 * columns * gpus / 4 + 0.6), 0.9 + rows * (0.26 * nodes + 0.75)), dpi=120)
    axes = figure.add_axes((0.02, 0.01, 0.96, 0.97 - 0.55 / figure.get_figheight()))
    colours = [colormaps["tab20"](i) for i in range(20) if i not in (14, 15)]  # grey means spare
    group_of = np.empty(sizes.world, dtype=np.int64)
    groups = sizes.expert_groups()
    group_of[groups.reshape(-1)] = np.repeat(np.arange(len(groups)), groups.shape[1])
    for domain in range(shown):
        left = domain % columns * (gpus + 0.8)
        top = -(domain // columns) * (nodes + 2.4)
        first = domain * placement.per_domain
        held = min(placement.per_domain, sizes.world - first)
        stages = sorted({sizes.stage_of(first), sizes.stage_of(first + held - 1)})
        stage = f"stage {'-'.join(map(str, stages))}" if sizes.pp > 1 else ""
        axes.text(left, top + 0.35, f"{cluster.domain.name} {domain}  {stage}", fontsize=7, weight="bold")
        for node in range(nodes):
            for gpu in range(gpus):
                slot = node * gpus + gpu
                rank = first + slot
                used = slot < held
                group = int(group_of[rank]) if used else 0
                colour = colours[group % len(colours)] if used else SPARE
                corner = (left + gpu, top - node - 1)
                axes.add_patch(Rectangle(corner, 0.94, 0.88, facecolor=colour, edgecolor="white", linewidth=0.5))
                if used:
                    axes.text(corner[0] + 0.47, corner[1] + 0.42, str(rank), fontsize=4.5, ha="center", va="center")
            if node * gpus >= held:
                label = "spare" if node * gpus >= placement.per_domain else "free"
                axes.text(left + gpus / 2, top - node - 0.58, label, fontsize=6, ha="center", va="center")
    axes.set_xlim(-0.2, columns * (gpus + 0.8))
    axes.set_ylim(-rows * (nodes + 2.4) + 1.2, 1.4)
    axes.axis("off")
    more = f" (the first {shown} of {placement.domains} {cluster.domain.name}s)" if shown < placement.domains else ""
    figure.suptitle(
        f"{plan.request.model.title} on {cluster.title}: TP {sizes.tp}, CP {sizes.cp}, EP {sizes.ep}, PP {sizes.pp}"
        f"{more}\none colour an expert group, numbers are ranks",
        fontsize=8,
    )
    figure.savefig(Path(path), format="png")
    return shown
