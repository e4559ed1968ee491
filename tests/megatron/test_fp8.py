"""FP8 through Megatron's own flags: what they ask of the layer, what is refused, and when weights are quantised."""

from __future__ import annotations

import argparse
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.transformer import TransformerConfig

from mok_megatron import MokConfig, versions
from mok_megatron.errors import MokConfigError
from mok_megatron.megatron import fp8
from mok_megatron.megatron.validate import mok_config, prepare_config
from tests.megatron import layers
from tests.megatron.once import run_once
from tests.megatron.test_refusals import GOOD, lines

SIZES = {"hidden_size": 128, "moe_ffn_hidden_size": 256}
FP8 = {"fp8": "e4m3", "fp8_recipe": "blockwise"}


@pytest.fixture(autouse=True)
def engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if a Transformer Engine that is new enough were installed."""
    found = versions.installed
    monkeypatch.setattr(versions, "installed", lambda name: "2.20.2" if name == "transformer-engine" else found(name))


def unchecked(**fields: Any) -> TransformerConfig:
    """A configuration as the flags made it; Megatron's own checks need Transformer Engine itself."""
    config = TransformerConfig(**{**GOOD, **SIZES, "moe_token_dispatcher_type": "alltoall"})
    for name, value in {**fields, "moe_token_dispatcher_type": "mok"}.items():
        setattr(config, name, value)
    return config


def arguments(monkeypatch: pytest.MonkeyPatch, **values: Any) -> None:
    module = SimpleNamespace(_GLOBAL_ARGS=argparse.Namespace(**values))
    monkeypatch.setitem(sys.modules, "megatron.training.global_vars", module)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, ("bf16", "e4m3", "power_of_two")),
        ({"fp8_recipe": "mxfp8"}, ("bf16", "e4m3", "power_of_two")),
        (FP8, ("blockwise", "e4m3", "power_of_two")),
        ({"fp8": "hybrid", "fp8_recipe": "mxfp8"}, ("mxfp8", "e5m2", "power_of_two")),
    ],
)
def test_the_format_is_that_of_megatrons_flags(fields: dict[str, Any], expected: tuple[str, ...]) -> None:
    config = unchecked(**fields)
    prepare_config(config)
    mok = mok_config(config)
    assert (mok.format, mok.fp8_gradients, mok.fp8_scales) == expected
    assert mok.minibatch_size == MokConfig().minibatch_size


def test_scales_follow_the_environment_of_transformer_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(fp8.FP32_SCALES_ENV, "1")
    assert mok_config(unchecked(**FP8, fp8_wgrad=False)).fp8_scales == "fp32"
    assert mok_config(unchecked(fp8="e4m3", fp8_recipe="mxfp8")).fp8_scales == "power_of_two"


def test_the_type_of_weight_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    default = MokConfig().fp8_wgrad
    assert mok_config(unchecked(**FP8)).fp8_wgrad == default
    arguments(monkeypatch, mok_fp8_wgrad="fp8")
    assert mok_config(unchecked(**FP8)).fp8_wgrad == "fp8"
    arguments(monkeypatch, mok_fp8_wgrad=None)
    assert mok_config(unchecked(**FP8, fp8_wgrad=False)).fp8_wgrad == "bf16"


@pytest.mark.parametrize(
    ("fields", "values", "expected"),
    [
        ({**FP8, "fp8_recipe": "delayed"}, {}, "--fp8-recipe delayed has no block scales"),
        ({**FP8, "fp8_recipe": "tensorwise"}, {}, "pass --fp8-recipe blockwise or mxfp8, or leave out --fp8-format"),
        ({**FP8, "fp8_recipe": "custom"}, {}, "--fp8-recipe custom"),
        ({**FP8, "fp8_param": True}, {}, "--fp8-param-gather keeps parameters in FP8 alone"),
        ({**FP8, "fp8_wgrad": False}, {"mok_fp8_wgrad": "fp8"}, "--no-fp8-wgrad and --mok-fp8-wgrad fp8 contradict"),
        ({}, {"mok_fp8_wgrad": "fp8"}, "--mok-fp8-wgrad fp8 is given, and the layer computes in bf16"),
        ({}, {"mok_fp8_shared": "fp8"}, "--mok-fp8-shared fp8 is given, and the layer computes in bf16"),
        (
            {**FP8, "moe_shared_expert_intermediate_size": 96},
            {"mok_fp8_shared": "fp8"},
            "the shared expert intermediate size 96 is not a multiple of 128",
        ),
        ({**FP8, "moe_ffn_hidden_size": 192}, {}, "intermediate size 192 is not a multiple of 128"),
        (
            {**FP8, "hidden_size": 200},
            {},
            "the hidden size 200 is not a multiple of 128, the block of blockwise; use 256",
        ),
        (
            {**FP8, "fp8_recipe": "mxfp8", "hidden_size": 72},
            {},
            "72 is not a multiple of 32, the block of mxfp8; use 96",
        ),
    ],
    ids=lambda value: str(value)[:50],
)
def test_refusals(
    monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any], values: dict[str, Any], expected: str
) -> None:
    arguments(monkeypatch, **values)
    with pytest.raises(MokConfigError) as refused:
        prepare_config(unchecked(**fields))
    assert expected in str(refused.value)
    assert len(lines(str(refused.value))) == 1


