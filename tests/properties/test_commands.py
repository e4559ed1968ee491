"""The commands with any words and files: status 0 with a result, or 2 with a message; never a traceback or a hang."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import os
import re
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import yaml
from hypothesis import strategies as st

from mok_megatron import cli
from mok_megatron.compare import dry_run, flags
from mok_megatron.configs import ClusterConfig, ConfigFileError, ModelConfig, load_cluster, load_model
from mok_megatron.resources import data_folder
from tests.properties.cases import cases, error_of, odd_numbers

SECONDS = 30
"""No case may take longer, on a loaded machine too; nearly all take less than a tenth of a second."""
MODELS, CLUSTERS = (data_folder("configs") / kind for kind in ("models", "clusters"))


def outcome(main: Callable[[Sequence[str]], int], words: list[str]) -> tuple[int, str, str]:
    """Exit status, standard output and standard error of a command."""
    out, err = io.StringIO(), io.StringIO()
    start = time.monotonic()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            status = main(words)
        except SystemExit as end:  # argparse
            status = end.code if isinstance(end.code, int) else 1
    assert time.monotonic() - start < SECONDS, words
    return status, out.getvalue(), err.getvalue()


def assert_answered(main: Callable[[Sequence[str]], int], words: list[str]) -> str | None:
    """The command's output, or None where it was refused with a message."""
    status, out, err = outcome(main, words)
    assert status in (0, 2), (status, err)
    assert "Traceback" not in err
    if status == 0:
        assert out.strip()
        return out
    assert re.search(r"error: |mok-megatron (plan|simulate): |pretrain: ", err), err
    return None


# ---- words

small = st.sampled_from(["1", "2", "4", "8", "16", "32", "64", "72", "256"])
numbers = st.one_of(
    small, small, odd_numbers.map(str), st.sampled_from(["0", "-1", "3", "7", "131072", "1048576", "1e9"])
)
hostile = st.sampled_from(
    [
        "",
        "$(touch pwned)",
        "; touch pwned",
        "../../etc/passwd",
        "/dev/zero",
        "x" * 5000,
        "\n",
        "--",
        "-h",
        "\udc80",
    ]
)


def options(known: dict[str, st.SearchStrategy], most: int = 6) -> st.SearchStrategy[list[str]]:
    """Some of the flags, each with a value of its own kind, seldom of another; some given twice."""

    @st.composite
    def line(draw: st.DrawFn) -> list[str]:
        words: list[str] = []
        for flag in draw(st.lists(st.sampled_from(sorted(known)), max_size=most)):
            kind = known[flag]
            words.append(flag)
            if kind is not None:
                words.append(draw(hostile if draw(st.integers(0, 19)) == 0 else kind))
        return words

    return line()


models = st.sampled_from(["tiny", "deepseek_v3", "qwen3_30b_a3b", "tiny", "nothing", str(MODELS / "tiny.yaml")])
clusters = st.sampled_from(["h200_x2", "hgx_h200_8gpu", "gb300_nvl72", "gb200_nvl72", "h200"])
PLAN = {
    **dict.fromkeys(("--racks", "--gpus", "--tp", "--cp", "--ep", "--pp", "--micro-batch", "--global-batch"), numbers),
    "--recompute": st.sampled_from(["none", "moe", "full", "all"]),
    **dict.fromkeys(("--bf16-moments", "--json", "--list"), None),
    **dict.fromkeys(("--mok-minibatch-size", "--mok-macrobatch-size", "--mok-capacity-rows"), numbers),
    **dict.fromkeys(("--mok-fwd-comm-sms", "--mok-bwd-comm-sms"), numbers),
}


@cases(
    120,
    model=models,
    cluster=clusters,
    where=st.tuples(st.sampled_from(["--gpus", "--racks"]), small),
    more=options(PLAN, 3),
)
def test_plan(model: str, cluster: str, where: tuple[str, str], more: list[str]) -> None:
    out = assert_answered(cli.main, ["plan", "--model", model, "--cluster", cluster, *where, *more])
    if out is not None and "--json" in more and "--list" not in more and "-h" not in more:
        plan = json.loads(out)
        sizes, world = plan["sizes"], plan["gpus"]
        assert world % (sizes["tp"] * sizes["cp"] * sizes["pp"]) == 0 and world % (sizes["ep"] * sizes["pp"]) == 0
        assert max(plan["memory"]["total_by_stage"]) > 0 and plan["times"]["moe_forward"]["total"] > 0


