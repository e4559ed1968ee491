"""``python -m mok_megatron.pretrain``: pretrain a GPT model with the ``megatron.training`` of the installed wheel.

Takes Megatron-LM's own flags and this package's ``--mok-*`` ones, under torchrun or Slurm as Megatron's
``pretrain_gpt.py`` does; use that script where a Megatron-LM checkout is at hand. Where there is no GPU, the same code
runs on the CPU with gloo, in :mod:`mok_megatron.host` mode. Start with :func:`main`, which hands four things to
``megatron.training.pretrain``: the configuration, the datasets, and the step with its loss.
"""

import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from mok_megatron import host, register
from mok_megatron.errors import MokError, Problems

# What only a Megatron-LM checkout's own scripts build a model, data or a loss for.
ELSEWHERE = {
    "sft": "--sft",
    "fim_data": "--fim-data",
    "hybrid_context_parallel": "--hybrid-context-parallel",
    "hybrid_layer_pattern": "--hybrid-layer-pattern",
    "perform_rl_step": "--perform-rl-step",
    "modelopt_enabled": "--modelopt-enabled",
}
# Given before the user's flags, so that those win. What is switched off are kernels of Apex and Transformer Engine.
ON_CPU = (
    *("--distributed-backend", "gloo", "--num-workers", "0", "--transformer-impl", "local"),
    *("--no-persist-layer-norm", "--no-gradient-accumulation-fusion", "--no-masked-softmax-fusion", "--no-rope-fusion"),
)


class PretrainError(MokError):
    """The flags ask for something that this entry point cannot do."""


def main(argv: Sequence[str] | None = None) -> int:
    """Pretrain; returns the exit status (2: refused, with a message).

    Args:
        argv: Megatron's flags, by default those of the process.
    """
    flags = list(sys.argv[1:] if argv is None else argv)
    register()
    if not torch.cuda.is_available():
        host.enable(training=True)
        flags = [*ON_CPU, *flags]
    try:
        _pretrain(flags)
    except MokError as error:
        print(f"pretrain: {error}", file=sys.stderr)
        return 2
    return 0


def _pretrain(flags: list[str]) -> None:
    run(flags)
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


def run(flags: list[str]) -> None:
    """Everything but the end of the process group, for a process that trains several models one after another."""
    from megatron.core.enums import ModelType
    from megatron.training import pretrain

    from mok_megatron.training import moe_time
    from mok_megatron.training.wgrad import accumulate_with_transformer_engine

    skip_dataset_helper_build()
    accumulate_with_transformer_engine()
    args = parse(flags)
    provider: Any = build_datasets
    provider.is_distributed = True  # every rank takes part in building the datasets
    with moe_time.logged() if args.log_mok else contextlib.nullcontext():
        pretrain(configuration(args), provider, ModelType.encoder_or_decoder, forward_step)


def skip_dataset_helper_build() -> None:
    """Leave out Megatron's ``make`` of its dataset helper where it is compiled already.

    Megatron builds the helper at start-up from a Makefile that its wheel does not contain.

    Raises:
        PretrainError: the helper is neither compiled nor has a Makefile.
    """
    from pathlib import Path

    from megatron.core.datasets import utils

    if (Path(utils.__file__).parent / "Makefile").exists():
        return
    try:
        from megatron.core.datasets import helpers_cpp  # noqa: F401
    except ImportError as error:
        raise PretrainError(
            f"Megatron's dataset helper is not compiled: {error}. Install a megatron-core wheel made for this Python "
            "and machine, or build one from source: pip install --no-binary megatron-core megatron-core."
        ) from error
    utils.compile_helpers = lambda: None


def parse(flags: list[str]) -> Any:
    """Megatron's parsed and checked arguments, which also become its global ones.

    Raises:
        PretrainError: flags for which Megatron-LM's own scripts are needed.
        SystemExit: from Megatron's parser, on an unknown flag.
    """
    from megatron.training.arguments import parse_and_validate_args

    saved, sys.argv = sys.argv, [sys.argv[0], *flags]  # Megatron's parser reads sys.argv only
    try:
        args = parse_and_validate_args(args_defaults={"tokenizer_type": "GPT2BPETokenizer"})
    finally:
        sys.argv = saved
    _check(args)
    return args


