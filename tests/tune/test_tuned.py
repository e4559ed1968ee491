"""Tuned files: which one a layer gets, what stays the user's, and what a broken one says."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path

import pytest
from megatron.core.transformer.transformer_config import TransformerConfig

from mok_megatron import tuned
from mok_megatron.config import MokConfig
from mok_megatron.errors import MokConfigError
from mok_megatron.megatron import validate
from mok_megatron.tune.report import write_tuned
from mok_megatron.tuned import Measured, Milliseconds, TunedFile, TunedSettings, TunedShape
from mok_megatron.typed_yaml import ConfigFileError

GPU = "NVIDIA H200"
SHAPE = TunedShape(tokens=4096, hidden=128, intermediate=64, experts=8, topk=2, shared=64)
FILE = TunedFile(
    GPU,
    2,
    "bf16",
    SHAPE,
    TunedSettings(minibatch_size=2048, fwd_comm_sms=4, bwd_comm_sms=0, macrobatch_size=4096),
    Measured("2026-11-30", "tune", "abc", {"torch": "2.11.0"}, 0.0, 9, Milliseconds(2.0, 4.0), Milliseconds(1.9, 4.0)),
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's folder with one file, on a machine with that GPU."""
    monkeypatch.setenv(tuned.FOLDER_ENV, str(tmp_path))
    monkeypatch.setattr(tuned, "gpu_name", lambda: GPU)
    write_tuned(FILE, tmp_path, "small")
    return tmp_path


def apply(given: set[str] = frozenset(), tokens: int | None = 4096, **config: object) -> tuple[MokConfig, str | None]:  # type: ignore[assignment]
    return tuned.apply(MokConfig(**config), set(given) | set(config), 2, SHAPE.layer, tokens)  # type: ignore[arg-type]


def test_folder_names() -> None:
    assert tuned.folder_name("NVIDIA H200") == "h200"
    assert tuned.folder_name("NVIDIA H100 80GB HBM3") == "h100-80gb-hbm3"


def test_a_layer_gets_its_file_and_says_so(folder: Path) -> None:
    config, line = apply()
    assert (config.minibatch_size, config.fwd_comm_sms, config.bwd_comm_sms) == (2048, 4, 0)
    assert config.macrobatch_size == 4096
    assert line is not None and str(folder / "h200" / "small-ep2.yaml") in line
    assert "--mok-minibatch-size 2048 --mok-fwd-comm-sms 4 --mok-bwd-comm-sms 0 --mok-macrobatch-size 4096" in line


@pytest.mark.parametrize(
    ("change", "ep"),
    [({}, 4), ({"hidden": 256}, 2), ({"intermediate": 128}, 2), ({"topk": 1}, 2), ({"shared": 0}, 2)],
)
def test_another_layer_or_ep_gets_nothing(folder: Path, change: dict[str, int], ep: int) -> None:
    layer = dataclasses.replace(SHAPE, **change).layer
    assert tuned.apply(MokConfig(), set(), ep, layer) == (MokConfig(), None)