SIMULATE = {
    "--shape": st.sampled_from(
        [
            "64,64,64,4,2",
            "256,128,64,8,2,64",
            "1,2,3",
            "64,64,64,4,-2",
            "1e3,64,64,4,2",
            "64,,64,4,2",
            "9" * 30 + ",64,64,4,2",
            "1000000,1024,1024,8,8",
        ]
    ),
    "--tokens": numbers,
    "--model": models,
    "--cluster": clusters,
    "--ep": numbers,
    "--overlap-epilogues": None,
    "--json": None,
    **dict.fromkeys(("--mok-minibatch-size", "--mok-macrobatch-size", "--mok-num-sms"), numbers),
    **dict.fromkeys(("--mok-fwd-comm-sms", "--mok-bwd-comm-sms"), numbers),
}
BASIS = ["--shape", "256,128,64,8,2,64", "--cluster", "h200_x2", "--ep", "2", "--mok-macrobatch-size", "8192"]


@cases(120, basis=st.sampled_from([BASIS, BASIS, []]), more=options(SIMULATE, 3))
def test_simulate(basis: list[str], more: list[str]) -> None:
    out = assert_answered(cli.main, ["simulate", *basis, *more])
    if out is not None and "--json" in more and "-h" not in more:
        assert 0 < json.loads(out)["forward"]["total"] < 1e6


RECIPE = {
    "--preset": st.sampled_from(["full", "proxy-8gpu", "proxy-2gpu", "tiny", "tiny", "none"]),
    "--dispatcher": st.sampled_from(["mok", "alltoall", "hybridep", "deepep", "mokk"]),
    "--gpus": numbers,
    "--gpus-per-node": numbers,
    "--gpu-name": st.sampled_from(["NVIDIA H200", "NVIDIA GB300", "Tesla K80"]),
    "--cluster": clusters,
    "--batch-schedule": st.sampled_from(["0:3072 117B:6144", "0:7", "", "0:x", ":", "0:3072 117B"]),
    "--dry-run": None,
}
MEGATRON = {
    **dict.fromkeys(("--tensor-model-parallel-size", "--expert-model-parallel-size", "--micro-batch-size"), numbers),
    **dict.fromkeys(("--pipeline-model-parallel-size", "--context-parallel-size", "--global-batch-size"), numbers),
    "--transformer-impl": st.sampled_from(["local", "transformer_engine", "x"]),
    "--tokenizer-type": st.sampled_from(["NullTokenizer", "x"]),
    "--mock-data": None,
    "--train-iters": numbers,
    "--mok-minibatch-size": numbers,
    "--fp8-format": st.sampled_from(["hybrid", "e4m3"]),
    "--num-experts": numbers,
    "--swiglu": None,
    "--save": st.sampled_from(["runs/x", "/proc/none"]),
    "--data-path": st.sampled_from(["no/such/data", "0.5"]),
}


@cases(120, own=options(RECIPE, 4), user=options(MEGATRON, 4))
def test_flags_of_the_recipe(own: list[str], user: list[str]) -> None:
    out = assert_answered(flags.main, ["--dry-run", *own, "--", *user])
    if out is not None and "-h" not in own:
        assert out.endswith("\0") and "--moe-token-dispatcher-type" in out.split("\0")


@functools.cache
def tiny_flags() -> tuple[str, ...]:
    status, out, err = outcome(flags.main, ["--dry-run", "--preset", "tiny", "--", "--mock-data"])
    assert status == 0, err
    return (*out.split("\0")[:-1], "--train-iters", "2", "--lr", "1e-3", "--mock-data")


@cases(20, user=options(MEGATRON, 2))
def test_dry_run(user: list[str]) -> None:
    assert_answered(dry_run.main, ["--dry-run", "--preset", "tiny", "--", *tiny_flags(), *user])


# ---- files

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
def damaged(draw: st.DrawFn, path: Path) -> str:
    """A shipped file with a few of its values, keys or lines changed."""
    lines = path.read_text().splitlines()
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


@cases(120, text=damaged(MODELS / "tiny.yaml"))
def test_a_damaged_model_file_is_named_or_planned(text: str) -> None:
    path = written(text, "model")
    try:
        error = error_of(lambda: load_model(path))
        assert error is None or (isinstance(error, ConfigFileError) and str(path) in str(error))
        plan_of(str(path), "hgx_h200_8gpu")
    finally:
        path.unlink()


@cases(120, text=damaged(CLUSTERS / "hgx_h200_8gpu.yaml"))
def test_a_damaged_cluster_file_is_named_or_planned(text: str) -> None:
    path = written(text, "cluster")
    try:
        error = error_of(lambda: load_cluster(path))
        assert error is None or (isinstance(error, ConfigFileError) and str(path) in str(error))
        plan_of("tiny", str(path))
        assert_answered(cli.main, ["simulate", *BASIS[:2], "--cluster", str(path), "--ep", "2", *BASIS[-2:]])
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
    cls=st.sampled_from([ModelConfig, ClusterConfig]),
)
def test_a_file_of_anything_is_named(content: str, cls: type) -> None:
    path = written(content, "any")
    load: Callable[..., Any] = load_model if cls is ModelConfig else load_cluster
    try:
        error = error_of(lambda: load(path))
        assert isinstance(error, ConfigFileError) and str(path) in str(error)
    finally:
        path.unlink()
