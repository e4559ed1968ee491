"""What the flags of `mok-megatron bench` mean, its messages, its table and its record."""

import argparse
import json
from pathlib import Path

import pytest
import torch

from mok_megatron.bench import command, layers, report
from mok_megatron.bench.floor import Floor
from mok_megatron.bench.measure import Times
from mok_megatron.bench.problem import Shape
from mok_megatron.cli import main
from mok_megatron.errors import MokConfigError


def parse(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return parser.parse_args(arguments)


def test_shapes_from_flags() -> None:
    assert command.shapes_of(parse("--shape", "1,2,3,4,5", "--shape", "1,2,3,4,5,6")) == [
        Shape(1, 2, 3, 4, 5),
        Shape(1, 2, 3, 4, 5, 6),
    ]
    assert len(command.shapes_of(parse("--suite"))) == 4
    sizes = ("--hidden", "64", "--intermediate", "32", "--experts", "8", "--topk", "2")
    assert command.shapes_of(parse(*sizes)) == [Shape(4096, 64, 32, 8, 2, 0)]


def test_a_model_gives_the_sizes_and_flags_override_them() -> None:
    (shape,) = command.shapes_of(parse("--model", "deepseek_v3", "--experts", "16", "--tokens", "100"))
    assert shape == Shape(100, 7168, 2048, 16, 8, 2048)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--hidden", "64"], "--intermediate, --experts, --topk are missing"),
        (["--shape", "1,2,3"], "--shape '1,2,3' is not T,H,I,E,K"),
        (["--suite", "--model", "tiny", "--topk", "2"], "leave out --model, --topk"),
        (["--model", "deepsek_v3"], "deepseek_v3"),
        (["--suite", "--baselines", "nccl,mega"], "mega unknown; choose from nccl"),
        (["--shape", "64,32,32,4,8"], "--topk 8 exceeds --experts 4"),
        (["--suite", "--formats", "bf16,fp8"], "--formats: fp8 unknown; choose from bf16, blockwise, mxfp8"),
        (["--suite", "--mok-minibatch-size", "100"], "--mok-minibatch-size 100"),
    ],
)
def test_bad_arguments_are_one_message(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *arguments]) == 1
    assert words in capsys.readouterr().err


def test_every_baseline_can_be_named() -> None:
    assert tuple(layers.baselines()) == command.BASELINES
    assert command.baseline_names("none") == []


def test_experts_that_do_not_divide_name_the_nearest() -> None:
    with pytest.raises(MokConfigError, match="--experts 10 do not divide over 4 ranks; the nearest that works is 8"):
        Shape(1, 8, 8, 10, 2).check(4)


RUN = ["bench", "--shape", "20,16,16,4,2", "--iterations", "2", "--baselines", "nccl,hybridep"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="runs the reference backend, in fp32, on a machine without a GPU")
def test_a_run_prints_a_table_and_writes_the_record(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "deep" / "record.json"
    assert main([*RUN, "--json", str(path)]) == 0
    printed = capsys.readouterr().out
    assert "T 20, H 16, I 16, E 4, K 2; EP 1, reference backend" in printed
    assert "hybridep            not measured: needs GPUs" in printed
    assert "mok mxfp8           not measured: 1. --hidden 16 is not a multiple of 32; the block of mxfp8" in printed
    record = json.loads(path.read_text())
    assert record["ranks"] == 1 and record["versions"]["torch"] and record["settings"]["iterations"] == 2
    (result,) = record["results"]
    ours, _, _, nccl, hybridep = result["implementations"]
    assert ours["times"]["forward"] > 0 and max(nccl["errors"].values()) < 1e-4 and hybridep["times"] is None
    assert not torch.distributed.is_initialized()


@pytest.mark.skipif(torch.cuda.is_available(), reason="runs the reference backend, in fp32, on a machine without a GPU")
def test_wrong_results_are_not_timed_and_fail_the_command(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    right = layers.MokLayer.__call__
    # float64 is the reference's own call, which stays right.
    monkeypatch.setattr(
        layers.MokLayer,
        "__call__",
        lambda self, x, weights: right(self, x, weights) * (1.0 if x.dtype == torch.float64 else 1.01),
    )
    assert main([*RUN, "--json", str(tmp_path / "record.json")]) == 1
    assert "not measured: wrong results, relative errors y 1.0e-02" in capsys.readouterr().out


@pytest.mark.skipif(torch.cuda.is_available(), reason="runs the reference backend on a machine without a GPU")
def test_formats_stand_side_by_side(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = ["bench", "--shape", "20,128,128,4,2", "--iterations", "1", "--baselines", "none", "--dtype", "bf16"]
    assert main([*run, "--json", str(tmp_path / "record.json")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line[:18].rstrip() for line in lines[2:5]] == ["mok", "mok blockwise", "mok mxfp8"]
    (result,) = json.loads((tmp_path / "record.json").read_text())["results"]
    plain, *fp8 = (max(one["errors"].values()) for one in result["implementations"])
    assert plain < 1e-2 and all(1e-2 < error < 9e-2 for error in fp8)


@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU the trace is there")
def test_a_trace_of_the_reference_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*RUN, "--trace", str(tmp_path)]) == 1
    assert "--trace records the tiles of the megakernel" in capsys.readouterr().err


def test_the_table_compares_with_ours() -> None:
    result = report.Result(
        Shape(4096, 7168, 2048, 8, 4),
        "megakernel",
        "float64",
        1.02,
        Floor(2.0, 4.0, 1.0, 368.0),
        (
            report.Entry("mok", {"y": 3e-3}, Times(2.5, 5.0, 7.5)),
            report.Entry("nccl", {"y": 4e-3}, Times(5.0, 7.5, 12.0)),
            report.Entry("deepep", note="the package deep_ep is not importable"),
        ),
    )
    lines = report.table(result, 2).splitlines()
    assert lines[3].split() == ["nccl", "5.000", "(2.00x)", "7.500", "(1.50x)", "12.000", "(1.60x)", "4.0e-03"]
    assert lines[5].split()[:3] == ["products", "2.000", "(0.80x)"]
    assert lines[6].split()[:3] == ["bytes", "1.000", "(0.40x)"] and "368 GB/s" in lines[6]
