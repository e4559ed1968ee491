"""The console command ``mok-megatron``. Each subcommand lives in its own package and is imported when it is
used.

A subcommand's module has ``HELP`` (one line), ``add_arguments(parser)`` and ``run(args) -> int``, the exit
status.
"""

import argparse
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

# Subcommand -> (module, one line of help): the help is here so that `mok-megatron --help` imports none of
# them.
COMMANDS = {
    "build": ("mok_megatron.build.command", "compile the kernels ahead of time"),
    "bench": ("mok_megatron.bench.command", "measure one MoE layer against other implementations"),
    "doctor": (
        "mok_megatron.doctor.command",
        "check whether this machine can run the plugin, and what to do if not",
    ),
    "selftest": (
        "mok_megatron.selftest.command",
        "check that the layer computes what it should on this machine",
    ),
    "plan": (
        "mok_megatron.plan.command",
        "parallel sizes, placement, memory and time for a model and cluster",
    ),
    "simulate": (
        "mok_megatron.simulate.command",
        "predict the time of one MoE layer by simulating the kernel's schedule",
    ),
    "tune": ("mok_megatron.tune.command", "search the best kernel settings for a model and GPU"),
}


def available() -> dict[str, tuple[str, str]]:
    """The subcommands that this version ships."""
    root = Path(__file__).parents[1]  # looked up as files: find_spec would import the parent packages
    return {name: entry for name, entry in COMMANDS.items() if (root / _file(entry[0])).is_file()}


def _file(module: str) -> str:
    return module.replace(".", "/") + ".py"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs ``argv`` (default: the process's arguments) and gives the exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    commands = available()
    parser = argparse.ArgumentParser(
        prog="mok-megatron",
        description="Mixture-of-Experts layers of Megatron Core as one persistent kernel.",
    )
    parser.add_argument("--version", action="store_true", help="print the version and exit")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND")
    chosen = next((word for word in arguments if word in commands), None)
    loaded: ModuleType | None = None
    for name, (path, summary) in commands.items():
        subparser = subparsers.add_parser(name, help=summary)
        if name == chosen:
            loaded = importlib.import_module(path)
            loaded.add_arguments(subparser)
    args = parser.parse_args(arguments)
    if args.version:
        from mok_megatron import versions

        print(f"mok-megatron {versions.installed('mok-megatron') or '(not installed)'}")
        return 0
    if loaded is None:
        parser.print_help()
        return 2
    return int(loaded.run(args))


if __name__ == "__main__":
    sys.exit(main())
