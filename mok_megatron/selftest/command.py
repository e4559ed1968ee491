"""``mok-megatron selftest``: runs the checks in order and prints a table."""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mok_megatron.selftest.checks import Check, Run

HELP = "check that the layer computes what it should on this machine"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Runs small layers and holds their results against float64, against themselves from run to run, and against "
        "other numbers of ranks. Exit status: 0 all hold, 1 some do not, 2 nothing could be run."
    )
    parser.add_argument(
        "--gpu",
        action="store_true",
        help="the megakernel on one GPU, several ranks included (they share it); default: the reference on the CPU",
    )
    parser.add_argument("--only", metavar="TEXT", help="only the checks whose name contains TEXT")
    parser.add_argument("--list", action="store_true", help="print the checks and run none")
    parser.add_argument("--json", metavar="FILE", help="write the results to FILE as well")


def run(args: argparse.Namespace) -> int:
    from mok_megatron.build import BuildError
    from mok_megatron.errors import MokError
    from mok_megatron.selftest import checks
    from mok_megatron.selftest.problem import reference

    try:
        subject = describe_gpu() if args.gpu else "reference backend on the CPU, bf16"
    except (BuildError, MokError, RuntimeError) as error:
        print(f"mok-megatron selftest: {error}", file=sys.stderr)
        return 2
    layer: Run = checks.kernel if args.gpu else reference
    listed = checks.kernel_checks() if args.gpu else checks.reference_checks()
    chosen = [check for check in listed if args.only is None or args.only in check.name]
    if not chosen:
        names = ", ".join(check.name for check in listed)
        print(f"mok-megatron selftest: no check is called '{args.only}'; there are {names}", file=sys.stderr)
        return 2
    if args.list:
        for check in chosen:
            print(f"{check.name:28} {check.what}")
        return 0
    print(subject)
    results = run_checks(chosen, layer)
    failed = [r["check"] for r in results if r["status"] != "ok"]
    print(
        f"{len(results) - len(failed)} of {len(chosen)} checks hold"
        + (f"; look at '{failed[0]}' first" if failed else "")
    )
    if args.json:
        with open(args.json, "w") as file:
            json.dump({"subject": subject, "checks": results}, file, indent=1)
    return 1 if failed else 0


def describe_gpu() -> str:
    """The GPU, its architecture and the library that will run; builds it if need be.

    Raises:
        BuildError: no GPU, no kernel for it, or no library.
        MokBackendError: the library and this package differ.
    """
    import torch

    from mok_megatron.build.library import local_architecture
    from mok_megatron.megakernel import binding

    arch = local_architecture()
    binding.library()
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return (
        f"megakernel on {properties.name}, {properties.multi_processor_count} SMs, compute capability "
        f"{properties.major}.{properties.minor}, compiled for sm_{arch.name}"
    )


def run_checks(chosen: list[Check], layer: Run) -> list[dict[str, object]]:
    """Runs them in order, a line each; ends early where the GPU cannot go on."""
    from mok_megatron.errors import MokError

    results: list[dict[str, object]] = []
    for check in chosen:
        begin = time.monotonic()
        status = "ok"
        try:
            found = check.run(layer)
        except MokError as error:
            status, found = "FAIL", f"{type(error).__name__}: {error}"
        except RuntimeError as error:  # CUDA's errors, after which the process has no device any more
            status, found = "ERROR", str(error).splitlines()[0]
        seconds = time.monotonic() - begin
        results.append({"check": check.name, "status": status, "found": found, "seconds": round(seconds, 2)})
        print(f"{status:5}  {check.name:27} {seconds:5.1f} s  {found}", flush=True)
        if status == "ERROR":
            print("the rest is left out; run one check in a new process with --only")
            break
    return results