def test_fp32_scales_and_fp8_weight_gradients_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(fp8.FP32_SCALES_ENV, "1")
    arguments(monkeypatch, mok_fp8_wgrad="fp8")
    with pytest.raises(MokConfigError, match="pass --mok-fp8-wgrad bf16, or keep scales at powers of two"):
        prepare_config(unchecked(**FP8))


@pytest.mark.parametrize("found", [None, "2.3.0"])
def test_transformer_engine_missing_or_too_old(monkeypatch: pytest.MonkeyPatch, found: str | None) -> None:
    megatron = versions.installed("megatron-core")
    monkeypatch.setattr(versions, "installed", lambda name: found if name == "transformer-engine" else megatron)
    with pytest.raises(MokConfigError, match=r"through Transformer Engine. transformer-engine .*>=2.20.2"):
        prepare_config(unchecked(**FP8))


def test_what_the_megakernel_does_not_have_is_refused_at_start_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (12, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "a GPU")
    with pytest.raises(MokConfigError, match="the megakernel on compute capability 12.0 does not compute in blockwise"):
        prepare_config(unchecked(**FP8, bf16=True))


def test_where_transformer_engine_has_no_mxfp8_its_reason_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    available = [False, "capability 10.0 is needed"]
    engine = SimpleNamespace(is_mxfp8_available=lambda return_reason: tuple(available))
    monkeypatch.setitem(sys.modules, "transformer_engine", SimpleNamespace(pytorch=engine))
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch", engine)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "a GPU")
    flags = {"fp8": "hybrid", "fp8_recipe": "mxfp8", "bf16": True}
    with pytest.raises(MokConfigError, match=r"which says: capability 10.0 is needed.*config.mok = MokConfig"):
        prepare_config(unchecked(**flags))
    available[0] = True
    prepare_config(unchecked(**flags))


def test_a_program_may_choose_the_format_itself() -> None:
    config = unchecked()
    config.mok = MokConfig(format="mxfp8")  # type: ignore[attr-defined]
    assert mok_config(config).format == "mxfp8"
    config.fp8, config.fp8_recipe = "hybrid", "blockwise"  # and Megatron's flags win
    assert (mok_config(config).format, mok_config(config).fp8_gradients) == ("blockwise", "e5m2")


def test_first_and_last_layers_in_bf16() -> None:
    config = unchecked(**FP8, num_layers=4, first_last_layers_bf16=True)
    config.num_layers_at_start_in_bf16, config.num_layers_at_end_in_bf16 = 1, 2
    assert [fp8.is_bf16_layer(config, number, False) for number in (1, 2, 3, 4)] == [True, False, True, True]
    assert not fp8.is_bf16_layer(config, 1, True) and not fp8.is_bf16_layer(config, None, False)


def on_one_rank(rank: int) -> dict[str, Any]:
    """Everything that needs a built layer or a model, in one start of Megatron."""
    layers.start(rank)
    return {"layer": _layer(), "first microbatch": _first_microbatch(), "checkpoint": _checkpoint()}


def _built(**fields: Any) -> Any:
    config = layers.config("mok", **SIZES, **fields)
    config.mok = MokConfig(format="blockwise")
    return layers.layer(config)


def _layer() -> dict[str, bool]:
    tokens = torch.randn(5, 2, 128, generator=torch.Generator().manual_seed(1))
    built = _built(first_last_layers_bf16=True, num_layers_at_start_in_bf16=0, num_layers_at_end_in_bf16=0)
    plain = layers.layer(layers.config("mok", **SIZES))
    layers.copy_weights(plain, built)
    quantised = built(tokens)[0]
    built.config.num_layers_at_start_in_bf16 = 1
    kept = built(tokens)[0]
    return {"differs": not torch.equal(quantised, plain(tokens)[0]), "same": torch.equal(kept, plain(tokens)[0])}


def _first_microbatch() -> list[bool]:
    """Whether the layer notices a weight written through `.data`: not by itself, but when Megatron says so."""
    tokens = torch.randn(5, 2, 128, generator=torch.Generator().manual_seed(1))
    built = _built()
    before = built(tokens)[0]
    assert not built.experts.is_first_microbatch
    built.experts.weight2.data.mul_(2)
    unnoticed = built(tokens)[0]
    built.experts.is_first_microbatch = True
    return [torch.equal(unnoticed, before), torch.equal(built(tokens)[0], 2 * before)]


def _checkpoint() -> str:
    built = _built()
    state = built.state_dict()
    state["experts.weight1"] = state["experts.weight1"].to(torch.float8_e4m3fn)
    try:
        built.load_state_dict(state)
    except MokConfigError as error:
        return str(error)
    return "loaded"


def test_weights_are_quantised_again_at_the_first_microbatch() -> None:
    assert run_once(1, on_one_rank)[0]["first microbatch"] == [True, True]


def test_layers_kept_in_bf16_compute_in_bf16() -> None:
    assert run_once(1, on_one_rank)[0]["layer"] == {"differs": True, "same": True}


def test_a_checkpoint_with_fp8_weights_is_refused() -> None:
    assert "weight1 is torch.float8_e4m3fn; store it dequantised" in run_once(1, on_one_rank)[0]["checkpoint"]
