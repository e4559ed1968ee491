"""``mok-megatron doctor``: the checks of this machine, one line each."""

import argparse
import os
import shutil
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mok_megatron.doctor.facts import Facts
    from mok_megatron.doctor.report import Check

HELP = "check whether this machine can run the plugin, and what to do if not"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Looks at Python, the packages, the CUDA toolkit, the driver, the GPUs and the NVLink between them, and says "
        "of each: ok, warning or failure, with the remedy. Exit status: 0 ok, 1 warnings, 2 failures."
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of lines")
    parser.add_argument("--quick", action="store_true", help="leave out the memory round trip between the GPUs")


def run(args: argparse.Namespace) -> int:
    from mok_megatron.doctor import compiler, facts, gpu, report, software

    if sys.stderr.isatty():
        print("looking at this machine; takes up to a minute ...", file=sys.stderr)
    found = facts.gather(quick=args.quick)
    checks = [*software.checks(found), *compiler.checks(found), *gpu.checks(found)]
    verdict = verdict_of(checks, found)
    if args.json:
        print(report.as_json(checks, verdict))
    else:
        colour = sys.stdout.isatty() and "NO_COLOR" not in os.environ
        print(report.as_text(checks, verdict, colour, max(60, min(120, shutil.get_terminal_size((110, 24)).columns))))
    return int(report.worst(checks))


def verdict_of(checks: "Sequence[Check]", found: "Facts") -> str:
    """The answer in one sentence: which backend works here."""
    from mok_megatron.doctor import compiler
    from mok_megatron.doctor.report import Status

    failed = [check.name for check in checks if check.status is Status.FAILURE]
    if failed:
        return f"Not ready: {', '.join(failed)}."
    if compiler.needed_architectures(found):
        return "Ready: this machine has GPUs and kernels for them."
    return "Ready for the reference backend on the CPU; the megakernel needs a GPU that has a kernel."