def test_without_a_gpu_on_the_reference_or_switched_off_nothing_is_taken(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert apply(backend="reference") == (MokConfig(backend="reference"), None)
    assert apply(format="mxfp8") == (MokConfig(format="mxfp8"), None)
    monkeypatch.setattr(tuned, "gpu_name", lambda: "NVIDIA B200")
    assert apply() == (MokConfig(), None)
    monkeypatch.setattr(tuned, "gpu_name", lambda: None)
    assert apply() == (MokConfig(), None)
    monkeypatch.setattr(tuned, "gpu_name", lambda: GPU)
    monkeypatch.setenv(tuned.FOLDER_ENV, tuned.NONE)
    assert apply() == (MokConfig(), None)


def test_what_is_given_stays(folder: Path) -> None:
    config, line = apply(fwd_comm_sms=8)
    assert (config.fwd_comm_sms, config.minibatch_size) == (8, 2048)
    assert line is not None and "--mok-fwd-comm-sms" not in line
    # Rows of minibatch and macrobatch go together.
    config, _ = apply(macrobatch_size=1024)
    assert (config.minibatch_size, config.macrobatch_size, config.fwd_comm_sms) == (1024, 1024, 4)


@pytest.mark.parametrize("tokens", [None, 8192])
def test_a_macrobatch_is_for_its_number_of_tokens(folder: Path, tokens: int | None) -> None:
    config, line = apply(tokens=tokens)
    assert config.macrobatch_size is None and config.minibatch_size == 2048
    assert line is not None and "not its macrobatch of 4096 rows, which is for 4096 tokens" in line


def test_of_several_the_nearest_tokens_are_taken(folder: Path) -> None:
    shape = dataclasses.replace(SHAPE, tokens=16384)
    settings = TunedSettings(512, 0, 0)
    write_tuned(dataclasses.replace(FILE, shape=shape, settings=settings), folder, "long")
    assert apply(tokens=16000)[0].minibatch_size == 512
    assert apply(tokens=5000)[0].minibatch_size == 2048


def test_the_users_folder_comes_before_the_packages(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    package = tmp_path_factory.mktemp("package")
    write_tuned(dataclasses.replace(FILE, settings=TunedSettings(128, 0, 0)), package, "small")
    name = Path("h200", "small-ep2.yaml")
    assert tuned.find(GPU, 2, "bf16", SHAPE.layer, 4096, (folder, package)) == folder / name
    assert tuned.find(GPU, 2, "bf16", SHAPE.layer, 4096, (folder / "none", package)) == package / name


def test_settings_that_do_not_go_with_the_flags_name_both(folder: Path) -> None:
    with pytest.raises(MokConfigError, match=r"small-ep2.yaml do not go with .* --mok-num-sms 4 .*MOK_TUNED_DIR=none"):
        apply(num_sms=4)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("minibatch_size: 2048", "minibatch_size: 100", r"line \d+: settings.minibatch_size: .*not a positive mult"),
        ("minibatch_size: 2048", "minibatch_size: many", r"line \d+: settings.minibatch_size: needs a whole number"),
        ("  fwd_comm_sms: 4\n", "", r"line \d+: settings: lacks the key 'fwd_comm_sms'"),
        ("fwd_comm_sms: 4", "fwd_sms: 4", r"unknown key 'fwd_sms'"),
        ("ep: 2", "ep: 3", r"ep: is 3, which does not divide the 8 experts"),
        ("gpu: NVIDIA", "gpu: !!python/name:os.system NVIDIA", r"line \d+"),
        ("shape:", "shape: [", r"does not parse as YAML"),
    ],
)
def test_a_broken_file_is_named(folder: Path, old: str, new: str, words: str) -> None:
    path = folder / "h200" / "small-ep2.yaml"
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))
    with pytest.raises(ConfigFileError, match=words) as refused:
        apply()
    assert str(path) in str(refused.value)


MODEL = {
    "num_layers": 1,
    "hidden_size": 128,
    "num_attention_heads": 4,
    "num_moe_experts": 8,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 64,
    "moe_shared_expert_intermediate_size": 64,
    "expert_model_parallel_size": 2,
    "moe_token_dispatcher_type": "mok",
    "gated_linear_unit": True,
    "add_bias_linear": False,
    "bf16": True,
}


def model() -> TransformerConfig:
    import torch

    return TransformerConfig(**MODEL, activation_func=torch.nn.functional.silu)


def megatron_arguments(monkeypatch: pytest.MonkeyPatch, **given: object) -> None:
    args = argparse.Namespace(seq_length=2048, micro_batch_size=2, **given)
    monkeypatch.setattr(validate, "megatron_args", lambda: args)


def test_the_plugin_takes_the_file_once_aloud(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    validate._say_once.cache_clear()
    megatron_arguments(monkeypatch)
    for _ in range(3):
        assert validate.mok_config(model()).macrobatch_size == 4096
    assert capsys.readouterr().out.count("mok: tuned settings of") == 1
    megatron_arguments(monkeypatch, mok_minibatch_size=256)
    config = validate.mok_config(model())
    assert (config.minibatch_size, config.macrobatch_size, config.fwd_comm_sms) == (256, None, 4)


def test_other_ranks_are_silent(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    validate._say_once.cache_clear()
    monkeypatch.setenv("RANK", "1")
    assert validate.mok_config(model()).minibatch_size == 2048
    assert capsys.readouterr().out == ""


def test_a_broken_file_stops_the_start_with_its_remedy(folder: Path) -> None:
    path = folder / "h200" / "small-ep2.yaml"
    path.write_text("gpu: 3\n")
    with pytest.raises(MokConfigError, match=rf"{path}, line 1: .*; correct or remove this file, or set MOK_TUNED_DIR"):
        model()


def test_what_is_shipped_can_be_read() -> None:
    from mok_megatron.resources import data_folder

    for path in (data_folder("configs") / "tuned").rglob("*.yaml"):
        found = tuned.load(path)
        assert path.parent.name == tuned.folder_name(found.gpu)
        assert path.stem.endswith(f"-ep{found.ep}")
