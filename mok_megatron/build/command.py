"""``mok-megatron build``: compiles the kernels ahead of time."""

import argparse
import sys

HELP = "compile the kernels ahead of time"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Compiles the kernels for the named GPU architectures into the cache ($MOK_CACHE_DIR, or "
        "~/.cache/mok_megatron). "
        "Needs nvcc and no GPU. What the cache already has is not compiled again; first use compiles what is "
        "missing."
    )
    parser.add_argument(
        "--arch",
        help="architectures, separated by commas: 90a (H100, H200), 100a (B200, GB200), 103a (B300, GB300); "
        "default: that of the GPU in this machine",
    )
    parser.add_argument("--jobs", type=int, help="compilations at once; default: the cores, fewer if memory is short")
    parser.add_argument("--force", action="store_true", help="compile again what the cache has")
    parser.add_argument(
        "--verbose",
        action="store_true",
        help="show registers, spills and shared memory of each kernel; implies --force",
    )


def run(args: argparse.Namespace) -> int:
    from mok_megatron import build

    if args.jobs is not None and args.jobs < 1:
        print(f"mok-megatron build: --jobs {args.jobs} must be at least 1", file=sys.stderr)
        return 2
    try:
        if args.arch is None:
            from mok_megatron.build.library import local_architecture

            archs = [local_architecture().name]
        else:
            archs = [name for name in args.arch.split(",") if name.strip()]
            if not archs:
                raise build.BuildError(
                    f"--arch {args.arch!r} names no architecture; give one or several, such as 90a,100a"
                )
        libraries = build.build(
            archs,
            force=args.force or args.verbose,
            jobs=args.jobs,
            extra=("-Xptxas", "-v") if args.verbose else (),
        )
    except build.BuildError as error:
        print(f"mok-megatron build: {error}", file=sys.stderr)
        return 1
    for name, path in libraries.items():
        print(f"sm_{name}  {path.stat().st_size / 2**20:.1f} MiB  {path}")
    return 0
