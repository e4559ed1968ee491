"""``mok-megatron bench``: one MoE layer against other implementations, on the ranks that the launch gives.

mok-megatron bench --shape 4096,7168,2048,8,4                       one rank, EP 1
torchrun --nproc-per-node 2 -m mok_megatron.cli bench --suite       EP 2
"""

from __future__ import annotations

import argparse
import datetime
import os
import sys
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

    from mok_megatron.bench import layers
    from mok_megatron.bench.problem import Problem, Shape
    from mok_megatron.bench.report import Entry, Result
    from mok_megatron.config import MokConfig

HELP = "measure one MoE layer against other implementations"
FORMATS = ("bf16", "blockwise", "mxfp8")
BASELINES = ("nccl", "alltoall", "hybridep", "deepep", "alltoall-blockwise", "hybridep-blockwise")
BF16_BASELINES = BASELINES[:4]
# T, H, I, E, K: large experts, many routes, more and smaller experts, many small experts.
SUITE = ("4096,7168,2048,8,4", "2048,7168,2048,8,8", "8192,4096,1536,16,8", "4096,2048,768,128,8")
START_TIMEOUT = datetime.timedelta(minutes=10)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from mok_megatron.config import add_flags

    parser.description = (
        "Times forward and backward of one MoE layer, from the routing on, against other implementations with the same "
        "weights and routing, after checking each against the reference backend in float64. EP is the number of ranks "
        "of the "
        "launch: run it by itself for EP 1, or by torchrun -m mok_megatron.cli bench. Times are medians over "
        "iterations "
        "of the slowest rank's, by CUDA events; (2.00x) means twice as long as ours."
    )
    add_shape_arguments(parser)
    how = parser.add_argument_group("how to measure")
    how.add_argument(
        "--baselines",
        default=",".join(BF16_BASELINES),
        help=f"from {','.join(BASELINES)} (default: those in bf16); 'none' for none",
    )
    how.add_argument(
        "--formats",
        default=",".join(FORMATS),
        help=f"of ours, from {','.join(FORMATS)} (default: all); the first is what the table compares with",
    )
    how.add_argument("--iterations", type=int, default=20)
    how.add_argument("--dtype", choices=("bf16", "fp32"), help="default: bf16 on GPUs, fp32 without")
    how.add_argument(
        "--trace",
        type=Path,
        metavar="FOLDER",
        help="draw when each SM of rank 0 worked on which tile (PNG, Chrome trace)",
    )
    how.add_argument("--json", type=Path, help="where to write the record (default: runs/bench/<time>.json)")
    add_flags(parser)


