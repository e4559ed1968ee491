"""Rates of the kernel's parts from what was recorded: traces (`mok-megatron bench --trace`) and a record (`--json`).

Everything but one rate is a mean over traced tiles; docs/nvl72.md says what each stands on. The record's layer times
enter in one place: what they exceed the two kernels by.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from mok_megatron.config import MokConfig
from mok_megatron.configs import ClusterConfig, load_cluster
from mok_megatron.errors import MokConfigError
from mok_megatron.simulate.engine import Outcome
from mok_megatron.simulate.layer import (
    LayerShape,
    expert_rows,
    launch_of,
    run_launch,
    sort_and_copy,
    sum_bytes,
)
from mok_megatron.simulate.order import DHIDDEN, DW1, DW2, DX, FC1, KINDS, STAGE_K
from mok_megatron.simulate.rates import MEMORY_BYTES, MeasuredRates, kernel_rates

FINISH = "sum over k"
DIRECTIONS = ("forward", "backward")
PULL_RATES = (1.0, 1.25, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 8.0, 10.0, 15.0, 20.0, 30.0)
"""GB/s a CTA that are tried."""
HEAD = "# Written by `mok-megatron simulate --fit`; docs/nvl72.md says how. Microseconds, and GB/s.\n"


@dataclass(frozen=True)
class Launch:
    """One direction on one rank as traced. Times in microseconds: {kind of tile: [tiles]}."""

    shape: LayerShape
    ranks: int
    rank: int
    direction: str
    ctas: int
    wait: dict[str, np.ndarray]
    multiply: dict[str, np.ndarray]
    store: dict[str, np.ndarray]
    span: float
    """From the first tile's wait to the last store."""
    in_a_row: float
    """What the launch takes in a row of calls, as in training: the GPU is warmer then, and its clock lower."""
    prepare: float
    """The prepare kernel before it, likewise."""

    @property
    def busy(self) -> float:
        """Products of a CTA, mean."""
        return sum(float(times.sum()) for kind, times in self.multiply.items() if kind != FINISH) / self.ctas


