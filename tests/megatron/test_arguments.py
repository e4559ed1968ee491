"""A real command line through Megatron's own parser, checks and configuration, as pretrain_gpt.py does it."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from mok_megatron import MokConfig
from tests.megatron import layers
from tests.megatron.once import run_once

COMMAND = """pretrain_gpt.py
    --num-layers 1 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --max-position-embeddings 16
    --micro-batch-size 1 --train-iters 1 --lr 1e-3 --tokenizer-type NullTokenizer --vocab-size 64 --bf16
    --num-experts 8 --moe-ffn-hidden-size 48 --moe-router-topk 2 --swiglu --disable-bias-linear
    --transformer-impl local --no-gradient-accumulation-fusion --no-bias-swiglu-fusion
    --untie-embeddings-and-output-weights"""
MOK = """--moe-token-dispatcher-type mok --mok-backend reference --mok-minibatch-size 256 --mok-macrobatch-size 512
    --mok-fwd-comm-sms 6 --mok-bwd-comm-sms 8 --mok-num-sms 100 --mok-timeout-s 30"""

LINES = {
    "mok": f"{COMMAND} {MOK}",
    "mok, no settings": f"{COMMAND} --moe-token-dispatcher-type mok",
    "alltoall": f"{COMMAND} --moe-token-dispatcher-type alltoall",
    "bad setting": f"{COMMAND} --moe-token-dispatcher-type mok --mok-minibatch-size 100",
    "cannot work": f"{COMMAND} --moe-token-dispatcher-type mok "
    "--moe-apply-probs-on-input --moe-mlp-glu-interleave-size 32",
    "unknown dispatcher": f"{COMMAND} --moe-token-dispatcher-type mock",
    "unknown backend": f"{COMMAND} --moe-token-dispatcher-type mok --mok-backend fast",
}


def run(rank: int) -> dict[str, Any]:
    layers.start(rank)
    return {name: outcome(line) for name, line in LINES.items()}


def outcome(line: str) -> tuple[str, Any]:
    """The class of the layer that the command line makes and its settings, or the error and its message."""
    from megatron.training import global_vars
    from megatron.training.arguments import core_transformer_config_from_args, parse_args, validate_args

    sys.argv = line.split()
    try:
        args = parse_args()
        validate_args(args)
        global_vars._GLOBAL_ARGS = args
        built = layers.layer(core_transformer_config_from_args(args))
        return type(built).__name__, getattr(built.experts, "mok", None)
    except SystemExit as error:
        return "SystemExit", error.code
    except Exception as error:
        return type(error).__name__, str(error)
    finally:
        global_vars._GLOBAL_ARGS = None


def test_flags_reach_the_layer() -> None:
    expected = MokConfig(
        backend="reference",
        minibatch_size=256,
        macrobatch_size=512,
        fwd_comm_sms=6,
        bwd_comm_sms=8,
        num_sms=100,
        timeout_s=30.0,
    )
    assert run_once(1, run)[0]["mok"] == ("MokMoELayer", expected)


def test_settings_are_optional() -> None:
    assert run_once(1, run)[0]["mok, no settings"] == ("MokMoELayer", MokConfig())


def test_another_dispatcher_gets_megatrons_layer() -> None:
    assert run_once(1, run)[0]["alltoall"] == ("MoELayer", None)


@pytest.mark.parametrize("name", ["unknown dispatcher", "unknown backend"])
def test_the_parser_refuses_what_it_does_not_know(name: str) -> None:
    assert run_once(1, run)[0][name] == ("SystemExit", 2)


def test_a_setting_that_cannot_work() -> None:
    error, message = run_once(1, run)[0]["bad setting"]
    assert error == "MokConfigError"
    assert "--mok-minibatch-size 100 is not a positive multiple of 128; the nearest that works is 128" in message


def test_every_flag_that_cannot_work() -> None:
    error, message = run_once(1, run)[0]["cannot work"]
    assert error == "MokConfigError"
    assert "--moe-apply-probs-on-input is True" in message and "--moe-mlp-glu-interleave-size is 32" in message
