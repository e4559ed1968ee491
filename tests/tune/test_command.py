"""`mok-megatron tune` as a user without a GPU runs it, its messages, its file and its picture."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from mok_megatron import tuned
from mok_megatron.bench.problem import Shape
from mok_megatron.cli import main
from mok_megatron.config import MokConfig
from mok_megatron.tune import draw, report
from mok_megatron.tune.points import Expected, Point
from mok_megatron.tune.search import Found, Reading
from mok_megatron.tuned import Milliseconds

SMALL = ["tune", "--shape", "1024,1024,512,8,4", "--comm-sms", "4", "--minibatches", "512"]
without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="what is said on a machine without a GPU")


@without_gpu
def test_without_a_gpu_the_prediction_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(tuned.FOLDER_ENV, str(tmp_path / "tuned"))
    assert main([*SMALL, "--cluster", "h200_x2", "--ep", "2", "--plot", str(tmp_path / "out")]) == 0
    text = capsys.readouterr().out
    assert "a PREDICTION by simulation, nothing was measured" in text and "Shortest predicted: --mok-fwd" in text
    assert not (tmp_path / "tuned").exists()
    name = "t1024-h1024-i512-e8-k4-ep2-predicted"
    assert (tmp_path / "out" / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    record = json.loads((tmp_path / "out" / f"{name}.json").read_text())
    assert record["predicted"] is True and len(record["points"]) == 4
    assert all(point["measured"] is None for point in record["points"])


@without_gpu
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (SMALL, "there is no GPU here, so nothing can be measured; .* --cluster and --ep must be given"),
        (["tune", "--hidden", "64"], "--intermediate, --experts, --topk are missing"),
        ([*SMALL, "--cluster", "h2000", "--ep", "2"], "no cluster is called 'h2000'.*h200_x2"),
        ([*SMALL, "--cluster", "h200_x2", "--ep", "4"], "--ep 4 exceeds the 2 GPUs"),
        ([*SMALL, "--cluster", "h200_x2", "--ep", "3"], "do not divide over 3 ranks"),
        ([*SMALL, "--comm-sms", "4,x"], "--comm-sms '4,x' is not a list of up to 16 numbers from 0"),
        ([*SMALL, "--comm-sms", ",".join(["1"] * 17)], "is not a list of up to 16 numbers"),
        ([*SMALL, "--comm-sms", "132", "--cluster", "h200_x2", "--ep", "2"], "--comm-sms 132 leaves none of 132"),
        ([*SMALL, "--minibatches", "100", "--cluster", "h200_x2", "--ep", "2"], "--mok-minibatch-size 100"),
        ([*SMALL, "--budget-s", "0", "--name", "../x"], r"(?s)--budget-s is 0.0.*--name '../x' is no file name"),
    ],
)
def test_what_cannot_be_done_is_one_message(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    import re

    assert main(arguments) == 2
    message = capsys.readouterr().err
    assert message.startswith("mok-megatron tune: ") and re.search(words, message), message


@without_gpu
def test_the_launch_says_the_ep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    words = [*SMALL, "--cluster", "h200_x2", "--plot", str(tmp_path)]
    assert main(words) == 0 and "EP 2 on Two NVIDIA H200s" in capsys.readouterr().out
    assert main([*words, "--ep", "4"]) == 2
    assert "--ep 4, and the launch has 2 ranks" in capsys.readouterr().err
    monkeypatch.setenv("RANK", "1")
    assert main(words) == 0 and capsys.readouterr().out == ""


def test_what_does_not_fit_is_told_in_words(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(args: object) -> int:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 88 GiB. More of it")

    monkeypatch.setattr("mok_megatron.tune.command._run", full)
    assert main(SMALL) == 2
    assert "CUDA out of memory. Weights, fp32 gradients and a copy of them must fit: launch" in capsys.readouterr().err


SHAPE = Shape(4096, 7168, 2048, 8, 4)
FOUND = Found(
    readings={
        Point(0, 1024): Reading(Milliseconds(2.4, 4.6), True),
        Point(4, 1024): Reading(Milliseconds(2.3, 4.9), False),
    },
    left_out=[Point(0, 512)],
    config=MokConfig(minibatch_size=2048, fwd_comm_sms=4),
    default=Milliseconds(2.4, 4.6),
    tuned=Milliseconds(2.00004, 4.0),
)
POINTS = [Point(0, 512), Point(0, 1024), Point(4, 1024), Point(8, 1024)]
EXPECTED: dict[Point, Expected | str] = {Point(0, 1024): Expected(2.5, 4.5), Point(8, 1024): Expected(3.5, 5.5)}


def test_table_outcome_and_record() -> None:
    lines = report.points_table(SHAPE, POINTS, EXPECTED, FOUND, MokConfig()).splitlines()
    assert [line.split()[-1] for line in lines[2:]] == ["left", "same", "DIFFERENT", "tried"]
    assert "2.500" in lines[3] and "2.400" in lines[3]
    text = report.outcome(FOUND, MokConfig())
    assert "communication SMs 4 forward and 0 backward, minibatch 2048" in text and "16.7% faster" in text
    assert "default settings stay" in report.outcome(Found(), MokConfig())
    record = report.record(SHAPE, POINTS, EXPECTED, FOUND)
    assert [point["same_bits"] for point in record["points"]] == [None, True, False, None]
    assert record["predicted"] is False and json.dumps(record)


def test_the_file_says_where_it_comes_from(tmp_path: Path) -> None:
    versions = {"torch": "2", "deep_ep": None}
    command = "mok-megatron tune --shape 4096,7168,2048,8,4 --output 'a folder: #1'" + " --comm-sms 0" * 9
    content = report.tuned_file(SHAPE, 2, "NVIDIA H200", FOUND, 0.5, command, None, versions)
    path = report.write_tuned(content, tmp_path, "first")
    assert path == tmp_path / "h200" / "first-ep2.yaml"
    found = tuned.load(path)
    assert found == content
    assert found.settings == tuned.TunedSettings(2048, 4, 0, None)
    assert found.measured.commit == "unknown" and found.measured.versions == {"torch": "2"}
    assert found.measured.tuned == Milliseconds(2.0, 4.0) and found.measured.imbalance == 0.5
    assert path.read_text().startswith("# Written by `mok-megatron tune`")


@pytest.mark.parametrize("found", [FOUND, None, Found()])
def test_the_surface_is_drawn(tmp_path: Path, found: Found | None) -> None:
    draw.draw(SHAPE, POINTS, EXPECTED, found, "EP 2", tmp_path / "deep" / "surface.png")
    assert (tmp_path / "deep" / "surface.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.gpu
def test_one_gpu_is_tuned_and_the_plugin_takes_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ["--shape", "512,256,128,8,2", "--budget-s", "20", "--iterations", "2", "--comm-sms", "4"]
    folders = ["--output", str(tmp_path / "tuned"), "--plot", str(tmp_path / "out")]
    assert main(["tune", *arguments, "--minibatches", "512", *folders]) == 0
    (path,) = (tmp_path / "tuned").rglob("*.yaml")
    found = tuned.load(path)
    assert found.ep == 1 and found.gpu == torch.cuda.get_device_name() and found.measured.points >= 1
    monkeypatch.setenv(tuned.FOLDER_ENV, str(tmp_path / "tuned"))
    config, line = tuned.apply(MokConfig(), set(), 1, found.shape.layer, found.shape.tokens)
    assert line is not None and str(path) in line
    assert config.minibatch_size == found.settings.minibatch_size
    assert config.fwd_comm_sms == found.settings.fwd_comm_sms
