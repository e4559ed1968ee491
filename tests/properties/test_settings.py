"""MokConfig and its flags with any values: settings that can work, or one message that names every flag at fault."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import io
import math
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import strategies as st

from mok_megatron.config import INT32_MAX, MokConfig, add_flags, config_from_args, flag_name
from mok_megatron.errors import MokConfigError
from tests.properties.cases import cases, error_of, odd_numbers

FIELDS = dataclasses.fields(MokConfig)
NAMED_BY_FIELD = ("format", "fp8_gradients", "fp8_scales")
"""Settings that follow from Megatron's flags, and are named as they are."""

likely = st.sampled_from(
    [None, 0, 1, 2, 8, 127, 128, 256, 384, 1024, 2048, 2.5, "reference", "auto", "bf16", "fp8", "mxfp8"]
)


@st.composite
def settings(draw: st.DrawFn) -> dict[str, Any]:
    names = draw(st.lists(st.sampled_from([entry.name for entry in FIELDS]), min_size=1, max_size=5, unique=True))
    return {name: draw(likely | odd_numbers) for name in names}


def whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) <= INT32_MAX


def assert_can_work(config: MokConfig) -> None:
    """What every part of the package takes for granted."""
    assert config.backend in ("auto", "megakernel", "reference") and config.format in ("bf16", "mxfp8", "blockwise")
    assert whole(config.minibatch_size) and config.minibatch_size > 0 and config.minibatch_size % 128 == 0
    for name, least, unit in (
        ("macrobatch_size", 1, config.minibatch_size),
        ("capacity_rows", 1, 128),
        ("max_tokens", 1, 1),
        ("num_sms", 1, 1),
        ("reserved_sms", 0, 1),
    ):
        value = getattr(config, name)
        assert value is None or (whole(value) and value >= least and value % unit == 0), name
    most = max(config.fwd_comm_sms, config.bwd_comm_sms)
    assert whole(config.fwd_comm_sms) and min(config.fwd_comm_sms, config.bwd_comm_sms) >= 0
    assert config.num_sms is None or config.num_sms > most
    assert timedelta(seconds=config.timeout_s) >= timedelta(0) and 0 <= int(config.timeout_s * 1e9) < 2**63
    assert config.macrobatch_rows(10**6) % config.minibatch_size == 0
    hash(config)


def wrong_types(given: dict[str, Any]) -> list[str]:
    """Fields whose value has a type that can never work."""
    wrong = []
    for entry in FIELDS:
        value = given.get(entry.name, entry.default)
        kind = (entry.metadata["flag"] or {}).get("type")
        if value is None:
            bad = entry.default is not None
        elif kind is float:
            bad = not (whole(value) or isinstance(value, float))
        else:
            bad = not (whole(value) if kind is int else isinstance(value, str))
        if bad:
            wrong.append(entry.name)
    return wrong


@cases(500, given=settings())
def test_settings_work_or_are_named(given: dict[str, Any]) -> None:
    error = error_of(lambda: assert_can_work(MokConfig(**given)))
    wrong = wrong_types(given)
    assert error is not None or not wrong
    if error is not None:
        assert isinstance(error, MokConfigError)
        lines = str(error).splitlines()[1:]
        assert all("; " in line for line in lines)
        named = {
            entry.name
            for entry in FIELDS
            if any(flag_name(entry.name) in line or f" {entry.name} " in line for line in lines)
        }
        assert set(wrong) <= named
        # What is left out has a default that works, but for a limit that another setting breaks.
        assert named & {*given, "num_sms", "fp8_wgrad"}


words = st.one_of(
    odd_numbers.map(str),
    st.text(max_size=6),
    st.sampled_from(["reference", "128", "256", "--mok-backend", "-1", "1e400", "nan", "$(touch pwned)", "9" * 5000]),
)


@cases(
    250, given=st.lists(st.tuples(st.sampled_from([e.name for e in FIELDS if e.metadata["flag"]]), words), max_size=4)
)
def test_flags_arrive_or_are_refused(given: list[tuple[str, str]]) -> None:
    parser = add_flags(argparse.ArgumentParser(allow_abbrev=False))
    line = [word for name, text in given for word in (flag_name(name), text)]
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
            args = parser.parse_args(line)
    except SystemExit as end:
        assert end.code in (0, 2)
        assert end.code == 0 or "error: " in said.getvalue()
        return
    error = error_of(lambda: assert_can_work(config_from_args(args)))
    assert error is None or isinstance(error, MokConfigError)
    for name, text in dict(given).items():
        value = getattr(args, f"mok_{name}")
        assert str(value) == text or float(value) == float(text) or math.isnan(value)


@cases(100, text=words)
def test_a_timeout_from_the_environment_works_or_is_named(text: str) -> None:
    if "\0" in text or not text.isascii():
        return  # no environment holds it
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MOK_TIMEOUT_S", text)
        error = error_of(lambda: assert_can_work(MokConfig()))
    assert error is None or "MOK_TIMEOUT_S" in str(error)
