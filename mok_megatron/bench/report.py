"""The benchmark's table and its JSON record."""

import datetime
import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from mok_megatron import versions
from mok_megatron.bench.floor import Floor
from mok_megatron.bench.measure import Times
from mok_megatron.bench.problem import Shape
from mok_megatron.resources import PACKAGE

DISTRIBUTIONS = ("mok-megatron", "torch", "megatron-core", "transformer_engine", "deep_ep", "nvidia-cutlass", "triton")

NAME_WIDTH = 18


@dataclass(frozen=True)
class Entry:
    """One implementation on one shape: its errors and times, or why there are none."""

    name: str
    errors: Mapping[str, float] | None = None  # relative, by result
    times: Times | None = None
    note: str | None = None  # why it was not measured

    @property
    def worst_error(self) -> float | None:
        return max(self.errors.values()) if self.errors else None


@dataclass(frozen=True)
class Result:
    """One shape: the routing's imbalance as busiest rank by mean rank, the floor, and the entries, ours first."""

    shape: Shape
    backend: str  # ours: "megakernel" or "reference"
    reference: str  # type in which the errors were measured
    imbalance: float
    floor: Floor
    entries: tuple[Entry, ...]


def table(result: Result, ranks: int) -> str:
    """Times in ms, and for each direction how many times as long as ours; last the hardware's floor."""
    ours = result.entries[0].times

    def row(name: str, times: tuple[float, float, float], remark: str) -> str:
        own = (None, None, None) if ours is None else (ours.forward, ours.backward, ours.both)
        return f"{name:<{NAME_WIDTH}}" + "".join(map(_cell, times, own)) + f"   {remark}"

    lines = [
        f"{result.shape}; EP {ranks}, {result.backend} backend; busiest rank has {result.imbalance:.2f} x the mean "
        "rows",
        f"{'ms':<{NAME_WIDTH}}{'forward':>17}{'backward':>17}{'both':>17}   worst relative error, against "
        f"{result.reference}",
    ]
    for entry in result.entries:
        if entry.times is None:
            lines.append(f"{entry.name:<{NAME_WIDTH}}  not measured: {entry.note}")
        else:
            times = entry.times
            lines.append(row(entry.name, (times.forward, times.backward, times.both), f"{entry.worst_error:.1e}"))
    floor = result.floor
    products = (floor.forward, floor.backward, floor.forward + floor.backward)
    lines.append(row("products", products, "torch._grouped_mm alone, balanced, in place"))
    if floor.wire is not None:
        wire = (floor.wire, floor.wire, 2 * floor.wire)
        lines.append(row("bytes", wire, f"between ranks, at {floor.wire_gb_per_s:.0f} GB/s measured"))
    return "\n".join(lines)


def _cell(milliseconds: float, ours: float | None) -> str:
    ratio = f"({milliseconds / ours:.2f}x)" if ours else ""
    return f"{milliseconds:>9.3f}{ratio:>8}"


def record(results: list[Result], ranks: int, settings: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    """Everything that is needed to repeat the run and to compare it: JSON-serialisable."""
    return {
        "command": shlex.join(["mok-megatron", *sys.argv[1:]]),
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "ranks": ranks,
        "hardware": hardware(device),
        "versions": {"python": platform.python_version(), **{name: versions.installed(name) for name in DISTRIBUTIONS}},
        "settings": dict(settings),
        "units": "milliseconds; median over iterations of the slowest rank",
        "results": [
            {
                "shape": asdict(result.shape),
                "backend": result.backend,
                "reference": result.reference,
                "imbalance": result.imbalance,
                "floor": asdict(result.floor),
                "implementations": [asdict(entry) for entry in result.entries],
            }
            for result in results
        ],
    }


def commit() -> str | None:
    """The checkout's commit, with "-dirty" where files differ from it; None outside a checkout."""
    try:
        done = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=40"],
            cwd=PACKAGE.parent,
            capture_output=True,
            text=True,
            timeout=30,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def hardware(device: torch.device) -> dict[str, Any]:
    """The device of rank 0, and what it sits in."""
    if device.type != "cuda":
        return {"device": platform.processor() or platform.machine(), "cores": os.cpu_count()}
    properties = torch.cuda.get_device_properties(device)
    return {
        "device": properties.name,
        "sms": properties.multi_processor_count,
        "memory_gib": round(properties.total_memory / 2**30, 1),
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        "driver": _driver(),
    }


def _driver() -> str | None:
    from mok_megatron.doctor.nvml import find_driver

    driver = find_driver()
    return None if isinstance(driver, str) else driver.version


def write(path: Path, content: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n")
