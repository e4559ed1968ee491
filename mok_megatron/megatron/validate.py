"""Which Megatron configurations the fused layer can run, and the settings it runs with."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import logging
import os
import sys
from typing import Any

import torch
import torch.nn.functional as F

from mok_megatron import tuned, versions
from mok_megatron.config import MokConfig, config_from_args
from mok_megatron.errors import MokConfigError, Problems
from mok_megatron.megatron.fp8 import check_fp8, with_format
from mok_megatron.typed_yaml import ConfigFileError

logger = logging.getLogger(__name__)

ELEMENTWISE_OPTIMIZERS = ("adam", "sgd", "lion")
"""Optimizers that treat every element alike, so that [E_local, n, m] is as good as E_local parameters [n, m].
Megatron's others (muon, soap, ...) would silently fall back to Adam for a parameter that is not a matrix."""

SMS_FOR_NCCL = 8
"""SMs left free where Megatron overlaps data-parallel collectives with computation; how many are best: not measured."""

TITLE = "--moe-token-dispatcher-type mok cannot run this configuration:"


def prepare_config(config: Any) -> None:
    """Check a TransformerConfig with dispatcher type `mok`, before Megatron's own `__post_init__`.

    Raises:
        MokConfigError: listing every setting that cannot work, each with its remedy.
    """
    problems = Problems()
    core = versions.check("megatron-core")
    if core.problem:
        problems.add(core.problem, "or keep this version and choose another --moe-token-dispatcher-type")
    mok = _settings(config, problems)
    if config.num_moe_experts is not None:
        _check_experts(config, problems)
        _check_schedule_of_layer(config, problems)
        _check_precision(config, mok, problems)
    _check_training_arguments(megatron_args(), problems)
    problems.raise_if_any(MokConfigError, TITLE)
    if config.moe_shared_expert_overlap:
        # What the flag asks for happens anyway: the shared expert's tiles run while the first tokens arrive.
        logger.info("--moe-shared-expert-overlap has no effect with mok: its kernel always overlaps the shared expert")
        config.moe_shared_expert_overlap = False


def mok_config(config: Any) -> MokConfig:
    """The settings for a TransformerConfig: its attribute `mok` if set, else Megatron's --mok-* flags, else what
    `mok-megatron tune` measured for this layer, else defaults. The format follows from Megatron's --fp8-* flags.

    Raises:
        MokConfigError: settings that cannot work, or a tuned file that cannot be read.
    """
    explicit = getattr(config, "mok", None)
    args = megatron_args()
    if explicit is not None:
        return with_format(explicit, config, args)
    mok = with_format(MokConfig() if args is None else config_from_args(args), config, args)
    mok = _tuned(mok, config, args)
    return mok if args is None else _leave_room_for_nccl(mok, args)


def _tuned(mok: MokConfig, config: Any, args: argparse.Namespace | None) -> MokConfig:
    """`mok` with the tuned settings of this model's MoE layers, where nothing else was asked for."""
    if not config.num_moe_experts:
        return mok
    given = {entry.name for entry in dataclasses.fields(mok) if getattr(args, f"mok_{entry.name}", None) is not None}
    layer = (
        config.moe_latent_size or config.hidden_size,
        config.moe_ffn_hidden_size or config.ffn_hidden_size or 0,
        config.num_moe_experts,
        config.moe_router_topk,
        config.moe_shared_expert_intermediate_size or 0,
    )
    tokens = None
    if args is not None and getattr(args, "seq_length", None) and getattr(args, "micro_batch_size", None):
        ranks = config.tensor_model_parallel_size * config.context_parallel_size
        tokens = args.seq_length * args.micro_batch_size // ranks
    mok, line = tuned.apply(mok, given, config.expert_model_parallel_size, layer, tokens)
    if line is not None:
        _say_once(line)
    return mok