def read_trace(path: Path) -> list[Launch]:
    """The launches in a ``trace.json`` (or .gz). MokConfigError if it is none, or was traced with other settings."""
    try:
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        document = json.loads(content)
        about, events = document["otherData"], document["traceEvents"]
        shape, ranks, settings = LayerShape(**about["shape"]), int(about["ranks"]), about["settings"]
        kernels = {d: (float(of["megakernel"]), float(of["prepare"])) for d, of in about["kernels_us"].items()}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise MokConfigError(f"{path} is not a trace of `mok-megatron bench --trace`: {error!r}") from error
    default = MokConfig()
    changed = [name for name, value in settings.items() if value != getattr(default, name) and name != "timeout_s"]
    if changed:
        raise MokConfigError(f"{path} was traced with {', '.join(changed)} set; trace the default settings")
    names = {event["pid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
    tiles: dict[int, list[dict[str, Any]]] = {pid: [] for pid in names}
    for event in events:
        if event["ph"] == "X":
            tiles[event["pid"]].append(event)
    return [_launch(tiles[pid], name, shape, ranks, kernels) for pid, name in names.items()]


def _launch(
    events: list[dict[str, Any]], name: str, shape: LayerShape, ranks: int, kernels: dict[str, tuple[float, float]]
) -> Launch:
    _, rank, direction = name.split()
    parts: tuple[dict[str, list[float]], ...] = ({}, {}, {})
    for event in events:
        label = event["name"]
        at = 0 if label.startswith("wait for ") else 2 if label.startswith("store ") else 1
        kind = label.removeprefix("wait for ").removeprefix("store ")
        parts[at].setdefault(kind, []).append(event["dur"])
    wait, multiply, store = ({kind: np.array(times) for kind, times in part.items()} for part in parts)
    start = min(event["ts"] for event in events)
    span = max(event["ts"] + event["dur"] for event in events) - start
    ctas = len({event["tid"] for event in events})
    return Launch(shape, ranks, int(rank), direction, ctas, wait, multiply, store, span, *kernels[direction])


def read_times(path: Path) -> dict[LayerShape, dict[str, float]]:
    """Milliseconds of mok in a bench record: {shape: {"forward", "backward"}}."""
    try:
        return {
            LayerShape(**result["shape"]): next(e["times"] for e in result["implementations"] if e["name"] == "mok")
            for result in json.loads(path.read_text())["results"]
        }
    except (OSError, ValueError, KeyError, TypeError, StopIteration) as error:
        raise MokConfigError(f"{path} is not a record of `mok-megatron bench --json`: {error!r}") from error


def stages(kind: str, shape: LayerShape, ranks: int) -> float:
    """Stages along K of a tile, for weight gradients their mean over the experts."""
    if kind in (FC1, DHIDDEN):
        return shape.hidden / STAGE_K
    if kind in (DW1, DW2):
        return float(np.ceil(expert_rows(shape, ranks) / STAGE_K).mean())
    return (2 if kind == DX else 1) * shape.intermediate / STAGE_K


def fit(record: Path, traces: Sequence[Path], cluster_name: str) -> MeasuredRates:
    """Rates from a record and traces of the same kernel and machine.

    Raises:
        MokConfigError: a file that is not what it should be, or that lacks a shape or a kind of tile.
    """
    cluster, times = load_cluster(cluster_name), read_times(record)
    launches = [launch for path in traces for launch in read_trace(path)]
    shapes = {launch.shape for launch in launches}
    if any(shape.shared for shape in shapes):
        raise MokConfigError("the traces have a shared expert, whose tiles are of other depths; trace without")
    if len(shapes) < 2:
        raise MokConfigError("traces of at least two shapes are needed, to tell the start of a tile from its stages")
    for shape in shapes - set(times):
        raise MokConfigError(f"{record} has no times of the traced shape {shape}")
    epilogue = {kind: min(float(each.store[kind].mean()) for each in launches if kind in each.store) for kind in KINDS}
    gradients = [launch for launch in launches if launch.direction == "backward"]
    finish = [sum_bytes(each.shape) / float(each.multiply[FINISH].mean()) for each in launches]
    stage, start = _products(launches, {})
    rates = MeasuredRates(
        cluster=cluster_name,
        stage_us=stage,
        tile_start_us=start,
        epilogue_us=epilogue,
        main_grad_gb_per_s=max(map(_main_grad, gradients)) / 1e3,
        cta_pull_gb_per_s=PULL_RATES[-1],
        sum_gb_per_s=float(np.mean(finish)) / 1e3,
        prepare_us=dict.fromkeys(DIRECTIONS, 0.0),
        between_us=0.0,
        sources=_sources(record, traces),
    )
    rates = replace(rates, cta_pull_gb_per_s=_pull_rate(rates, launches, cluster))
    heads = {_key(launch): _simulated(launch, rates, cluster).first_tile for launch in launches}
    stage, start = _products(launches, heads)
    prepare = {direction: _prepare(direction, launches, cluster, rates) for direction in DIRECTIONS}
    rest = [1e3 * times[each.shape][each.direction] - each.in_a_row - each.prepare for each in launches]
    between = max(0.0, float(np.median(rest)))
    return _rounded(replace(rates, stage_us=stage, tile_start_us=start, prepare_us=prepare, between_us=between))


Key = tuple[LayerShape, int, str]


def _key(launch: Launch) -> Key:
    return (launch.shape, launch.ranks, launch.direction)


def _simulated(launch: Launch, rates: MeasuredRates, cluster: ClusterConfig) -> Outcome:
    forward = launch.direction == "forward"
    simulated, comm_sms = launch_of(launch.shape, cluster, launch.ranks, MokConfig(), forward)
    return run_launch(simulated, kernel_rates(cluster, launch.ranks, measured=rates), forward, comm_sms)


def _per_launch(launches: list[Launch]) -> list[list[Launch]]:
    """The ranks of each launch: they start and end together."""
    found: dict[Key, list[Launch]] = {}
    for launch in launches:
        found.setdefault(_key(launch), []).append(launch)
    return list(found.values())


def _products(launches: list[Launch], heads: dict[Key, float]) -> tuple[dict[str, float], float]:
    """us a stage by kind, and us of a tile's start: least squares of the launches' times by kind, each relative to all
    products of its launch.

    Of each launch the rank counts whose products take longest: it sets the time of the layer. Its products are taken to
    be longer in a row of calls by as much as the launch, whose trace begins `heads` us late, with the first tile.
    """
    rows, right, names = [], [], list(KINDS)
    for ranks in _per_launch(launches):
        launch = max(ranks, key=lambda each: each.busy)
        span = min(each.span for each in ranks) + heads.get(_key(launch), 0.0)
        longer = 1 + (launch.in_a_row - span) / launch.busy
        for kind in names:
            if kind in launch.multiply:
                weight = len(launch.multiply[kind]) / launch.ctas / launch.busy
                row = [0.0] * (len(names) + 1)
                row[names.index(kind)] = weight * stages(kind, launch.shape, launch.ranks)
                row[-1] = weight
                rows.append(row)
                right.append(weight * longer * float(launch.multiply[kind].mean()))
    table = np.array(rows)
    missing = [name for name, column in zip(names, table.T, strict=False) if not column.any()]
    if missing:
        raise MokConfigError(f"the traces have no tiles of {', '.join(missing)}: forward and backward are needed")
    solution, *_ = np.linalg.lstsq(table, np.array(right), rcond=None)
    return {name: float(value) for name, value in zip(names, solution, strict=False)}, float(solution[-1])


def _main_grad(launch: Launch) -> float:
    """Bytes a microsecond of main_grad while weight gradients were computed."""
    kinds = [kind for kind in (DW1, DW2) if kind in launch.store]
    tiles = sum(len(launch.store[kind]) for kind in kinds)
    parts = (launch.wait, launch.multiply, launch.store)
    length = sum(float(part[kind].sum()) for part in parts for kind in kinds) / launch.ctas
    return tiles * MEMORY_BYTES[DW1] / length


def _waits(launch: Launch) -> float:
    """us a CTA that tiles waited for rows, but for a CTA's first: before that the kernel pulls, and records nothing."""
    kind = FC1 if launch.direction == "forward" else DHIDDEN
    return float(launch.wait[kind].sum()) / launch.ctas


def _pull_rate(rates: MeasuredRates, launches: list[Launch], cluster: ClusterConfig) -> float:
    """The rate of PULL_RATES with the least sum over launches of |simulated - traced| waits; of equal rates the least.

    Traced is the rank that waits least: the other waits for it too.
    """
    traced = [(ranks[0], min(map(_waits, ranks))) for ranks in _per_launch(launches)]

    def distance(rate: float) -> float:
        tried = replace(rates, cta_pull_gb_per_s=rate)
        return sum(abs(_simulated(launch, tried, cluster).row_waits - waited) for launch, waited in traced)

    return min(PULL_RATES, key=distance)


def _prepare(direction: str, launches: list[Launch], cluster: ClusterConfig, rates: MeasuredRates) -> float:
    """Mean over shapes of the prepare kernel's time less what copy and sort take by the model; at least 0."""
    rest = []
    for launch, *_ in _per_launch([each for each in launches if each.direction == direction]):
        scaled = kernel_rates(cluster, launch.ranks, measured=rates)
        rest.append(launch.prepare - sort_and_copy(launch.shape, launch.ranks, scaled, direction == "forward"))
    return max(0.0, float(np.mean(rest)))


def _sources(record: Path, traces: Sequence[Path]) -> dict[str, str]:
    about = json.loads(record.read_text())
    return {
        "record": f"{record.name}: {about.get('time')}, commit {about.get('commit')}",
        "traces": ", ".join(path.name if path.name != "trace.json" else path.parent.name for path in traces),
        "hardware": f"{about.get('ranks')} x {about.get('hardware', {}).get('device')}",
    }


def _rounded(rates: MeasuredRates) -> MeasuredRates:
    def short(value: Any) -> Any:
        if isinstance(value, float):
            return float(f"{value:.4g}")
        if isinstance(value, dict):
            return {key: short(inner) for key, inner in value.items()}
        return value

    return MeasuredRates(**{name: short(value) for name, value in rates.__dict__.items()})


def write_rates(rates: MeasuredRates, path: Path) -> None:
    """Writes the file that `rates.measured_rates` reads."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(HEAD + yaml.safe_dump(dict(rates.__dict__), sort_keys=False, width=1000))
