"""``mok-megatron simulate``: one MoE layer as a discrete-event model of the kernel, in each direction."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

from mok_megatron.config import MokConfig, config_from_args
from mok_megatron.configs import ClusterConfig, cluster_names, load_cluster, load_model, model_names
from mok_megatron.errors import MokConfigError, MokError

HELP = "predict the time of one MoE layer by simulating the kernel's schedule"
DEFAULT_TOKENS = 4096

MOK_FLAGS = {
    "--mok-minibatch-size": "routed rows a minibatch, as in training",
    "--mok-macrobatch-size": "routed rows that a layer keeps, as in training; all rows must fit",
    "--mok-fwd-comm-sms": "communication SMs of the forward; 0: idle warps of all SMs pull",
    "--mok-bwd-comm-sms": "communication SMs of the backward, likewise",
    "--mok-num-sms": "SMs of the kernel, communication included",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the subcommand's flags."""
    parser.description = (
        "Simulates the kernel's schedule on the fullest GPU of a balanced expert group: tiles in the kernel's order, "
        "pulls, pushes and waits, with rates measured on H200 and scaled to the cluster's GPU. A prediction, no "
        "measurement; docs/nvl72.md says how far it is from what was measured, and lists the assumptions."
    )
    parser.add_argument("--model", help=f"one of {', '.join(model_names())}, or a .yaml file")
    parser.add_argument(
        "--shape", metavar="T,H,I,E,K[,SHARED]", help="instead: tokens a GPU, hidden, intermediate, experts, top-k"
    )
    parser.add_argument("--tokens", type=int, help=f"tokens a GPU, with --model (default {DEFAULT_TOKENS})")
    parser.add_argument("--cluster", help=f"one of {', '.join(cluster_names())}, or a .yaml file")
    parser.add_argument("--ep", type=int, help="GPUs of the expert group")
    parser.add_argument(
        "--overlap-epilogues",
        action="store_true",
        help="epilogues run beside the SM's next product, as two accumulators in Blackwell's tensor memory would allow",
    )
    for flag, text in MOK_FLAGS.items():
        parser.add_argument(flag, type=int, help=text)
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument(
        "--check", type=Path, metavar="RECORD", help="compare with the times of a record of `mok-megatron bench --json`"
    )
    parser.add_argument(
        "--fit",
        nargs="+",
        type=Path,
        metavar=("RECORD", "TRACE"),
        help="write the rates anew from a bench record and two or more trace.json of `bench --trace`, of --cluster",
    )
    parser.add_argument("--rates", type=Path, metavar="FILE", help="with --fit: write here, not to the package's file")


def run(args: argparse.Namespace) -> int:
    """Exit status: 0, or 2 for what cannot be simulated."""
    try:
        print(_fit(args) if args.fit else _check(args.check, args.cluster) if args.check else _run(args))
        return 0
    except (MokError, OSError) as error:
        print(f"mok-megatron simulate: {error}", file=sys.stderr)
        return 2


def _fit(args: argparse.Namespace) -> str:
    from mok_megatron.simulate.fit import fit, write_rates
    from mok_megatron.simulate.rates import measured_rates, rates_file

    record, *traces = args.fit
    rates = fit(record, traces, args.cluster or "h200_x2")
    path = args.rates or rates_file()
    write_rates(rates, path)
    text = f"{path}:\n{path.read_text()}"
    if path == rates_file():
        measured_rates.cache_clear()
        text += f"\n{_check(record, args.cluster)}\n\nNow: python -m mok_megatron.simulate.document docs/nvl72.md"
    return text


def _check(record: Path, cluster: str | None) -> str:
    from mok_megatron.plan.report import table
    from mok_megatron.simulate.document import comparison

    heads = ["T, H, I, E, K", "direction", "simulated ms", "measured ms", "difference"]
    return table(heads, comparison(record, cluster or "h200_x2"))


def _run(args: argparse.Namespace) -> str:
    from mok_megatron.simulate.layer import DirectionTimes, LayerShape, simulate

    missing = [f"--{name}" for name in ("cluster", "ep") if getattr(args, name) is None]
    if (args.model is None) == (args.shape is None):
        missing.insert(0, "one of --model and --shape")
    if missing:
        raise MokConfigError(f"{' and '.join(missing)} must be given")
    if args.shape is not None:
        if args.tokens is not None:
            raise MokConfigError("--tokens belongs to --model; --shape begins with the tokens a GPU")
        try:
            shape = LayerShape(*map(int, args.shape.split(",")))
        except (ValueError, TypeError):
            raise MokConfigError(
                f"--shape {args.shape!r} is not T,H,I,E,K or T,H,I,E,K,SHARED, such as 4096,7168,2048,8,4"
            ) from None
    else:
        moe = load_model(args.model).moe
        shape = LayerShape(
            DEFAULT_TOKENS if args.tokens is None else args.tokens,
            moe.hidden_size,
            moe.moe_ffn_hidden_size,
            moe.num_experts,
            moe.topk,
            moe.shared_expert_intermediate_size,
        )
    cluster, config = load_cluster(args.cluster), config_from_args(args)
    times: dict[str, DirectionTimes] = {
        name: simulate(shape, cluster, args.ep, config, name == "forward", args.overlap_epilogues)
        for name in ("forward", "backward")
    }
    if args.json:
        return json.dumps(_dictionary(shape, cluster, config, args, times), indent=2)
    return _text(shape, cluster, args, times)


def _milliseconds(times: Any) -> dict[str, float]:
    values = {field.name: getattr(times, field.name) for field in dataclasses.fields(times)}
    return {name: value / 1e3 for name, value in {**values, "exposed": times.exposed}.items()}


def _dictionary(shape: Any, cluster: ClusterConfig, config: MokConfig, args: argparse.Namespace, times: Any) -> Any:
    return {
        "prediction": True,
        "unit": "ms",
        "shape": dataclasses.asdict(shape),
        "cluster": cluster.name,
        "rates_measured": cluster.rates.measured,
        "ep": args.ep,
        "overlap_epilogues": args.overlap_epilogues,
        "minibatch_size": config.minibatch_size,
        **{name: _milliseconds(value) for name, value in times.items()},
    }


def _text(shape: Any, cluster: ClusterConfig, args: argparse.Namespace, times: Any) -> str:
    from mok_megatron.plan.report import table

    names = {
        "total": "total",
        "exposed": "exposed communication",
        "limit": "limit: products alone, or NVLink alone if longer",
        "prepare": "prepare kernel",
        "products": "products, a mean SM",
        "epilogues": "epilogues that keep an SM from its next product",
        "waits": "waits for rows and tiles",
        "sum_over_k": "sum over k",
        "without_communication": "total without communication",
        "link": "NVLink busy",
    }
    columns = [_milliseconds(value) for value in times.values()]
    rates = "measured" if cluster.rates.measured else "ASSUMED"
    sizes = f"T {shape.tokens}, H {shape.hidden}, I {shape.intermediate}, E {shape.experts}, K {shape.topk}"
    if shape.shared:
        sizes += f", shared {shape.shared}"
    overlap = "beside the next product" if args.overlap_epilogues else "before the next product"
    return (
        f"{args.model or 'one layer'} ({sizes}) at EP {args.ep} on {cluster.title}\n"
        f"A prediction by simulation, no measurement; rates of this cluster: {rates}; epilogues {overlap}.\n\n"
        + table(["ms", *times], [[text, *(column[name] for column in columns)] for name, text in names.items()])
    )
