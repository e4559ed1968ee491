"""``python -m mok_megatron.training.quickstart``: train with mok and with alltoall, and show that they agree.

Trains a small DeepSeek-V3-shaped model under both dispatchers from the same weights on the same text, saves a
checkpoint in the middle, continues from each checkpoint under both dispatchers, and reports. On two GPUs if the
machine has them, else on two CPU processes.
"""

from __future__ import annotations

import argparse
import platform
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from mok_megatron import versions
from mok_megatron.errors import MokError, Problems
from mok_megatron.training import report
from mok_megatron.training.launch import quiet, run_ranks

if TYPE_CHECKING:
    from mok_megatron.training.comparison import Plan


class QuickstartError(MokError):
    """The quick start cannot run as asked."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the quick start; returns the exit status: 0, 1 where a difference is too large, 2 on an error."""
    args = _parser().parse_args(argv)
    try:
        summary = run(args)
    except MokError as error:
        print(f"quickstart: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("quickstart: interrupted; all ranks were ended", file=sys.stderr)
        return 130
    return 0 if summary["passed"] else 1


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Train, resume, report; returns the summary.

    Raises:
        MokError: the machine or the arguments do not fit, or a rank failed.
    """
    quiet()
    from mok_megatron.training import comparison  # imports Megatron: late, so that --help is quick and it is quiet

    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    ranks = args.ranks or (2 if gpus != 1 else 1)
    dtype = args.dtype or ("bf16" if gpus else "fp32")
    plan = comparison.Plan(
        folder=args.out.resolve(),
        dtype=dtype,
        steps=args.steps,
        resume_steps=min(5, args.steps - args.steps // 2) if args.resume_steps is None else args.resume_steps,
        seed=args.seed,
        backend=args.mok_backend,
    )
    _check(plan, ranks, gpus)
    _make_folder(plan.folder)
    tokens = comparison.write_data(plan)
    hardware = f"{ranks} x {torch.cuda.get_device_name()}" if gpus else f"{ranks} CPU processes"
    print(
        f"Megatron Core {versions.installed('megatron-core')}, torch {torch.__version__}; {hardware}, {dtype}, "
        f"expert parallel {ranks}\ntext: help topics of the standard library, {tokens:,} bytes; results: {args.out}"
    )
    start = time.perf_counter()
    run_ranks(ranks, comparison.train, plan, deadline_s=args.deadline)
    run_ranks(ranks, comparison.resume, plan, deadline_s=args.deadline)
    trained, resumed = comparison.read_result(plan, "train"), comparison.read_result(plan, "resume")
    summary = report.summarize(trained, resumed, plan.save_step, dtype)
    summary["run"] = {
        "hardware": hardware,
        "machine": platform.machine(),
        "ranks": ranks,
        "seed": plan.seed,
        "parameters": trained["parameters"],
        "total_seconds": time.perf_counter() - start,
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "megatron-core": versions.installed("megatron-core"),
        },
    }
    report.write_summary(summary, plan.folder / "summary.json")
    report.draw(summary, plan.folder / "loss.png")
    print(f"\n{report.table(summary)}\n\n{trained['parameters']:,} parameters, {summary['run']['total_seconds']:.0f} s")
    print(f"wrote {args.out / 'summary.json'} and {args.out / 'loss.png'}")
    return summary


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="quickstart", description=__doc__.split("\n\n")[1])
    parser.add_argument("--out", type=Path, default=Path("runs/quickstart"), help="folder for everything it writes")
    parser.add_argument("--steps", type=int, default=40, help="steps of each of the two runs")
    parser.add_argument("--resume-steps", type=int, help="steps to repeat from each checkpoint; default 5")
    parser.add_argument("--seed", type=int, default=1234)
    parser.add_argument("--ranks", type=int, help="processes, all in one expert-parallel group; default 2")
    parser.add_argument("--dtype", choices=sorted(report.LIMITS), help="default: fp32 on CPU, bf16 on GPUs")
    parser.add_argument("--mok-backend", default="auto", choices=("auto", "megakernel", "reference"))
    parser.add_argument("--deadline", type=float, default=1200.0, help="seconds that training or resuming may take")
    return parser


def _check(plan: Plan, ranks: int, gpus: int) -> None:
    problems = Problems()
    problems.require(plan.steps >= 2, f"--steps {plan.steps} leaves no middle for a checkpoint", "give at least 2")
    most = plan.steps - plan.save_step
    problems.require(
        1 <= plan.resume_steps <= most, f"--resume-steps {plan.resume_steps} does not fit", f"give 1 to {most}"
    )
    problems.require(
        ranks >= 1 and plan.shape.experts % ranks == 0,
        f"--ranks {ranks} does not divide the model's {plan.shape.experts} experts",
        "give 1, 2, 4 or 8",
    )
    problems.require(
        not gpus or ranks <= gpus,
        f"--ranks {ranks} is more than the {gpus} GPUs here",
        "give fewer, or hide the GPUs with CUDA_VISIBLE_DEVICES=''",
    )
    problems.raise_if_any(QuickstartError, "cannot run:")


def _make_folder(folder: Path) -> None:
    """An empty output folder: nothing of an earlier run may pass for a result of this one."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name in ("data", "checkpoints"):
            shutil.rmtree(folder / name, ignore_errors=True)
        for name in ("train.json", "resume.json", "summary.json", "loss.png"):
            (folder / name).unlink(missing_ok=True)
        (folder / "checkpoints").mkdir()
    except OSError as error:
        raise QuickstartError(f"cannot write to --out {folder}: {error}. Choose a writable folder.") from error


if __name__ == "__main__":
    sys.exit(main())
