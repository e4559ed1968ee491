"""MokConfig: its refusals, its flags, its environment variable."""

import argparse
import dataclasses
import math

import pytest

from mok_megatron.config import TILE_ROWS, MokConfig, add_flags, config_from_args
from mok_megatron.errors import MokConfigError


def parse(*words: str) -> MokConfig:
    return config_from_args(add_flags(argparse.ArgumentParser()).parse_args(words))


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"backend": "cuda"}, "--mok-backend 'cuda' is unknown; choose one of auto, megakernel, reference"),
        ({"minibatch_size": 0}, "--mok-minibatch-size 0 is not a positive multiple of 128; .*works is 128"),
        ({"minibatch_size": -128}, "--mok-minibatch-size -128 is not a positive multiple of 128; .*works is 128"),
        ({"minibatch_size": 1000}, "--mok-minibatch-size 1000 is not a positive multiple of 128; .*works is 1024"),
        ({"macrobatch_size": 0}, "--mok-macrobatch-size 0 is not a positive multiple of 1024; .*works is 1024"),
        ({"macrobatch_size": 2500}, "--mok-macrobatch-size 2500 is not a positive multiple of 1024; .*is 2048"),
        ({"fwd_comm_sms": -1}, "--mok-fwd-comm-sms is -1; give 0 or more"),
        ({"bwd_comm_sms": -1}, "--mok-bwd-comm-sms is -1; give 0 or more"),
        ({"reserved_sms": -1}, "--mok-reserved-sms is -1; give 0 or more"),
        ({"num_sms": 8, "bwd_comm_sms": 8}, "--mok-num-sms 8 leaves no SM .* 8 that communicate; give at least 9"),
        ({"timeout_s": 0}, "--mok-timeout-s .*is 0; give a positive, finite number of seconds"),
        ({"timeout_s": math.inf}, "--mok-timeout-s .*is inf; give a positive, finite number of seconds"),
        ({"timeout_s": math.nan}, "--mok-timeout-s .*is nan; give a positive, finite number of seconds"),
    ],
)
def test_a_value_that_cannot_work_is_refused_with_its_flag_and_remedy(settings: dict, message: str) -> None:
    with pytest.raises(MokConfigError, match=message) as refusal:
        MokConfig(**settings)
    assert "\n  2. " not in str(refusal.value)  # one mistake, one line


def test_all_mistakes_come_in_one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOK_TIMEOUT_S", "soon")
    with pytest.raises(MokConfigError) as refusal:
        MokConfig("gpu", minibatch_size=100, macrobatch_size=300, fwd_comm_sms=-1, bwd_comm_sms=-1, num_sms=-1)
    text = str(refusal.value)
    for flag in ("backend", "minibatch-size", "macrobatch-size", "fwd-comm-sms", "bwd-comm-sms", "num-sms"):
        assert f"--mok-{flag} " in text
    assert "MOK_TIMEOUT_S='soon' is not a number" in text
    assert "\n  7. " in text and "\n  8. " not in text
    # The minibatch is wrong itself, so it is no measure for the macrobatch.
    assert "--mok-macrobatch-size 300 is not a positive multiple of 128" in text


def test_smallest_values_that_work() -> None:
    MokConfig(minibatch_size=TILE_ROWS, macrobatch_size=TILE_ROWS, fwd_comm_sms=0, bwd_comm_sms=0, num_sms=1)


def test_settings_cannot_be_changed_afterwards() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        MokConfig().backend = "reference"  # type: ignore[misc]


def test_flags_not_given_keep_the_defaults() -> None:
    assert parse() == MokConfig()


def test_every_flag_arrives_in_its_field() -> None:
    given = {
        "backend": "reference",
        "minibatch_size": 256,
        "macrobatch_size": 512,
        "fwd_comm_sms": 3,
        "bwd_comm_sms": 5,
        "num_sms": 77,
        "reserved_sms": 3,
        "max_tokens": 9,
        "capacity_rows": 384,
        "timeout_s": 2.5,
    }
    words = [word for name, value in given.items() for word in (f"--mok-{name.replace('_', '-')}", str(value))]
    config = parse(*words)
    for name, value in given.items():
        assert getattr(config, name) == value != getattr(MokConfig(), name)


def test_every_field_has_a_flag_with_a_help_text_or_follows_from_megatrons(capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit):
        parse("--help")
    shown = capsys.readouterr().out
    for entry in dataclasses.fields(MokConfig):
        flag = f"--mok-{entry.name.replace('_', '-')} "
        if entry.name in ("format", "fp8_gradients", "fp8_scales"):
            assert entry.metadata["flag"] is None and flag not in shown
        else:
            assert flag in shown and entry.metadata["help"].split()[0] in shown


def test_argparse_refuses_what_is_no_choice_or_no_number(capsys: pytest.CaptureFixture) -> None:
    for words in (("--mok-backend", "cuda"), ("--mok-num-sms", "all")):
        with pytest.raises(SystemExit):
            parse(*words)
        assert words[0] in capsys.readouterr().err


def test_a_namespace_without_the_flags_gives_the_defaults() -> None:
    assert config_from_args(argparse.Namespace()) == MokConfig()


def test_timeout_is_the_flag_else_the_environment_else_120(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MOK_TIMEOUT_S", raising=False)
    assert parse().timeout_s == 120
    monkeypatch.setenv("MOK_TIMEOUT_S", "7.5")
    assert parse().timeout_s == 7.5
    assert parse("--mok-timeout-s", "3").timeout_s == 3


@pytest.mark.parametrize("text", ["", "soon", "-1", "inf"])
def test_a_timeout_in_the_environment_that_cannot_work(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("MOK_TIMEOUT_S", text)
    with pytest.raises(MokConfigError, match="MOK_TIMEOUT_S"):
        MokConfig()
    MokConfig(timeout_s=1)  # the environment is not asked


@pytest.mark.parametrize("balanced, rows", [(0, 256), (1, 256), (204, 256), (205, 512), (1024, 1280), (1025, 1536)])
def test_automatic_macrobatch_is_a_quarter_more_than_balanced(balanced: int, rows: int) -> None:
    assert MokConfig(minibatch_size=256).macrobatch_rows(balanced) == rows
    assert MokConfig(minibatch_size=256, macrobatch_size=768).macrobatch_rows(balanced) == 768
