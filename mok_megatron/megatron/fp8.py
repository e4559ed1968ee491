"""Megatron's own FP8 flags, and what they ask of the fused layer (docs/formats.md)."""

from __future__ import annotations

import argparse
import dataclasses
import os
from typing import Any

import torch

from mok_megatron import versions
from mok_megatron.config import MokConfig
from mok_megatron.errors import Problems
from mok_megatron.formats import BLOCK_LENGTH
from mok_megatron.ops.backend import backend_name
from mok_megatron.ops.formats import check_format

GRADIENTS = {"e4m3": "e4m3", "hybrid": "e5m2"}
"""--fp8-format -> the type of gradients."""

FP32_SCALES_ENV = "NVTE_FP8_BLOCK_SCALING_FP32_SCALES"
"""By which Transformer Engine's `blockwise` recipe takes fp32 scales; the fused layer follows it."""


def with_format(mok: MokConfig, config: Any, args: argparse.Namespace | None) -> MokConfig:
    """`mok` with the format that a TransformerConfig asks for, as far as it can be had; `check_fp8` finds the rest.

    Without --fp8-format it stays what it is, so that a program may set `config.mok` to a format by itself.
    """
    recipe = recipe_name(config)
    if not config.fp8 or recipe not in BLOCK_LENGTH:
        return mok
    fp32_scales = recipe == "blockwise" and os.environ.get(FP32_SCALES_ENV, "0") == "1"
    given = getattr(args, "mok_fp8_wgrad", None) is not None
    return dataclasses.replace(
        mok,
        format=recipe,
        fp8_gradients=GRADIENTS.get(config.fp8, "e4m3"),
        fp8_scales="fp32" if fp32_scales else "power_of_two",
        fp8_wgrad=mok.fp8_wgrad if config.fp8_wgrad or given else "bf16",
    )


def check_fp8(config: Any, mok: MokConfig | None, args: argparse.Namespace | None, problems: Problems) -> None:
    """Notes what stops the layer from running in the FP8 that a TransformerConfig asks for.

    Args:
        config: of Megatron.
        mok: the layer's settings, from `with_format`; None if they could not be made.
        args: Megatron-LM's, where its training framework runs.
        problems: where to note it.
    """
    wgrad = getattr(args, "mok_fp8_wgrad", None)
    if not config.fp8:
        for flag, value in (("--mok-fp8-wgrad", wgrad), ("--mok-fp8-shared", getattr(args, "mok_fp8_shared", None))):
            problems.require(
                value is None or (mok is not None and mok.format != "bf16"),
                f"{flag} {value} is given, and the layer computes in bf16",
                "leave it out, or pass --fp8-format e4m3 --fp8-recipe blockwise (or mxfp8)",
            )
    else:
        _check_flags(config, wgrad, problems)
    if mok is None or mok.format == "bf16":
        return
    length = BLOCK_LENGTH[mok.format]
    sizes = [
        ("hidden size", config.moe_latent_size or config.hidden_size),
        ("expert intermediate size", config.moe_ffn_hidden_size or config.ffn_hidden_size),
    ]
    if mok.fp8_shared == "fp8":
        sizes.append(("shared expert intermediate size", config.moe_shared_expert_intermediate_size))
    for name, size in sizes:
        if size is not None:
            problems.require(
                size % length == 0,
                f"the {name} {size} is not a multiple of {length}, the block of {mok.format}",
                f"use {-(-size // length) * length}, or another --fp8-recipe",
            )
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    name = backend_name(mok, device)
    if name == "reference" or device.type == "cuda":  # the megakernel without a GPU is refused when it is called
        check_format(mok, name, device, problems)


def is_bf16_layer(config: Any, layer_number: int | None, is_mtp_layer: bool) -> bool:
    """Whether --first-last-layers-bf16 keeps this layer out of FP8. Megatron counts layers from 1, and knows no number
    for those of multi-token prediction, which it runs in FP8."""
    from megatron.core.fp8_utils import is_first_last_bf16_layer

    if is_mtp_layer or layer_number is None:
        return False
    return is_first_last_bf16_layer(config, layer_number - 1)


def _check_flags(config: Any, wgrad: str | None, problems: Problems) -> None:
    recipe = recipe_name(config)
    problems.require(
        recipe in BLOCK_LENGTH,
        f"--fp8-recipe {recipe} has no block scales, and the fused layer computes in FP8 with block scales alone",
        f"pass --fp8-recipe {' or '.join(sorted(BLOCK_LENGTH))}, or leave out --fp8-format",
    )
    problems.require(
        config.fp8 in GRADIENTS,
        f"--fp8-format {config.fp8} is unknown to the fused layer",
        f"choose one of {', '.join(GRADIENTS)}",
    )
    problems.require(
        not config.fp8_param,
        "--fp8-param-gather keeps parameters in FP8 alone, and both FP8 copies of an expert's weight are made from its "
        "bf16 parameter",
        "leave it out: parameters are then gathered in bf16 and quantised once an optimizer step",
    )
    problems.require(
        config.fp8_wgrad or wgrad != "fp8",
        "--no-fp8-wgrad and --mok-fp8-wgrad fp8 contradict each other",
        "leave out one of them",
    )
    engine = versions.check("transformer-engine", versions.TRANSFORMER_ENGINE)
    if recipe == "mxfp8" and not engine.problem and torch.cuda.is_available():
        from transformer_engine.pytorch import is_mxfp8_available

        available, reason = is_mxfp8_available(return_reason=True)
        problems.require(
            available,
            f"--fp8-recipe mxfp8: the layers around the experts are Transformer Engine's, which says: {reason}",
            "pass --fp8-recipe blockwise; or, for the experts alone, leave out --fp8-format and set config.mok = "
            'MokConfig(format="mxfp8")',
        )
    if engine.problem:
        problems.add(
            f"--fp8-format {config.fp8}: the layers around the experts compute in FP8 through Transformer Engine. "
            + engine.problem,
            "or leave out --fp8-format",
        )


def recipe_name(config: Any) -> str:
    """--fp8-recipe as text; the field holds an enumeration's member in some versions of Megatron."""
    return str(getattr(config.fp8_recipe, "value", config.fp8_recipe))