def _check(args: Any) -> None:
    """Refuse, in one message, what would fail later or only on some ranks."""
    from megatron.core.datasets.indexed_dataset import IndexedDataset
    from megatron.training.utils import get_blend_and_blend_per_split

    problems = Problems()
    for name, flag in ELSEWHERE.items():
        problems.require(
            not getattr(args, name, None), f"{flag} is not supported here", "use a Megatron-LM checkout's own script"
        )
    blend, blend_per_split = get_blend_and_blend_per_split(args)
    for prefixes, _ in filter(None, [blend, *(blend_per_split or [])]):
        for prefix in prefixes:
            problems.require(
                "://" in prefix or IndexedDataset.exists(prefix),
                f"no dataset at {prefix}: {prefix}.bin and {prefix}.idx do not both exist",
                "give --data-path the prefix that Megatron's preprocessing wrote, or --mock-data",
            )
    if args.save is not None and "://" not in args.save:
        try:
            os.makedirs(args.save, exist_ok=True)
            writable = os.access(args.save, os.W_OK)
        except OSError:
            writable = False
        problems.require(writable, f"--save {args.save} cannot be written", "choose a writable folder")
    problems.raise_if_any(PretrainError, "these flags cannot be used:")


def configuration(args: Any) -> Any:
    """Megatron's configuration of the whole run, with the GPT model that the flags describe."""
    from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args

    from mok_megatron.training.attention import accept_mla_channels

    if args.transformer_impl == "local" and args.multi_latent_attention:
        accept_mla_channels()
    return pretrain_cfg_container_from_args(args, gpt_config_from_args(args))


def build_datasets(samples: list[int], vp_stage: int | None = None) -> tuple[Any, Any, Any]:
    """Training, validation and test datasets from ``--data-path`` and its kin, or ``--mock-data``.

    Args:
        samples: number of samples wanted of each.
        vp_stage: virtual pipeline stage, where there are several.
    """
    from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
    from megatron.training import get_args, get_tokenizer
    from megatron.training.utils import get_blend_and_blend_per_split

    args = get_args()
    blend, blend_per_split = get_blend_and_blend_per_split(args)
    sequences_per_dataset = None
    if args.per_dataset_sequences_path is not None:
        with open(args.per_dataset_sequences_path) as file:
            sequences_per_dataset = json.load(file)
    config = GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=blend,
        blend_per_split=blend_per_split,
        split=args.split,
        multiple_validation_sets=args.multiple_validation_sets,
        full_validation=args.full_validation,
        num_dataset_builder_threads=args.num_dataset_builder_threads,
        path_to_cache=args.data_cache_path,
        mmap_bin_files=args.mmap_bin_files,
        tokenizer=get_tokenizer(),
        reset_position_ids=args.reset_position_ids,
        reset_attention_mask=args.reset_attention_mask,
        eod_mask_loss=args.eod_mask_loss,
        create_attention_mask=args.create_attention_mask_in_dataloader,
        inter_document_masking=args.dataloader_inter_document_masking,
        object_storage_cache_path=args.object_storage_cache_path,
        mid_level_dataset_surplus=args.mid_level_dataset_surplus,
        allow_ambiguous_pad_tokens=args.allow_ambiguous_pad_tokens,
        fast_cache_load=args.dataloader_fast_cache_load,
        sequences_per_dataset=sequences_per_dataset,
        defer_npy_index_mmap=args.dataloader_defer_npy_index_mmap,
        context_parallel_size=args.context_parallel_size,
    )
    kind = MockGPTDataset if args.mock_data else GPTDataset
    reads = partial(_reads_data, vp_stage)
    built: tuple[Any, Any, Any] = BlendedMegatronDatasetBuilder(kind, samples, reads, config).build()
    return built


def forward_step(data: Iterator[Any], model: Any, return_schedule_plan: bool = False) -> tuple[Any, Callable[..., Any]]:
    """Megatron's forward step: the model's output (per-token losses [b, s] on the last stage) and the loss of it."""
    from megatron.core.utils import get_attr_wrapped_model
    from megatron.training import get_timers

    timer = get_timers()("batch-generator", log_level=2)
    timer.start()
    batch, packed = next_batch(data, get_attr_wrapped_model(model, "vp_stage"))
    timer.stop()
    inputs = (batch["tokens"], batch["position_ids"], batch["attention_mask"])
    options = {"labels": batch["labels"], "loss_mask": batch["loss_mask"]}
    if packed is not None:
        options["packed_seq_params"] = packed
    run = model.build_schedule_plan if return_schedule_plan else model
    return run(*inputs, **options), partial(loss, batch["loss_mask"])


