"""``python -m mok_megatron.compare.command``, as ``scripts/compare.sh`` runs it: the recipe under several dispatchers.

Trains the same model from the same seed on the same data under each dispatcher, one after another, and reports. On
GPUs one MoE layer of the model is measured alone as well, by ``mok-megatron bench``. Arguments that are not its own go
to ``scripts/pretrain_deepseek_v3.sh``, and from there to Megatron.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mok_megatron.compare import report, runs
from mok_megatron.compare.dispatchers import DISPATCHERS, missing
from mok_megatron.compare.draw import draw
from mok_megatron.compare.flags import names_data, uses_transformer_engine
from mok_megatron.compare.log import Training, read_log
from mok_megatron.compare.presets import PRESETS, Preset, find_preset, preset_model
from mok_megatron.errors import MokError, Problems
from mok_megatron.resources import PACKAGE

SCRIPT = PACKAGE.parent / "scripts" / "pretrain_deepseek_v3.sh"
RESULTS = ("summary.json", "report.md", "compare.png", "layer.json", "layer.log", *(f"{n}.log" for n in DISPATCHERS))
STEP_LINE = r"iteration +\d+/ *\d+ \|.*?ms\): [\d.]+"


class CompareError(MokError):
    """The comparison cannot run as asked."""


def main(argv: Sequence[str] | None = None) -> int:
    """Compare; returns the exit status: 0, 1 where a run failed, 2 where it cannot run as asked."""
    parser = _parser()
    args, user = parser.parse_known_args(argv)
    try:
        return run(args, user)
    except MokError as error:
        print(f"compare: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("compare: interrupted; the running training was ended", file=sys.stderr)
        return 130


def run(args: argparse.Namespace, user: list[str]) -> int:
    """Train, measure, report; returns the exit status.

    Raises:
        MokError: nothing can be compared as asked.
    """
    preset = find_preset(args.preset)
    names = [name for name in args.dispatchers.split(",") if name]
    folder: Path = args.out or Path("runs", f"compare-{preset.name}")
    _check(args, names)
    absent = {name: why for name in names if (why := missing(name, preset.on_gpus, _engine(preset, user)))}
    for name, why in absent.items():
        print(f"compare: skipping {name}: {why}", file=sys.stderr)
    if len(absent) == len(names):
        raise CompareError("none of the dispatchers can run here; see above")
    _make_folder(folder)
    user = _data(preset, folder, user) + user
    commands: dict[str, list[str]] = {}
    trained: dict[str, Training] = {}
    for name in (name for name in names if name not in absent):
        commands[name] = training_command(preset, name, args.steps, user)
        print(f"compare: {name}, {args.steps} steps of {preset.name}", file=sys.stderr)
        try:
            trained[name] = read_log(
                runs.run_logged(commands[name], folder / f"{name}.log", args.deadline, show=STEP_LINE)
            )
            if len(trained[name].loss) < args.steps:
                raise runs.RunError(f"trained {len(trained.pop(name).loss)} of {args.steps} steps")
        except runs.RefusedError as error:
            raise CompareError(f"{name} was refused:\n{error}") from error
        except runs.RunError as error:
            absent[name] = str(error)
            print(f"compare: {name} {error}", file=sys.stderr)
    if not trained:
        raise CompareError("no run finished; see above")
    summary = report.summarize(preset, trained, absent)
    summary |= _layer(preset, list(trained), args, folder, commands, trained)
    summary["run"] = report.describe_run(commands, preset.on_gpus)
    report.write(summary, folder)
    print(f"\n{report.table(summary)}\n\n" + "\n".join(report.conclusions(summary)))
    print(f"wrote report.md and summary.json to {folder}")
    try:
        draw(summary, folder / "compare.png")
    except ImportError as error:
        print(
            f"compare: no picture ({error}); python -m mok_megatron.compare.draw makes it from summary.json elsewhere"
        )
    return 1 if any(name in commands for name in absent) else 0


def training_command(preset: Preset, dispatcher: str, steps: int, user: list[str]) -> list[str]:
    """The command line of one run."""
    words = ["bash", str(SCRIPT), "--preset", preset.name, "--dispatcher", dispatcher]
    # Times of the MoE layers, and of mok's kernels their times and memory; what that costs counts against mok.
    words += ["--train-iters", str(steps), "--log-memory-interval", str(steps), "--log-mok"]
    return [*words, *user]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="scripts/compare.sh", description=(__doc__ or "").split("\n\n")[1], allow_abbrev=False
    )
    parser.add_argument("--preset", default="proxy-2gpu", help=f"one of {', '.join(PRESETS)} (default proxy-2gpu)")
    parser.add_argument(
        "--dispatchers",
        default="mok,hybridep,alltoall",
        help=f"from {','.join(DISPATCHERS)}; what is not installed is skipped (default mok,hybridep,alltoall)",
    )
    parser.add_argument("--steps", type=int, default=50, help="steps of each (default 50)")
    parser.add_argument("--out", type=Path, help="folder of the results (default runs/compare-PRESET)")
    parser.add_argument("--deadline", type=float, default=3600.0, help="seconds that one training may take")
    parser.add_argument("--no-layer", action="store_true", help="leave the layer benchmark out")
    return parser


def _check(args: argparse.Namespace, names: list[str]) -> None:
    problems = Problems()
    unknown = [name for name in names if name not in DISPATCHERS]
    problems.require(not unknown, f"--dispatchers names {', '.join(unknown)}", f"choose from {', '.join(DISPATCHERS)}")
    problems.require(bool(names), "--dispatchers is empty", "name at least one")
    problems.require(len(set(names)) == len(names), "--dispatchers names one twice", "name each once")
    problems.require(args.steps >= 1, f"--steps is {args.steps}", "give at least 1")
    finite = 0 < args.deadline < math.inf
    problems.require(finite, f"--deadline is {args.deadline}", "give a positive, finite number of seconds")
    problems.require(SCRIPT.is_file(), f"{SCRIPT} does not exist", "run from a checkout: the recipe is a script of it")
    nodes = os.environ.get("NNODES") or os.environ.get("SLURM_STEP_NUM_NODES") or "1"
    problems.require(nodes == "1", f"this launch has {nodes} nodes", "compare on one node")
    problems.raise_if_any(CompareError, "cannot run:")


def _engine(preset: Preset, user: list[str]) -> bool:
    return uses_transformer_engine(preset, user)


def _make_folder(folder: Path) -> None:
    """The output folder, without an earlier comparison's results: they must not pass for this one's."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name in RESULTS:
            (folder / name).unlink(missing_ok=True)
        (folder / RESULTS[0]).touch()
        (folder / RESULTS[0]).unlink()
    except OSError as error:
        raise CompareError(f"cannot write to --out {folder}: {error}. Choose a writable folder.") from error


