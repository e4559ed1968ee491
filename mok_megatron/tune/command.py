"""``mok-megatron tune``: search the settings of the fused layer on the ranks that the launch gives.

mok-megatron tune --model deepseek_v3 --ep 64 --cluster gb300_nvl72                 without a GPU: the prediction
torchrun --nproc-per-node 2 -m mok_megatron.cli tune --shape 4096,7168,2048,8,4     EP 2, measured
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

    from mok_megatron.bench.problem import Shape
    from mok_megatron.config import MokConfig
    from mok_megatron.configs import ClusterConfig

HELP = "search the best kernel settings for a model and GPU"
MOST_CHOICES = 16
MOK_FLAGS = {
    "--mok-num-sms": "SMs of a launch, as in training",
    "--mok-reserved-sms": "SMs left to others, as in training (8 beside overlapped data-parallel communication)",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from mok_megatron.bench.command import FORMATS, add_shape_arguments
    from mok_megatron.tune.points import COMM_SMS, MINIBATCHES
    from mok_megatron.tune.search import ITERATIONS

    parser.description = (
        "Measures the fused layer under different communication SMs, minibatches and macrobatches, and writes the "
        "fastest for the plugin to pick up. The simulation says first which points are worth measuring. Settings "
        "whose results differ from the defaults' in any bit are refused, and the command fails. EP is the number of "
        "ranks of the launch. Without a GPU it prints the prediction alone, and writes no settings."
    )
    add_shape_arguments(parser)
    how = parser.add_argument_group("how to search")
    how.add_argument("--budget-s", type=float, default=120.0, help="seconds a shape (default 120)")
    how.add_argument("--comm-sms", default=_words(COMM_SMS), help=f"to try (default {_words(COMM_SMS)})")
    how.add_argument("--minibatches", default=_words(MINIBATCHES), help=f"to try (default {_words(MINIBATCHES)})")
    how.add_argument("--iterations", type=int, default=ITERATIONS, help=f"calls a measurement (default {ITERATIONS})")
    how.add_argument("--cluster", help="whose rates predict; default: found by the GPU's name")
    how.add_argument("--ep", type=int, help="expert-parallel size to predict for; default: the ranks of the launch")
    how.add_argument("--name", help="name of the file (default: the model's, or the shape)")
    how.add_argument(
        "--output", type=Path, help="folder of tuned files (default: $MOK_TUNED_DIR, else configs/tuned of the package)"
    )
    how.add_argument("--plot", type=Path, help="folder of the picture and the record (default: runs/tune)")
    for flag, text in MOK_FLAGS.items():
        parser.add_argument(flag, type=int, help=text)
    parser.add_argument(
        "--format", dest="mok_format", choices=FORMATS, help="of the products (default bf16), as --formats of bench"
    )


def _words(numbers: tuple[int, ...]) -> str:
    return ",".join(map(str, numbers))


def run(args: argparse.Namespace) -> int:
    """Exit status: 0; 1 if a setting changed a result; 2 for what cannot be done."""
    import torch

    from mok_megatron.errors import MokError

    try:
        return _run(args)
    except (MokError, OSError) as error:
        print(f"mok-megatron tune: {error}", file=sys.stderr)
    except torch.OutOfMemoryError as error:
        text = str(error).split(". ")[0]
        print(
            f"mok-megatron tune: {text}. Weights, fp32 gradients and a copy of them must fit: launch more ranks, or "
            "lower --experts or --tokens",
            file=sys.stderr,
        )
    return 2


def _run(args: argparse.Namespace) -> int:
    import torch

    from mok_megatron.bench.command import shapes_of, start
    from mok_megatron.config import config_from_args
    from mok_megatron.errors import MokConfigError

    base, shapes = config_from_args(args), shapes_of(args)
    choices = _numbers("--comm-sms", args.comm_sms, 0), _numbers("--minibatches", args.minibatches, 1)
    _check(args)
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if args.ep is not None and args.ep != ranks and (torch.cuda.is_available() or ranks > 1):
        raise MokConfigError(f"--ep {args.ep}, and the launch has {ranks} ranks; leave it out: they are the EP")
    if not torch.cuda.is_available():
        args.ep = args.ep or (ranks if "WORLD_SIZE" in os.environ else None)
        return _predict(args, shapes, base, choices) if os.environ.get("RANK", "0") == "0" else 0
    for shape in shapes:
        shape.check(ranks)
    device, group = start(base)
    import torch.distributed as dist

    try:
        return max([_tune(args, shape, base, choices, device, group) for shape in shapes])
    finally:
        dist.destroy_process_group()


def _check(args: argparse.Namespace) -> None:
    from mok_megatron.errors import MokConfigError, Problems

    problems = Problems()
    problems.require(args.budget_s > 0, f"--budget-s is {args.budget_s}", "give seconds above 0")
    problems.require(args.iterations >= 1, f"--iterations is {args.iterations}", "give at least 1")
    plain = args.name is None or (args.name and all(c.isalnum() or c in "._-" for c in args.name))
    problems.require(bool(plain), f"--name {args.name!r} is no file name", "use letters, digits, '.', '_' and '-'")
    problems.raise_if_any(MokConfigError, "nothing can be searched:")


def _check_sms(comm_sms: list[int], sms: int) -> None:
    from mok_megatron.errors import MokConfigError

    if max(comm_sms) >= sms:
        raise MokConfigError(f"--comm-sms {max(comm_sms)} leaves none of {sms} SMs for the products; lower it")


def _numbers(flag: str, text: str, least: int) -> list[int]:
    from mok_megatron.errors import MokConfigError

    try:
        numbers = [int(word) for word in text.split(",")]
        if min(numbers) < least or len(numbers) > MOST_CHOICES:
            raise ValueError
    except ValueError:
        raise MokConfigError(
            f"{flag} {text[:60]!r} is not a list of up to {MOST_CHOICES} numbers from {least}, such as 4,8"
        ) from None
    return numbers


def _predict(
    args: argparse.Namespace, shapes: list[Shape], base: MokConfig, choices: tuple[list[int], list[int]]
) -> int:
    from mok_megatron.configs import load_cluster
    from mok_megatron.errors import MokConfigError
    from mok_megatron.tune import draw, report
    from mok_megatron.tune.points import Expected, candidates, expect

    missing = [flag for flag, value in (("--cluster", args.cluster), ("--ep", args.ep)) if value is None]
    if missing:
        raise MokConfigError(
            f"there is no GPU here, so nothing can be measured; for the prediction alone, {' and '.join(missing)} must "
            "be given"
        )
    cluster = load_cluster(args.cluster)
    _check_sms(choices[0], base.num_sms or cluster.gpu.sms)
    for shape in shapes:
        shape.check(args.ep)
        points = candidates(shape, *choices, base)
        expected = expect(points, shape, cluster, args.ep, base, progress=True)
        known = {point: value for point, value in expected.items() if isinstance(value, Expected)}
        if not known:
            raise MokConfigError(next(value for value in expected.values() if isinstance(value, str)))
        rates = "measured there" if cluster.rates.measured else "ASSUMED"
        print(
            f"{shape}; EP {args.ep} on {cluster.title}\nNo GPU here: a PREDICTION by simulation, nothing was measured; "
            f"the cluster's rates are {rates}. No settings are written.\n"
        )
        print(report.points_table(shape, points, expected, None, base))
        best = min(known, key=lambda point: known[point].forward + known[point].backward)
        print(
            f"\nShortest predicted: --mok-fwd-comm-sms {best.comm_sms} --mok-bwd-comm-sms {best.comm_sms} "
            f"--mok-minibatch-size {best.minibatch}"
        )
        name = f"{_name(args, shape)}-ep{args.ep}-predicted"
        picture = _folder(args) / f"{name}.png"
        draw.draw(shape, points, expected, None, f"EP {args.ep}, {cluster.title}", picture)
        _write_json(picture.with_suffix(".json"), report.record(shape, points, expected, None), picture)
    return 0


def _tune(
    args: argparse.Namespace,
    shape: Shape,
    base: MokConfig,
    choices: tuple[list[int], list[int]],
    device: torch.device,
    group: dist.ProcessGroup | None,
) -> int:
    import torch
    import torch.distributed as dist

    from mok_megatron.bench.problem import make_problem
    from mok_megatron.bench.report import DISTRIBUTIONS, commit
    from mok_megatron.tune import draw, report
    from mok_megatron.tune.points import candidates, default_point, promising
    from mok_megatron.tune.search import Bench, search
    from mok_megatron.versions import installed

    started = time.monotonic()
    rank, ranks = dist.get_rank(), dist.get_world_size()
    gpu = torch.cuda.get_device_name(device)
    _check_sms(choices[0], base.num_sms or torch.cuda.get_device_properties(device).multi_processor_count)
    points = candidates(shape, *choices, base)
    cluster = _cluster(args, gpu, ranks)
    expected = _expect_together(points, shape, cluster, base, group)
    problem = make_problem(shape, rank, ranks, device, torch.bfloat16, args.imbalance, args.seed)
    bench = Bench(problem, group, args.iterations, started, args.budget_s)
    queue = promising(points, expected, default_point(base))
    found = search(bench, queue, base, progress=rank == 0)
    if rank == 0:
        source = f"first by simulation of {cluster.title}" if cluster else "no description of this GPU: all in turn"
        print(
            f"{shape}; EP {ranks} on {gpu}; {len(found.readings)} of {len(points)} points measured ({source}), "
            f"{time.monotonic() - started:.0f} s\n"
        )
        points += [point for point in (*found.readings, *found.left_out) if point not in points]
        print(report.points_table(shape, points, expected, found, base))
        print("\n" + report.outcome(found, base))
        name = _name(args, shape)
        picture = _folder(args) / f"{name}-ep{ranks}.png"
        draw.draw(shape, points, expected, found, f"EP {ranks}, {gpu}", picture)
        _write_json(picture.with_suffix(".json"), report.record(shape, points, expected, found), picture)
        if not found.different:
            versions = {distribution: installed(distribution) for distribution in DISTRIBUTIONS}
            command = shlex.join(["mok-megatron", *sys.argv[1:]])
            content = report.tuned_file(shape, ranks, gpu, found, args.imbalance, command, commit(), versions)
            path = report.write_tuned(content, _tuned_folder(args), name)
            print(f"settings: {path}", flush=True)
    if found.different:
        if rank == 0:
            print(
                "mok-megatron tune: settings changed a result, which they must never do; nothing is written. "
                f"Report these points: {', '.join(map(str, found.different))}",
                file=sys.stderr,
            )
        return 1
    return 0


def _cluster(args: argparse.Namespace, gpu: str, ranks: int) -> ClusterConfig | None:
    from mok_megatron.configs import load_cluster
    from mok_megatron.tune.points import find_cluster

    return load_cluster(args.cluster) if args.cluster else find_cluster(gpu, ranks)


def _expect_together(points: list, shape: Shape, cluster: ClusterConfig | None, base: MokConfig, group: object) -> dict:
    """What is expected of every point; each rank simulates its share."""
    import torch.distributed as dist

    from mok_megatron.tune.points import expect

    if cluster is None:
        return {}
    rank, ranks = dist.get_rank(), dist.get_world_size()
    parts: list = [None] * ranks
    dist.all_gather_object(parts, expect(points[rank::ranks], shape, cluster, ranks, base))
    return {point: value for part in parts for point, value in part.items()}


def _name(args: argparse.Namespace, shape: Shape) -> str:
    if args.name:
        return str(args.name)
    if args.model:
        return Path(args.model).stem
    text = f"t{shape.tokens}-h{shape.hidden}-i{shape.intermediate}-e{shape.experts}-k{shape.topk}"
    return text + (f"-s{shape.shared}" if shape.shared else "")


def _folder(args: argparse.Namespace) -> Path:
    return args.plot or Path("runs", "tune")


def _tuned_folder(args: argparse.Namespace) -> Path:
    """Where the plugin looks first."""
    from mok_megatron import tuned
    from mok_megatron.resources import data_folder

    if args.output:
        return args.output
    return next(iter(tuned.folders()), data_folder("configs") / "tuned")


def _write_json(path: Path, content: dict, picture: Path) -> None:
    path.write_text(json.dumps(content, indent=1) + "\n")
    print(f"picture: {picture}\nrecord: {path}", flush=True)
