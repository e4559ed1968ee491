"""``mok-megatron plan``: parallel sizes, placement, memory, traffic and predicted times of a training run."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from mok_megatron.config import config_from_args
from mok_megatron.configs import cluster_names, load_cluster, load_model, model_names
from mok_megatron.errors import MokError

HELP = "parallel sizes, placement, memory and time for a model and cluster"

# Settings of the fused layer that change what a plan costs; the others of `--mok-*` do not.
MOK_FLAGS = {
    "--mok-minibatch-size": "routed rows a minibatch, as in training",
    "--mok-macrobatch-size": "routed rows that a layer keeps, as in training",
    "--mok-capacity-rows": "routed rows that a schedule holds, as in training",
    "--mok-fwd-comm-sms": "communication SMs of the forward; default: chosen",
    "--mok-bwd-comm-sms": "communication SMs of the backward; default: chosen",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the subcommand's flags."""
    parser.description = (
        "Plans a training run without a GPU: sizes that fit memory, where each rank goes, the Slurm and torchrun "
        "lines, bytes over NVLink and network, memory of a GPU item by item, and predicted times with their formulas."
    )
    parser.add_argument("--model", help=f"one of {', '.join(model_names())}, or a .yaml file")
    parser.add_argument("--cluster", help=f"one of {', '.join(cluster_names())}, or a .yaml file")
    parser.add_argument(
        "--racks", type=int, help="NVLink domains to use: racks of NVL72, single nodes elsewhere (or give --gpus)"
    )
    parser.add_argument("--gpus", type=int, help="GPUs to use, spares not counted (or give --racks)")
    for name, what in (("tp", "tensor"), ("cp", "context"), ("ep", "expert"), ("pp", "pipeline")):
        parser.add_argument(f"--{name}", type=int, help=f"{what}-parallel size; default: searched")
    parser.add_argument("--micro-batch", type=int, default=1, help="sequences of a microbatch (default 1)")
    parser.add_argument(
        "--global-batch", type=int, help="sequences a step; default: 8 a GPU, at most the model's own, made to divide"
    )
    parser.add_argument(
        "--recompute", choices=("none", "moe", "full"), help="what the backward computes again; default: searched"
    )
    parser.add_argument(
        "--bf16-moments", action="store_true", help="optimizer moments in bf16, as in DeepSeek-V3's report"
    )
    for flag, text in MOK_FLAGS.items():
        parser.add_argument(flag, type=int, help=text)
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.add_argument("--png", metavar="FILE", help="draw the racks, GPUs coloured by expert group")
    parser.add_argument(
        "--output", metavar="DIR", help="write plan.txt, plan.json, racks.png, job.sh, node.sh and topology.conf there"
    )
    parser.add_argument("--list", action="store_true", help="list the models and clusters, and exit")


def run(args: argparse.Namespace) -> int:
    """Exit status: 0, or 2 for a plan that cannot be made or a file that cannot be read or written."""
    try:
        return _run(args)
    except (MokError, OSError) as error:
        print(f"mok-megatron plan: {error}", file=sys.stderr)
        return 2


def _run(args: argparse.Namespace) -> int:
    from mok_megatron.plan.report import as_dictionary, text_report
    from mok_megatron.plan.request import Request
    from mok_megatron.plan.search import make_plan

    if args.list:
        print("models:   " + ", ".join(model_names()) + "\nclusters: " + ", ".join(cluster_names()))
        return 0
    missing = [f"--{name}" for name in ("model", "cluster") if getattr(args, name) is None]
    if missing:
        raise MokError(f"{' and '.join(missing)} must be given; --list shows the names")
    request = Request(
        model=load_model(args.model),
        cluster=load_cluster(args.cluster),
        gpus=args.gpus,
        domains=args.racks,
        tp=args.tp,
        cp=args.cp,
        ep=args.ep,
        pp=args.pp,
        micro_batch=args.micro_batch,
        global_batch=args.global_batch,
        recompute=args.recompute,
        bf16_moments=args.bf16_moments,
        comm_sms=(args.mok_fwd_comm_sms, args.mok_bwd_comm_sms),
        config=config_from_args(args),
    )
    plan = make_plan(request)
    text = json.dumps(as_dictionary(plan), indent=2) + "\n" if args.json else text_report(plan)
    sys.stdout.write(text)
    if args.png:
        from mok_megatron.plan.draw import draw_racks

        draw_racks(plan, args.png)
    if args.output:
        from mok_megatron.plan.files import write_files

        for path in write_files(plan, Path(args.output)):
            print(f"wrote {path}", file=sys.stderr)
    return 0
