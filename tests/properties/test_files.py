"""Model, cluster and tuned files with any damage: used for what they say, or refused with file and line; never run."""

from __future__ import annotations

import dataclasses
import os
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml
from hypothesis import strategies as st

from mok_megatron import MokConfig, cli, tuned
from mok_megatron.configs import ConfigFileError, load_cluster, load_model
from tests.properties.answers import BASIS, CLUSTERS, MODELS, assert_answered
from tests.properties.cases import cases, error_of, odd_numbers
from tests.tune.test_tuned import FILE as TUNED

ODD_SCALARS = st.one_of(
    odd_numbers.map(lambda n: "~" if n is None else str(n)),
    st.text(max_size=8),
    st.sampled_from(
        [
            ".inf",
            ".nan",
            "1e-300",
            "1e308",
            "0x10",
            "1:30",
            "2001-01-01",
            "'a b'",
            "[1, 2]",
            "{a: 1}",
            "!!python/name:os.system x",
            "&a 1",
            "*a",
            '"\\e[2J"',
            '"rack\\ntouch pwned"',
            "1_000",
            "on",
        ]
    ),
)
ODD_LINES = st.sampled_from(
    ["", "  : 1", "- 1", "\t", "---", "...", "%YAML 1.1", "? x", "{", "'", "# \x07", "  moe:", "unknown: 1"]
)


@st.composite
def damaged(draw: st.DrawFn, text: str) -> str:
    """A file with a few of its values, keys or lines changed."""
    lines = text.splitlines()
    figures = [i for i, line in enumerate(lines) if re.match(r" *[\w-]+: \S", line)]
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.sampled_from(figures))
        key, _, value = lines[at].partition(":")
        kind = draw(st.integers(0, 9))
        if kind < 6:
            lines[at] = f"{key}: {draw(ODD_SCALARS)}"
        elif kind == 6:
            lines[at] = f"{key}x:{value}"
        elif kind == 7:
            lines[at] = lines[at] + "\n" + lines[at]
        elif kind == 8:
            lines[at] = draw(ODD_LINES)
        else:
            lines[at] = " " * draw(st.integers(0, 5)) + lines[at].strip()
    return "\n".join(lines) + "\n"


def written(text: str, name: str) -> Path:
    path = Path(tempfile.gettempdir()) / f"mok-megatron-{os.getpid()}-{name}.yaml"
    path.write_text(text, encoding="utf-8", errors="surrogateescape")
    return path


def plan_of(model: str, cluster: str) -> str | None:
    return assert_answered(cli.main, ["plan", "--model", model, "--cluster", cluster, "--gpus", "8"])


@cases(120, text=damaged((MODELS / "tiny.yaml").read_text()))
def test_a_damaged_model_file_is_named_or_planned(text: str) -> None:
    path = written(text, "model")
    try:
        error = error_of(lambda: load_model(path))
        assert error is None or (isinstance(error, ConfigFileError) and str(path) in str(error))
        plan_of(str(path), "hgx_h200_8gpu")
    finally:
        path.unlink()


@cases(120, text=damaged((CLUSTERS / "hgx_h200_8gpu.yaml").read_text()))
def test_a_damaged_cluster_file_is_named_or_planned(text: str) -> None:
    path = written(text, "cluster")
    try:
        error = error_of(lambda: load_cluster(path))
        assert error is None or (isinstance(error, ConfigFileError) and str(path) in str(error))
        plan_of("tiny", str(path))
        assert_answered(cli.main, ["simulate", *BASIS[:2], "--cluster", str(path), "--ep", "2", *BASIS[-2:]])
    finally:
        path.unlink()


@cases(150, text=damaged(yaml.safe_dump(dataclasses.asdict(TUNED))))
def test_a_damaged_tuned_file_is_named_or_gives_settings_that_work(text: str) -> None:
    path = written(text, "tuned")
    try:
        found = tuned.load(path)
    except ConfigFileError as error:
        assert str(path) in str(error)
    else:
        MokConfig(**dataclasses.asdict(found.settings))
        assert found.ep >= 1 and found.shape.experts % found.ep == 0
    finally:
        path.unlink()


yaml_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.dates(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=5) | st.sampled_from(["moe", "title", "gpu"]), inner, max_size=3)
    ),
    max_leaves=8,
)


@cases(
    150,
    content=yaml_values.map(yaml.safe_dump) | st.text(max_size=60),
    load=st.sampled_from([load_model, load_cluster, tuned.load]),
)
def test_a_file_of_anything_is_named(content: str, load: Callable[[Path], Any]) -> None:
    path = written(content, "any")
    try:
        error = error_of(lambda: load(path))
        assert isinstance(error, ConfigFileError) and str(path) in str(error)
    finally:
        path.unlink()
