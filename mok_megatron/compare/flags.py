"""``python -m mok_megatron.compare.flags``: what ``scripts/pretrain_deepseek_v3.sh`` passes to Megatron.

Prints the flags of the model, its parallel sizes, its dispatcher and its data, each word followed by a NUL byte; the
script adds the recipe's learning rate and batch schedule, and then the user's own flags, which win. One line about the
layout goes to stderr. Imports no torch unless it must, so it is quick.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from mok_megatron.compare import presets
from mok_megatron.compare.dispatchers import DISPATCHERS, dispatcher_flags, dispatcher_type, require_dispatcher
from mok_megatron.compare.presets import Preset, PresetError
from mok_megatron.configs import cluster_names, load_cluster
from mok_megatron.errors import MokError, Problems
from mok_megatron.plan import launch
from mok_megatron.plan.memory import memory_limit
from mok_megatron.plan.search import Plan

# The user's flags that decide the plan: Megatron's name -> field of the planner's request.
PLANNED = {
    "tensor_model_parallel_size": "tp",
    "context_parallel_size": "cp",
    "expert_model_parallel_size": "ep",
    "pipeline_model_parallel_size": "pp",
    "micro_batch_size": "micro_batch",
    "global_batch_size": "global_batch",
}
DATA_FLAGS = ("--data-path", "--data-args-path", "--train-data-path", "--per-split-data-args-path", "--mock-data")


def main(argv: Sequence[str] | None = None) -> int:
    """Print the flags; returns the exit status: 2 for a preset that cannot run, with one message that says why."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    args = parse(arguments)
    try:
        preset, plan = prepare(args)
        words = megatron_flags(preset, plan, args)
        check(preset, plan, args).raise_if_any(PresetError, "this training cannot start:")
    except MokError as error:
        print(f"pretrain: {error}", file=sys.stderr)
        return 2
    print(f"pretrain: {summary(preset, plan, args.dispatcher)}", file=sys.stderr)
    sys.stdout.write("".join(f"{word}\0" for word in words))
    return 0


def parse(arguments: list[str]) -> argparse.Namespace:
    """Own flags, and behind ``--`` the user's for Megatron, as ``user``."""
    own, _, user = _split(arguments)
    parser = argparse.ArgumentParser(prog="python -m mok_megatron.compare.flags", description=__doc__)
    parser.add_argument("--preset", default="full", help=f"one of {', '.join(presets.PRESETS)} (default full)")
    parser.add_argument("--dispatcher", default="mok", help=f"one of {', '.join(DISPATCHERS)} (default mok)")
    parser.add_argument("--gpus", type=int, help="ranks in all; default: the preset's own number")
    parser.add_argument("--gpus-per-node", type=int, help="GPUs found on this node; default: the cluster's")
    parser.add_argument("--gpu-name", help="what the driver calls them, to find the cluster's description")
    parser.add_argument("--cluster", help=f"one of {', '.join(cluster_names())}, or a .yaml file")
    parser.add_argument("--batch-schedule", help="Megatron's --step-batch-size-schedule, which the script adds itself")
    parser.add_argument("--dry-run", action="store_true", help="do not insist on installed libraries")
    args = parser.parse_args(own)
    args.user = user
    return args


def prepare(args: argparse.Namespace) -> tuple[Preset, Plan | None]:
    """The preset and the plan of its sizes (None on the CPU)."""
    preset = presets.find_preset(args.preset)
    gpus = preset.gpus if args.gpus is None else args.gpus
    if preset.cluster is None:
        if gpus != preset.gpus:
            raise PresetError(f"--preset {preset.name} runs on {preset.gpus} CPU processes, not on {gpus}")
        return preset, None
    if args.cluster:
        cluster = load_cluster(args.cluster)
    elif args.gpu_name:
        cluster = presets.find_cluster(args.gpu_name, args.gpus_per_node or 1)
    else:
        cluster = load_cluster(preset.cluster)
    changes = {field: getattr(user_flags(args.user), name) for name, field in PLANNED.items()}
    return preset, presets.make_preset_plan(preset, cluster, gpus, args.dispatcher, **changes)


def user_flags(user: list[str]) -> argparse.Namespace:
    """Those of the user's flags for Megatron that matter before Megatron reads them."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for name in PLANNED:
        parser.add_argument("--" + name.replace("_", "-"), type=int)
    for flag in ("--transformer-impl", "--save", "--tokenizer-type"):
        parser.add_argument(flag)
    for flag in ("--data-path", "--train-data-path"):
        parser.add_argument(flag, nargs="*", default=[])
    known, _ = parser.parse_known_args(user)
    return known


def names_data(user: list[str]) -> bool:
    """Whether the user's flags say what to train on, be it mock data."""
    return any(word.partition("=")[0] in DATA_FLAGS for word in user)


def uses_transformer_engine(preset: Preset, user: list[str]) -> bool:
    """Whether the layers are Transformer Engine's: on GPUs, unless the user says otherwise."""
    return preset.on_gpus and user_flags(user).transformer_impl in (None, "transformer_engine")


