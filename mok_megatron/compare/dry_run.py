"""``python -m mok_megatron.compare.dry_run``: check a launch of the recipe without its GPUs, and print its layout.

Reads the flags as Megatron would on rank 0 of a job of that size, through Megatron's own parser and validation, and
builds its model configuration from them. What needs the GPUs themselves is taken to be as the cluster's description
says; what needs Transformer Engine, where that is not installed, as if the supported version were.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import logging
import os
import sys
import types
import warnings
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

from mok_megatron import versions
from mok_megatron.compare import flags
from mok_megatron.compare.dispatchers import missing
from mok_megatron.compare.presets import PRESETS
from mok_megatron.errors import MokError
from mok_megatron.plan import report
from mok_megatron.plan.placed import group_proof
from mok_megatron.plan.search import Plan


class DryRunError(MokError):
    """Megatron refuses the flags."""


def main(argv: Sequence[str] | None = None) -> int:
    """Print layout and verdict; returns the exit status: 2 where the launch could not work.

    Args:
        argv: as for `flags`, but with Megatron's whole command line behind ``--``.
    """
    args = flags.parse(list(sys.argv[1:] if argv is None else argv))
    preset, plan = flags.prepare(args)
    print(f"parallel layout\n  {flags.summary(preset, plan, args.dispatcher)}")
    if plan is not None:
        print(layout(plan))
    try:
        parsed = check_with_megatron(args.user, plan)
    except MokError as error:
        print(f"pretrain: {error}", file=sys.stderr)
        return 2
    print("checked without GPUs\n  Megatron's parser, validation and model configuration accept the command")
    if plan is not None:
        print("  the plan fits memory; every expert group lies inside one NVLink domain")
    reason = missing(args.dispatcher, preset.on_gpus, flags.uses_transformer_engine(preset, args.user))
    if reason:
        print(f"  not checked: {reason}")
    steps = "a number of steps set by its samples" if parsed.train_iters is None else f"{parsed.train_iters:,} steps"
    print(f"  would train {steps} on {parsed.world_size:,} ranks, DP {parsed.data_parallel_size:,}")
    return 0


def layout(plan: Plan) -> str:
    """Where the ranks go, and the memory of the fullest GPU, item by item."""
    placement, cluster = plan.placement, plan.request.cluster
    items = [(name, value / 1e9) for name, value in plan.worst.items.items()]
    return (
        f"  {placement.nodes} x {cluster.node.name} of {placement.ranks_per_node} ranks in {placement.domains} NVLink "
        f"domain{'s' * (placement.domains > 1)}; rank order {plan.sizes.order}, fastest first\n"
        f"  {group_proof(plan)}\n"
        f"  {plan.microbatches} microbatches at {plan.global_batch:,} sequences a step; recomputed in the backward: "
        f"{plan.training.recompute}\nmemory of a GPU of stage {plan.worst.stage}, the fullest (predicted)\n"
        + report.table(["item", "GB"], [*items, ("total", plan.worst.total / 1e9)])
    )


def check_with_megatron(words: list[str], plan: Plan | None) -> Any:
    """Megatron's parsed and validated arguments of rank 0; its model configuration is built from them too.

    Raises:
        DryRunError: with Megatron's own words.
    """
    import torch

    from mok_megatron import host, register
    from mok_megatron.pretrain import ON_CPU

    world = plan.sizes.world if plan is not None else PRESETS["tiny"].gpus
    words = words if plan is not None else [*ON_CPU, *words]
    errors = io.StringIO()
    job = {"WORLD_SIZE": str(world), "RANK": "0", "LOCAL_RANK": "0"}
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.dict(os.environ, job))
        stack.enter_context(mock.patch.object(sys, "argv", ["pretrain", *words]))
        stack.enter_context(warnings.catch_warnings(action="ignore"))
        register()
        logging.disable(logging.WARNING)
        stack.callback(logging.disable, logging.NOTSET)
        if not torch.cuda.is_available():
            stack.enter_context(host.cpu_host_mode(training=True))
        stack.enter_context(_hardware(plan))
        from megatron.training.argument_utils import gpt_config_from_args
        from megatron.training.arguments import parse_args, validate_args

        try:
            # Not shown: a listing of every argument, and the parser's usage of a thousand lines before its one error.
            with contextlib.redirect_stdout(None), contextlib.redirect_stderr(errors):
                args = parse_args()
                validate_args(args, {"tokenizer_type": "GPT2BPETokenizer"})
                # What the tokenizer will say; any number serves here.
                args.padded_vocab_size = args.padded_vocab_size or args.vocab_size or 1
                gpt_config_from_args(args)
        except SystemExit as error:
            last = errors.getvalue().strip().rpartition("\n")[2]
            reason = last.partition("error: ")[2] or last
            raise DryRunError(f"Megatron's parser refuses this command: {reason}") from error
        except MokError:
            raise
        except Exception as error:
            raise DryRunError(f"Megatron refuses this command: {type(error).__name__}: {error}") from error
    return args


@contextlib.contextmanager
def _hardware(plan: Plan | None) -> Iterator[None]:
    """Let Megatron's checks see the planned GPUs, and Transformer Engine where it is missing."""
    import torch
    from megatron.core import utils
    from megatron.core.transformer.moe import moe_utils
    from packaging.version import Version

    with contextlib.ExitStack() as stack:
        if plan is not None and not torch.cuda.is_available():
            major, minor = plan.request.cluster.gpu.compute_capability.split(".")
            capability = (int(major), int(minor))
            properties = types.SimpleNamespace(major=capability[0], minor=capability[1])
            stack.enter_context(mock.patch.object(torch.cuda, "get_device_capability", lambda *_: capability))
            stack.enter_context(mock.patch.object(torch.cuda, "get_device_properties", lambda *_: properties))
        if plan is not None and importlib.util.find_spec("transformer_engine") is None:
            supported = Version(versions.TRANSFORMER_ENGINE.split(",")[0].removeprefix(">="))
            stack.enter_context(mock.patch.object(utils, "_te_version", supported))
            for name in ("permute", "permute_with_probs", "sort_chunks_by_index", "sort_chunks_by_index_with_probs"):
                stack.enter_context(mock.patch.object(moe_utils, f"fused_{name}", object()))
            stack.enter_context(mock.patch.object(moe_utils, "fused_unpermute", object()))
        yield


if __name__ == "__main__":
    sys.exit(main())