@functools.cache
def _say_once(line: str) -> None:
    """On rank 0 of the job, as Megatron's own messages: at its default level, logging would not show it."""
    if int(os.environ.get("RANK", "0")) == 0:
        print(line, flush=True)


def _leave_room_for_nccl(mok: MokConfig, args: argparse.Namespace) -> MokConfig:
    """Keep SMs free where data-parallel collectives run beside the layer, so that these go on while it runs.

    Nothing depends on it but speed: a launch ends also when others hold some of the SMs (docs/kernel.md, "Why it
    cannot deadlock"), but a persistent kernel with every SM lets no other begin before its end.
    """
    overlaps = any(getattr(args, flag, False) for flag in ("overlap_grad_reduce", "overlap_param_gather"))
    if not overlaps or not _has_replicas(args) or mok.num_sms is not None or mok.reserved_sms is not None:
        return mok
    return dataclasses.replace(mok, reserved_sms=SMS_FOR_NCCL)


def _has_replicas(args: argparse.Namespace) -> bool:
    """Whether a parameter is held by several ranks, experts or others, so that gradients are reduced at all."""
    stage = getattr(args, "world_size", 0) // (getattr(args, "pipeline_model_parallel_size", 1) or 1)
    tensor = getattr(args, "tensor_model_parallel_size", 1) or 1
    expert_tensor = getattr(args, "expert_tensor_parallel_size", None) or tensor
    expert = expert_tensor * (getattr(args, "expert_model_parallel_size", 1) or 1)
    return not tensor == expert == stage


def _settings(config: Any, problems: Problems) -> MokConfig | None:
    try:
        return mok_config(config)
    except ConfigFileError as error:
        problems.add(str(error), f"correct or remove this file, or set {tuned.FOLDER_ENV}={tuned.NONE}")
    except MokConfigError as error:
        problems.add(str(error), "change these flags")
    return None


def megatron_args() -> argparse.Namespace | None:
    """Megatron-LM's parsed arguments, where its training framework runs."""
    module = sys.modules.get("megatron.training.global_vars")
    return None if module is None else module._GLOBAL_ARGS


def _check_experts(config: Any, problems: Problems) -> None:
    problems.require(
        config.gated_linear_unit and config.activation_func is F.silu,
        "the experts' activation is not SwiGLU",
        "pass --swiglu (gated_linear_unit=True, activation_func=torch.nn.functional.silu)",
    )
    problems.require(not config.add_bias_linear, "the experts have biases", "pass --disable-bias-linear")
    for name, neutral in (
        ("activation_func_clamp_value", (None,)),
        ("glu_linear_offset", (0, 0.0)),
        ("moe_mlp_glu_interleave_size", (None,)),
        ("moe_apply_probs_on_input", (False,)),
        ("moe_single_grouped_weight", (False,)),
        ("moe_router_padding_for_quantization", (False,)),
        ("moe_router_padding_for_fp8", (False,)),
    ):
        value = getattr(config, name, neutral[0])
        remedy = "leave it out: it has no counterpart in the kernel"
        problems.require(value in neutral, f"{_flag(name)} is {value}", remedy)
    experts, ep = config.num_moe_experts, config.expert_model_parallel_size
    for flag, value in (("--num-experts", experts), ("--expert-model-parallel-size", ep)):
        problems.require(_is_count(value), f"{flag} is {value!r}", "give a whole number from 1")
    if _is_count(experts) and _is_count(ep):
        problems.require(
            experts % ep == 0,
            f"--num-experts {experts} does not divide by --expert-model-parallel-size {ep}",
            "change one of them",
        )
    etp = config.expert_tensor_parallel_size
    # Megatron sets the expert tensor parallel size to the tensor parallel size where it is not given.
    etp = config.tensor_model_parallel_size if etp is None else etp
    problems.require(
        etp == 1,
        f"the experts are split over {etp} tensor parallel ranks",
        "pass --expert-tensor-parallel-size 1; more expert parallelism splits them further",
    )
    shards = max(config.expert_tensor_parallel_num_weight_shards or 1, config.expert_gtp_weight_remat_size)
    problems.require(
        etp != 1 or shards == 1,
        f"--expert-tensor-parallel-num-weight-shards {shards} splits the experts' weights",
        "leave it out; more expert parallelism splits them further",
    )