def megatron_flags(preset: Preset, plan: Plan | None, args: argparse.Namespace) -> list[str]:
    """Model, parallel sizes, dispatcher, data: everything of Megatron's command line but the recipe and the user's."""
    grouped = uses_transformer_engine(preset, args.user)
    model = presets.preset_model(preset, dispatcher_type(args.dispatcher))
    if plan is None:
        sizes = preset.parallel
        words = model.megatron_arguments()
        words += ["--expert-model-parallel-size", str(sizes["ep"]), "--micro-batch-size", str(sizes["micro_batch"])]
        words += ["--global-batch-size", str(sizes["global_batch"]), "--use-distributed-optimizer"]
    else:
        words = launch.megatron_arguments(plan)
        # The fused layer's own defaults were measured; the plan's communication SMs are a prediction.
        words = _without(words, [word for word in words if word.startswith("--mok-")])
        words[words.index("--moe-token-dispatcher-type") + 1] = dispatcher_type(args.dispatcher)
    if args.batch_schedule:
        words = _without(words, ["--global-batch-size"])
    words += dispatcher_flags(args.dispatcher, grouped)
    # YaRN, Megatron's default for latent attention and the only one with a fused kernel, is plain rotary embedding at
    # factor 1; the model is stretched after pre-training only (DeepSeek-V3 Technical Report, section 4.3).
    words += ["--rotary-scaling-factor", "1.0"]
    if grouped and os.environ.get("MEGATRON_LM") and importlib.util.find_spec("fused_weight_gradient_mlp_cuda") is None:
        # Apex's kernel, without which Megatron's output layer stops; mok_megatron.pretrain has Transformer Engine's.
        words += ["--no-gradient-accumulation-fusion"]
    if not names_data(args.user):
        words += ["--mock-data"]
    if user_flags(args.user).tokenizer_type is None:
        words += ["--tokenizer-type", "NullTokenizer", "--vocab-size", str(model.model.vocab_size)]
    words += ["--no-create-attention-mask-in-dataloader"]  # attention is causal by itself
    return words


def check(preset: Preset, plan: Plan | None, args: argparse.Namespace) -> Problems:
    """What would fail later, or only on some ranks: libraries, data, the checkpoint folder, the batch schedule.

    A dry run does not need the libraries.
    """
    problems = Problems()
    if plan is not None and args.batch_schedule:
        unit = plan.sizes.dp * plan.training.micro_batch
        batches = _batches(args.batch_schedule)
        problems.require(
            bool(batches) and min(batches) > 0,
            f"--batch-schedule {args.batch_schedule!r} is not like '0:3072 117B:6144'",
            "give START:SEQUENCES pairs",
        )
        problems.require(
            all(batch % unit == 0 for batch in batches),
            f"the report's batches of {', '.join(map(str, batches))} sequences do not all divide by DP x micro-batch = "
            f"{unit}",
            "use another number of GPUs, or --global-batch-size with a multiple",
        )
    if not args.dry_run or args.dispatcher not in DISPATCHERS:
        require_dispatcher(args.dispatcher, preset.on_gpus, uses_transformer_engine(preset, args.user), problems)
    user = user_flags(args.user)
    for prefix in [*user.data_path, *user.train_data_path]:
        missing = [f"{prefix}{end}" for end in (".bin", ".idx") if not os.path.isfile(f"{prefix}{end}")]
        if missing and not _is_number(prefix) and "://" not in prefix:
            problems.add(
                f"no dataset at {prefix}: {' and '.join(missing)} missing",
                "give --data-path the prefix that Megatron's tools/preprocess_data.py wrote, or leave it out to train "
                "on mock data",
            )
    if user.save and "://" not in user.save:
        folder = Path(user.save).absolute()
        while not os.path.exists(folder) and folder != folder.parent:
            folder = folder.parent
        problems.require(
            folder.is_dir() and os.access(folder, os.W_OK),
            f"--save {user.save} cannot be written",
            f"choose a folder that this user can write ({folder} is not one)",
        )
    return problems


def _batches(schedule: str) -> list[int]:
    """The batches of Megatron's --step-batch-size-schedule, "START:SEQUENCES ..."; none where it is not like that."""
    pairs = [entry.rpartition(":") for entry in schedule.split()]
    well_formed = all(start and batch.isascii() and batch.isdecimal() and len(batch) < 10 for start, _, batch in pairs)
    return [int(batch) for _, _, batch in pairs] if well_formed else []


def summary(preset: Preset, plan: Plan | None, dispatcher: str) -> str:
    """One line: preset, dispatcher, parallel sizes, where, memory."""
    if plan is None:
        return f"{preset.name} under {dispatcher}: EP {preset.parallel['ep']} on {preset.gpus} CPU processes"
    sizes, cluster = plan.sizes, plan.request.cluster
    return (
        f"{preset.name} under {dispatcher}: TP {sizes.tp}, CP {sizes.cp}, EP {sizes.ep}, PP {sizes.pp}, DP {sizes.dp} "
        f"on {sizes.world:,} GPU{'s' * (sizes.world > 1)} of {cluster.title}; planned {plan.worst.total / 1e9:.0f} of "
        f"{memory_limit(cluster) / 1e9:.0f} GB a GPU"
    )


def _split(arguments: list[str]) -> tuple[list[str], bool, list[str]]:
    if "--" not in arguments:
        return arguments, False, []
    at = arguments.index("--")
    return arguments[:at], True, arguments[at + 1 :]


def _without(words: list[str], flags: list[str]) -> list[str]:
    """``words`` without these flags and the value behind each."""
    kept, skip = [], False
    for word in words:
        if skip:
            skip = False
        elif word in flags:
            skip = True
        else:
            kept.append(word)
    return kept


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


if __name__ == "__main__":
    sys.exit(main())