def _data(preset: Preset, folder: Path, user: list[str]) -> list[str]:
    """Flags of real text, a token a byte, where the user names no data: random tokens would have nothing to learn."""
    if names_data(user):
        return []
    from mok_megatron.training.data import VOCABULARY, standard_library_sources, write_indexed_dataset

    prefix = folder / "data" / "python"
    write_indexed_dataset(standard_library_sources(), prefix)
    words = max(VOCABULARY, preset_model(preset).model.vocab_size)
    flags = ["--data-path", str(prefix), "--split", "1,0,0", "--data-cache-path", str(folder / "data" / "cache")]
    return [*flags, "--tokenizer-type", "NullTokenizer", "--vocab-size", str(words)]


def _layer(
    preset: Preset,
    names: list[str],
    args: argparse.Namespace,
    folder: Path,
    commands: dict[str, list[str]],
    trained: dict[str, Training],
) -> dict[str, Any]:
    """The layer benchmark of this model's MoE layer on this node, as entries of the summary."""
    if args.no_layer or not preset.on_gpus:
        return {"no_layer": "Left out." if args.no_layer else "Measured on GPUs only."}
    sizes, moe = next(iter(trained.values())).arguments, preset_model(preset).moe
    tokens = sizes["seq_length"] * sizes["micro_batch_size"]
    ranks = sizes["world_size"] // sizes["pipeline_model_parallel_size"]
    if preset.gpus != ranks:
        return {"no_layer": "Left out: the expert group is not all ranks of this node."}
    shape = (tokens, moe.hidden_size, moe.moe_ffn_hidden_size, moe.num_experts, moe.topk)
    baselines = ",".join(["nccl", *(name for name in names if name != "mok")])
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command += ["-m", "mok_megatron.cli", "bench", "--baselines", baselines, "--json", str(folder / "layer.json")]
    command += ["--shape", ",".join(map(str, (*shape, moe.shared_expert_intermediate_size)))]
    commands["layer"] = command
    print("compare: one MoE layer alone", file=sys.stderr)
    try:
        text = runs.run_logged(command, folder / "layer.log", args.deadline)
    except runs.RunError as error:
        print(f"compare: the layer benchmark {error}", file=sys.stderr)
        return {"no_layer": f"The layer benchmark {error}"}
    lines = text.splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith("ms ")), 1) - 1
    shown = "\n".join(lines[start:]).partition("\nrecord:")[0].rstrip()
    return {
        "layer_table": shown,
        "layer": report.read(folder / "layer.json"),
        "moe_layers": report.explain_by_layers(preset, trained, report.read(folder / "layer.json")),
    }


if __name__ == "__main__":
    sys.exit(main())