def _check_schedule_of_layer(config: Any, problems: Problems) -> None:
    """Options that take the layer apart: dispatch, products and combine are one kernel here."""
    for name, remedy in (
        ("overlap_moe_expert_parallel_comm", "leave it out: the kernel overlaps communication inside the layer"),
        ("overlap_dispatch_backward_with_experts_wgrad", "leave it out: the kernel does this itself"),
        ("delay_wgrad_compute", "leave it out: weight gradients are the tail of the backward kernel"),
        ("moe_paged_stash", "leave it out: --mok-macrobatch-size bounds the memory of activations"),
    ):
        problems.require(not getattr(config, name, False), f"{_flag(name)} is set", remedy)
    offloaded = {"expert_fc1", "moe_act", "fused_group_mlp"} & set(config.offload_modules or ())
    problems.require(
        not (config.fine_grained_activation_offloading and offloaded),
        f"--offload-modules names {', '.join(sorted(offloaded))}",
        "take them out: the fused layer keeps no such activations apart",
    )
    modules = config.cuda_graph_modules
    listed = modules.split(",") if isinstance(modules, str) else modules if isinstance(modules, list) else [modules]
    names = {getattr(name, "name", name) for name in listed if name}
    problems.require(
        config.cuda_graph_impl not in ("local", "transformer_engine") or (bool(names) and not names & {"moe", "full"}),
        f"--cuda-graph-impl {config.cuda_graph_impl} captures the whole MoE layer",
        "name what to capture: --cuda-graph-modules attn moe_router moe_preprocess",
    )
    problems.require(
        config.transformer_impl != "inference_optimized",
        "--transformer-impl inference_optimized has dispatchers of its own",
        "use transformer_engine or local",
    )


def _check_precision(config: Any, mok: MokConfig | None, problems: Problems) -> None:
    fp4 = getattr(config, "fp4", None)
    problems.require(not fp4, f"--fp4-format is {fp4}", "the fused layer computes in bf16 or FP8; leave it out")
    check_fp8(config, mok, megatron_args(), problems)
    if mok is None or mok.backend == "reference" or not torch.cuda.is_available():
        return
    problems.require(
        config.bf16,
        "the megakernel computes in bf16, and the model does not",
        "pass --bf16, or --mok-backend reference",
    )
    hidden = config.moe_latent_size or config.hidden_size
    inner = config.moe_ffn_hidden_size or config.ffn_hidden_size
    for name, size in (("hidden size", hidden), ("expert intermediate size", inner)):
        if size is not None:
            problems.require(size % 64 == 0, f"the {name} {size} is not a multiple of 64", f"use {-(-size // 64) * 64}")


def _check_training_arguments(args: argparse.Namespace | None, problems: Problems) -> None:
    for flag, remedy in (
        ("use_megatron_fsdp", "use --use-distributed-optimizer: the kernel needs whole expert weights"),
        ("use_torch_fsdp2", "use --use-distributed-optimizer: the kernel needs whole expert weights"),
        ("moe_use_upcycling", "convert the checkpoint under another dispatcher, then load it under mok"),
    ):
        problems.require(not getattr(args, flag, False), f"{_flag(flag)} is set", remedy)
    optimizer = getattr(args, "optimizer", "adam")
    problems.require(
        optimizer in ELEMENTWISE_OPTIMIZERS,
        f"--optimizer {optimizer} treats each weight matrix as a whole, and the experts of a rank are one parameter",
        f"choose one of {', '.join(ELEMENTWISE_OPTIMIZERS)}",
    )


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