def loss(mask: torch.Tensor, losses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Sum of the losses [b, s] of the tokens that count, their number, and both for the log.

    Raises:
        RuntimeError: from Megatron's rerun machinery, on a NaN or infinite loss where it checks for them.
    """
    from megatron.core.rerun_state_machine import get_rerun_state_machine
    from megatron.training import get_args

    weights = mask.reshape(-1).float()
    total = (losses.reshape(-1).float() * weights).sum()
    tokens = weights.sum().detach().to(torch.int)
    if get_args().check_for_nan_in_loss_and_grad:
        for test, name in ((torch.isnan, "NaN"), (torch.isinf, "infinity")):
            get_rerun_state_machine().validate_result(
                result=total, rejection_func=test, message=f"the loss is {name}", tolerance=0.0, fatal=True
            )
    return total, tokens, {"lm loss": torch.stack([total.detach(), tokens.float()])}


def next_batch(data: Iterator[Any], vp_stage: int | None) -> tuple[dict[str, Any], Any]:
    """This rank's share of the next microbatch, and the description of its packed documents (None if not packed).

    The first rank of each tensor-parallel group reads it and sends it to the others; context-parallel ranks take
    their part of the sequence. A pipeline stage gets what it needs and None for the rest.
    """
    from megatron.core import parallel_state
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.transformer.multi_token_prediction import mtp_on_this_rank
    from megatron.core.utils import (
        flatten_batch_for_packed_sequences,
        get_batch_on_this_cp_rank,
        get_batch_on_this_tp_rank,
    )
    from megatron.training import get_args

    args = get_args()
    packed = args.dataloader_inter_document_masking
    has_mtp = mtp_on_this_rank(args.pipeline_model_parallel_layout, args.mtp_num_layers, False, vp_stage)
    if not (_at_an_end(vp_stage) or has_mtp or packed):
        return dict.fromkeys(("tokens", "labels", "loss_mask", "position_ids", "attention_mask")), None
    tp_rank = parallel_state.get_tensor_model_parallel_rank()
    batch: dict[str, Any] = {}
    if tp_rank == 0:
        batch = dict.fromkeys(("attention_mask", "cu_seqlens", "cu_seqlens_padded", "max_seqlen", "local_cp_size"))
        batch |= {name: _to_device(value) for name, value in next(data).items()}
        batch["hybrid_cp_group"] = None
    cp_size = parallel_state.get_context_parallel_world_size()
    batch = get_batch_on_this_tp_rank(
        batch=batch,
        has_cu_seqlens=packed,
        is_hybrid_cp=False,
        create_attention_mask_in_dataloader=args.create_attention_mask_in_dataloader,
        broadcast_src_rank=parallel_state.get_tensor_model_parallel_src_rank(),
        broadcast_group=parallel_state.get_tensor_model_parallel_group(),
        cp_size=cp_size,
        tp_rank=tp_rank,
        micro_batch_size=args.micro_batch_size,
        seq_length=args.seq_length,
        mtp_on_this_rank=has_mtp,
        pipeline_model_parallel_size=parallel_state.get_pipeline_model_parallel_world_size(),
        is_pipeline_first_stage=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage),
        is_pipeline_last_stage=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage),
    )
    if packed:
        batch = flatten_batch_for_packed_sequences(batch)
    if cp_size > 1:
        batch = get_batch_on_this_cp_rank(
            batch,
            is_hybrid_cp=False,
            cp_group=parallel_state.get_context_parallel_group(),
            use_per_sequence_balancing=packed,
        )
    if not packed:
        return batch, None
    starts, longest = batch["cu_seqlens"][0], int(batch["max_seqlen"][0])
    return batch, PackedSeqParams("thd", starts, starts, max_seqlen_q=longest, max_seqlen_kv=longest)


def _to_device(value: Any) -> Any:
    return value.cuda(non_blocking=True) if torch.is_tensor(value) else value


def _at_an_end(vp_stage: int | None) -> bool:
    """True on the first and last pipeline stage, which read tokens and labels."""
    from megatron.training.utils import is_first_or_last_pipeline_stage

    return bool(is_first_or_last_pipeline_stage(vp_stage))


def _reads_data(vp_stage: int | None = None) -> bool:
    """True on the ranks that read a dataset: the first of each tensor-parallel group, where a stage needs data."""
    from megatron.core import parallel_state
    from megatron.core.transformer.multi_token_prediction import mtp_on_this_rank
    from megatron.training import get_args

    args = get_args()
    has_mtp = mtp_on_this_rank(args.pipeline_model_parallel_layout, args.mtp_num_layers, False, vp_stage)
    wanted = _at_an_end(vp_stage) or has_mtp or args.dataloader_inter_document_masking
    return wanted and parallel_state.get_tensor_model_parallel_rank() == 0


if __name__ == "__main__":
    sys.exit(main())
