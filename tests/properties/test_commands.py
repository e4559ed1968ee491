"""The commands with any words and files: status 0 with a result, or 2 with a message; never a traceback or a hang."""

from __future__ import annotations

import functools
import json

import pytest
from hypothesis import strategies as st

from mok_megatron import cli
from mok_megatron.compare import command, dry_run, flags
from mok_megatron.compare.runs import RefusedError
from tests.properties.answers import BASIS, MODELS, assert_answered, outcome
from tests.properties.cases import cases, odd_numbers

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


@cases(120, basis=st.sampled_from([BASIS, BASIS, []]), more=options(SIMULATE, 3))
def test_simulate(basis: list[str], more: list[str]) -> None:
    out = assert_answered(cli.main, ["simulate", *basis, *more])
    if out is not None and "--json" in more and "-h" not in more:
        assert 0 < json.loads(out)["forward"]["total"] < 1e6


RECIPE = {
    "--preset": st.sampled_from(["full", "proxy-8gpu", "proxy-2gpu", "proxy-1gpu", "tiny", "tiny", "none"]),
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


COMPARE = {
    "--preset": RECIPE["--preset"],
    "--dispatchers": st.sampled_from(["mok,alltoall", "mok", "alltoall,alltoall", ",", "", "mokk", "mok,x"]),
    "--steps": numbers,
    "--deadline": numbers | st.sampled_from(["1.5", "inf", "nan", "0"]),
    "--no-layer": None,
}


@cases(80, own=options(COMPARE, 4), user=options(MEGATRON, 2))
def test_compare(own: list[str], user: list[str]) -> None:
    """Up to the first training, of which the stub says that it was refused."""

    def refuse(words: list[str], *unused: object, **unused_too: object) -> str:
        assert words[:2] == ["bash", str(command.SCRIPT)]
        assert "--" in user or words[len(words) - len(user) :] == user
        raise RefusedError("the stub trains nothing")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(command.runs, "run_logged", refuse)
        patch.setattr(command, "_data", lambda *_: [])
        patch.setattr(command, "_make_folder", lambda _: None)
        assert_answered(command.main, ["--preset", "tiny", "--dispatchers", "mok", *own, *user])


@functools.cache
def tiny_flags() -> tuple[str, ...]:
    status, out, err = outcome(flags.main, ["--dry-run", "--preset", "tiny", "--", "--mock-data"])
    assert status == 0, err
    return (*out.split("\0")[:-1], "--train-iters", "2", "--lr", "1e-3", "--mock-data")


@cases(20, user=options(MEGATRON, 2))
def test_dry_run(user: list[str]) -> None:
    assert_answered(dry_run.main, ["--dry-run", "--preset", "tiny", "--", *tiny_flags(), *user])
