"""What a search found: a table, the tuned file, and a record with every point."""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from mok_megatron.bench.problem import Shape
from mok_megatron.config import MokConfig
from mok_megatron.plan.report import table
from mok_megatron.tune.points import Expected, Point
from mok_megatron.tune.search import Found
from mok_megatron.tuned import Measured, Milliseconds, TunedFile, TunedSettings, TunedShape, folder_name, load

BYTES = 2


def kept_gigabytes(shape: Shape, point: Point, base: MokConfig) -> float:
    """Activations that a layer keeps for its backward, which grow with the macrobatch: rows x (H + 2I) bf16."""
    rows = point.config(base).macrobatch_rows(shape.tokens * shape.topk)
    return rows * (shape.hidden + 2 * shape.intermediate) * BYTES / 1e9


def points_table(
    shape: Shape, points: Sequence[Point], expected: dict[Point, Expected | str], found: Found | None, base: MokConfig
) -> str:
    """A line a point: what is expected of it and, if there was a search, what it took."""
    heads = ["comm SMs", "minibatch", "macrobatch", "kept GB", "expected forward", "backward"]
    if found is not None:
        heads += ["measured forward", "backward", "bits"]
    rows = []
    for point in points:
        value = expected.get(point)
        guess = [f"{value.forward:.3f}", f"{value.backward:.3f}"] if isinstance(value, Expected) else ["-", "-"]
        row: list[Any] = [
            point.comm_sms,
            point.minibatch,
            point.macrobatch or "default",
            kept_gigabytes(shape, point, base),
            *guess,
        ]
        if found is not None:
            reading = found.readings.get(point)
            if reading is None:
                row += ["-", "-", "no time left" if point in found.left_out else "not tried"]
            else:
                times = reading.times
                row += [f"{times.forward:.3f}", f"{times.backward:.3f}", "same" if reading.same else "DIFFERENT"]
        rows.append(row)
    return table(heads, rows)


def outcome(found: Found, base: MokConfig) -> str:
    """What is kept, and what it gains."""
    if found.config == base:
        return f"The default settings stay: no point is faster by more than the noise. {_pair(found.default)}"
    config = found.config
    macrobatch = config.macrobatch_size if config.macrobatch_size else "default"
    gain = (found.default.forward + found.default.backward) / (found.tuned.forward + found.tuned.backward) - 1
    return (
        f"Best: communication SMs {config.fwd_comm_sms} forward and {config.bwd_comm_sms} backward, minibatch "
        f"{config.minibatch_size}, macrobatch {macrobatch}. {_pair(found.tuned)}; defaults: {_pair(found.default)}; "
        f"{gain:.1%} faster"
    )


def _pair(times: Milliseconds) -> str:
    return f"{times.forward:.3f} ms forward, {times.backward:.3f} backward"


def tuned_file(
    shape: Shape, ep: int, gpu: str, found: Found, imbalance: float, command: str, commit: str | None, versions: Any
) -> TunedFile:
    """The content of ``configs/tuned/<gpu>/<model>-ep<EP>.yaml``."""
    config = found.config
    return TunedFile(
        gpu=gpu,
        ep=ep,
        format=config.format,
        shape=TunedShape(**dataclasses.asdict(shape)),
        settings=TunedSettings(
            config.minibatch_size, config.fwd_comm_sms, config.bwd_comm_sms, config.macrobatch_size
        ),
        measured=Measured(
            date=f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d}",
            command=command,
            commit=commit or "unknown",
            versions={name: str(version) for name, version in versions.items() if version},
            imbalance=imbalance,
            points=len(found.readings),
            default=_rounded(found.default),
            tuned=_rounded(found.tuned),
        ),
    )


def _rounded(times: Milliseconds) -> Milliseconds:
    return Milliseconds(round(times.forward, 4), round(times.backward, 4))


def write_tuned(content: TunedFile, folder: Path, name: str) -> Path:
    """Writes ``<folder>/<gpu>/<name>-ep<EP>.yaml`` (``<name>-<format>-...`` if that is not bf16), and reads it back."""
    kind = "" if content.format == "bf16" else f"-{content.format}"
    path = folder / folder_name(content.gpu) / f"{name}{kind}-ep{content.ep}.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    head = "# Written by `mok-megatron tune`; times in milliseconds. The plugin takes it by itself: docs/tools.md.\n"
    path.write_text(head + yaml.safe_dump(dataclasses.asdict(content), sort_keys=False, width=1000))
    assert load(path) == content
    return path


def record(
    shape: Shape, points: Sequence[Point], expected: dict[Point, Expected | str], found: Found | None
) -> dict[str, Any]:
    """Every point, for JSON."""
    lines = []
    for point in points:
        value, reading = expected.get(point), found.readings.get(point) if found else None
        lines.append(
            {
                **dataclasses.asdict(point),
                "expected": dataclasses.asdict(value) if isinstance(value, Expected) else value,
                "measured": dataclasses.asdict(reading.times) if reading else None,
                "same_bits": reading.same if reading else None,
            }
        )
    return {"shape": dataclasses.asdict(shape), "predicted": found is None, "unit": "ms", "points": lines}