def add_shape_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags that `shapes_of` reads, and those of the routing."""
    what = parser.add_argument_group("what to measure")
    what.add_argument(
        "--shape",
        action="append",
        metavar="T,H,I,E,K[,SHARED]",
        help="tokens a rank, hidden, intermediate, experts, top-k; again for more",
    )
    what.add_argument("--suite", action="store_true", help="the four shapes of docs/results")
    what.add_argument("--model", help="a model of configs/models, or a path; the flags below override its sizes")
    for name, text in (
        ("tokens", "tokens a rank (default 4096)"),
        ("hidden", "hidden size"),
        ("intermediate", "intermediate size of an expert"),
        ("experts", "experts in all"),
        ("topk", "experts a token"),
        ("shared", "intermediate size of the shared expert; 0: none"),
    ):
        what.add_argument(f"--{name}", type=int, help=text)
    what.add_argument(
        "--imbalance", type=float, default=0.0, help="skew of the routing: 0 random (default), 1 strong, 2 extreme"
    )
    what.add_argument("--seed", type=int, default=1)


def run(args: argparse.Namespace) -> int:
    from mok_megatron.errors import MokError

    try:
        return _run(args)
    except MokError as error:
        print(f"mok-megatron bench: {error}", file=sys.stderr)
        return 1


def _run(args: argparse.Namespace) -> int:
    import torch
    import torch.distributed as dist

    from mok_megatron.bench import report
    from mok_megatron.config import config_from_args

    config = config_from_args(args)
    shapes = shapes_of(args)
    names, formats = baseline_names(args.baselines), format_names(args.formats)
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    for shape in shapes:
        shape.check(ranks)
    device, group = start(config, tracing=args.trace is not None)
    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[args.dtype or ("bf16" if device.type == "cuda" else "fp32")]
    first = dist.get_rank() == 0
    configs = [replace(config, format=name) for name in formats]
    results: list[Result] = []
    try:
        for shape in shapes:
            results.append(_measure_shape(shape, names, args, configs, device, dtype, group))
            if first:
                print(report.table(results[-1], ranks) + "\n", flush=True)
        if first:
            settings = {key: str(value) if isinstance(value, Path) else value for key, value in vars(args).items()}
            path = args.json or Path("runs/bench", f"{datetime.datetime.now(datetime.UTC):%Y%m%d-%H%M%S}.json")
            report.write(path, report.record(results, ranks, settings | {"dtype": str(dtype)}, device))
            print(f"record: {path}")
    finally:
        dist.destroy_process_group()
    # What cannot run here is a remark; wrong results of ours are a failure, in any format.
    ours = [entry for result in results for entry in result.entries[: len(formats)]]
    wrong = any(entry.errors and not entry.times for entry in ours)
    return 0 if all(result.entries[0].times for result in results) and not wrong else 1


def shapes_of(args: argparse.Namespace) -> list[Shape]:
    """The shapes that the flags name; MokConfigError when they name none or contradict each other."""
    from mok_megatron.bench.problem import Shape, parse_shape
    from mok_megatron.configs import load_model
    from mok_megatron.errors import MokConfigError

    sizes = {"tokens": 4096, "shared": 0}
    if args.model:
        moe = load_model(args.model).moe
        sizes |= {
            "hidden": moe.hidden_size,
            "intermediate": moe.moe_ffn_hidden_size,
            "experts": moe.num_experts,
            "topk": moe.topk,
            "shared": moe.shared_expert_intermediate_size,
        }
    names = ("tokens", "hidden", "intermediate", "experts", "topk", "shared")
    given = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    listed = [parse_shape(text) for text in (*(args.shape or ()), *(SUITE if args.suite else ()))]
    if listed and (args.model or given):
        flags = ", ".join(f"--{name}" for name in (*(["model"] if args.model else []), *given))
        raise MokConfigError(f"--shape and --suite say all sizes; leave out {flags}, or leave out --shape and --suite")
    if listed:
        return listed
    sizes |= given
    missing = [name for name in names if name not in sizes]
    if missing:
        raise MokConfigError(
            f"no shape: --{', --'.join(missing)} are missing. Give --suite, --shape T,H,I,E,K, --model NAME, or each "
            "size"
        )
    return [Shape(**sizes)]


def baseline_names(text: str) -> list[str]:
    """The baselines that ``--baselines`` names, in its order."""
    from mok_megatron.errors import MokConfigError

    names = [] if text == "none" else [name.strip() for name in text.split(",") if name.strip()]
    unknown = [name for name in names if name not in BASELINES]
    if unknown:
        raise MokConfigError(f"--baselines: {', '.join(unknown)} unknown; choose from {', '.join(BASELINES)}, or none")
    return names


def format_names(text: str) -> list[str]:
    """The formats that ``--formats`` names, in its order."""
    from mok_megatron.errors import MokConfigError

    names = [name.strip() for name in text.split(",") if name.strip()]
    unknown = [name for name in names if name not in FORMATS]
    if unknown or not names:
        raise MokConfigError(f"--formats: {', '.join(unknown) or 'none'} unknown; choose from {', '.join(FORMATS)}")
    return names


def start(config: MokConfig, tracing: bool = False) -> tuple[torch.device, dist.ProcessGroup | None]:
    """The device of this rank, and the group of all; None for one rank, which needs none. Starts torch.distributed."""
    import torch
    import torch.distributed as dist

    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    else:
        device = torch.device("cpu")
    from mok_megatron.errors import MokConfigError
    from mok_megatron.ops.backend import select_backend

    megakernel = select_backend(config, device).name == "megakernel"
    if tracing and not megakernel:
        raise MokConfigError("--trace records the tiles of the megakernel, and the backend here is the reference")
    if megakernel:
        from mok_megatron.build import load_library

        load_library()  # before the ranks wait for each other: it may compile for minutes
    backend = "nccl" if device.type == "cuda" else "gloo"
    if "WORLD_SIZE" in os.environ:
        dist.init_process_group(backend, timeout=START_TIMEOUT)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=START_TIMEOUT)
    return device, dist.group.WORLD if dist.get_world_size() > 1 else None


def _measure_shape(
    shape: Shape,
    names: list[str],
    args: argparse.Namespace,
    configs: list[MokConfig],
    device: torch.device,
    dtype: torch.dtype,
    group: dist.ProcessGroup | None,
) -> Result:
    import torch.distributed as dist

    from mok_megatron.bench import layers, measure
    from mok_megatron.bench.floor import measure_floor
    from mok_megatron.bench.problem import make_problem
    from mok_megatron.bench.report import Entry, Result
    from mok_megatron.ops.backend import backend_name

    rank, ranks = dist.get_rank(), dist.get_world_size()
    problem = make_problem(shape, rank, ranks, device, dtype, args.imbalance, args.seed)
    reference_dtype = measure.reference_dtype(problem)
    expected = measure.reference(problem, group, reference_dtype)

    def entry(name: str, build: layers.Builder) -> Entry:
        if rank == 0 and sys.stderr.isatty():
            print(f"measuring {name} ...", file=sys.stderr)
        try:
            layer = build(problem, group)
        except layers.Unavailable as reason:
            return Entry(name, note=str(reason))
        found = measure.errors(measure.run_once(layer, problem), expected, group)
        if not measure.is_correct(found, dtype, layer.is_fp8):
            wrong = ", ".join(f"{what} {error:.1e}" for what, error in found.items())
            return Entry(name, errors=found, note=f"wrong results, relative errors {wrong}")
        if args.trace and isinstance(layer, layers.MokLayer):
            _trace(layer, problem, group, args.trace)
        return Entry(name, errors=found, times=measure.measure(layer, problem, group, args.iterations))

    entries = []
    for config in configs:
        _release(device)
        name = "mok" if config.format == "bf16" else f"mok {config.format}"
        entries.append(entry(name, partial(layers.mok_layer, config=config)))
    builders = layers.baselines()
    for name in names:
        _release(device)
        entries.append(entry(name, builders[name]))
    _release(device)
    floor = measure_floor(problem, group, args.iterations)
    return Result(
        shape=shape,
        backend=backend_name(configs[0], device),
        reference=str(reference_dtype).removeprefix("torch."),
        imbalance=_imbalance(problem.topk_ids, shape.experts // ranks, ranks, group),
        floor=floor,
        entries=tuple(entries),
    )


def _trace(layer: layers.MokLayer, problem: Problem, group: dist.ProcessGroup | None, folder: Path) -> None:
    """Records one forward and backward of every rank, into a folder named after the shape."""
    import torch.distributed as dist

    from mok_megatron.bench import trace, trace_run

    rank, ranks = dist.get_rank(), dist.get_world_size()
    mine = trace_run.record(layer, problem, group, f"rank {rank}: {problem.shape}")
    kernels = trace_run.kernel_times(layer, problem, group)
    traces: list[dict[str, trace.Trace]] = [mine] * ranks
    dist.all_gather_object(traces, mine)
    if rank == 0:
        for one in (one for of_rank in traces for one in of_rank.values()):
            print(trace.text(one))
        print(trace.kernels_text(kernels))
        about = {"shape": asdict(problem.shape), "ranks": ranks, "settings": asdict(layer.config)}
        about["kernels_us"] = kernels
        name = str(problem.shape).replace(", ", "-").replace(" ", "")
        name += "" if layer.config.format == "bf16" else f"-{layer.config.format}"
        for path in trace.write(traces, folder / name, about):
            print(f"trace: {path}")


def _release(device: torch.device) -> None:
    import gc

    import torch

    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _imbalance(topk_ids: torch.Tensor, local: int, ranks: int, group: dist.ProcessGroup | None) -> float:
    """Rows of the busiest rank by the mean over ranks."""
    import torch
    import torch.distributed as dist

    rows = torch.bincount((topk_ids // local).flatten(), minlength=ranks).double()
    if group is not None:
        dist.all_reduce(rows, group=group)
    return float(rows.max() / rows.mean())
