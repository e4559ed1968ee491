"""``python -m mok_megatron.training.precision``: the loss of the quick start's model in FP8 beside that in bf16.

Every run starts from the same weights and sees the same text. Routing is a discrete choice, so any two runs drift apart
sooner or later (see `comparison.Plan`); how far two that are both bf16 do, the control shows: Megatron's alltoall
dispatcher.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from mok_megatron import versions
from mok_megatron.errors import MokError
from mok_megatron.training.launch import quiet, run_ranks

if TYPE_CHECKING:
    from mok_megatron.training.comparison import Plan

BASE, CONTROL = "bf16", "bf16, alltoall"
RUNS: dict[str, tuple[str, dict[str, str]]] = {
    BASE: ("mok", {}),
    CONTROL: ("alltoall", {}),
    "mxfp8": ("mok", {"format": "mxfp8"}),
    "mxfp8, wgrad fp8": ("mok", {"format": "mxfp8", "fp8_wgrad": "fp8"}),
    "mxfp8 hybrid, wgrad fp8": ("mok", {"format": "mxfp8", "fp8_wgrad": "fp8", "fp8_gradients": "e5m2"}),
    "blockwise": ("mok", {"format": "blockwise"}),
    "blockwise, wgrad fp8": ("mok", {"format": "blockwise", "fp8_wgrad": "fp8"}),
    "blockwise hybrid": ("mok", {"format": "blockwise", "fp8_gradients": "e5m2"}),
}
"""Name -> dispatcher and fields of TrainSettings."""

WINDOW = 20
"""Steps whose mean loss is compared: single steps jump by tenths in any two runs."""
TAIL = 50
"""Last steps whose mean loss is compared."""


def main(argv: Sequence[str] | None = None) -> int:
    """Train, write the record, print the table; returns the exit status."""
    parser = argparse.ArgumentParser(prog="precision", description=__doc__.split("\n\n")[1])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--out", type=Path, default=Path("runs/precision.json"), help="the record: every loss")
    parser.add_argument("--deadline", type=float, default=7200.0, help="seconds that all of it may take")
    args = parser.parse_args(argv)
    if args.steps < TAIL:
        parser.error(f"--steps {args.steps} is too short to compare the last {TAIL}")
    quiet()
    from mok_megatron.training import comparison

    args.out.parent.mkdir(parents=True, exist_ok=True)
    try:
        with tempfile.TemporaryDirectory(prefix="mok-precision-") as folder:
            plan = comparison.Plan(folder=Path(folder), dtype="bf16", steps=args.steps, backend="reference")
            comparison.write_data(plan)
            run_ranks(1, train, plan, args.seeds, args.out, deadline_s=args.deadline)
    except MokError as error:
        print(f"precision: {error}", file=sys.stderr)
        return 2
    print(table(json.loads(args.out.read_text())))
    return 0


def train(rank: int, plan: Plan, seeds: list[int], out: Path) -> None:
    """On one rank: every run of every seed; the record is written after each."""
    from mok_megatron.training import comparison

    record: dict[str, Any] = {
        "command": shlex.join(
            ["python", "-m", "mok_megatron.training.precision", "--steps", str(plan.steps), "--seeds", *map(str, seeds)]
        ),
        "versions": {name: versions.installed(name) for name in ("torch", "megatron-core")},
        "device": "CPU" if not torch.cuda.is_available() else torch.cuda.get_device_name(),
        "unit": "language-model loss of each step, nats a token",
        "loss": {name: {} for name in RUNS},
    }
    for seed in seeds:
        for name, (dispatcher, fields) in RUNS.items():
            settings = replace(plan.settings, **fields)  # type: ignore[arg-type]
            trainer = comparison.make_trainer(replace(plan, seed=seed, settings=settings), dispatcher)
            record["loss"][name][str(seed)] = [round(trainer.step(), 4) for _ in range(plan.steps)]
            record["tokens_per_step"] = trainer.tokens_per_step
            out.write_text(json.dumps(record) + "\n")
            print(f"seed {seed}, {name}: {record['loss'][name][str(seed)][-1]}", flush=True)


def differences(losses: list[float], base: list[float]) -> tuple[float, float]:
    """(largest difference between means of WINDOW steps, difference of the means of the last TAIL steps), in nats."""
    pairs = [
        (statistics.fmean(losses[i : i + WINDOW]), statistics.fmean(base[i : i + WINDOW]))
        for i in range(0, len(base) - WINDOW + 1, WINDOW)
    ]
    return max(abs(a - b) for a, b in pairs), statistics.fmean(losses[-TAIL:]) - statistics.fmean(base[-TAIL:])


def table(record: dict[str, Any]) -> str:
    """A line a run: both `differences` to bf16, for each seed."""
    base = record["loss"][BASE]
    seeds = list(base)
    lines = [f"{'':26}{f'largest, means of {WINDOW} steps':>30}{f'mean of the last {TAIL} steps':>30}"]
    for name, by_seed in record["loss"].items():
        if name == BASE:
            continue
        found = [differences(by_seed[seed], base[seed]) for seed in seeds]
        largest, tail = ("  ".join(f"{value[i]:{'' if i == 0 else '+'}.4f}" for value in found) for i in (0, 1))
        lines.append(f"{name:26}{largest:>30}{tail:>30}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
