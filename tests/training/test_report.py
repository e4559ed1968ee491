"""The quick start's summary, table and picture, and its checks of arguments."""

import json
import math

import pytest

from mok_megatron.training import quickstart, report

MOK, ALL = [5.0, 4.0, 3.0, 2.0], [5.0, 4.00001, 3.0, 2.00002]


def summarize(resumed=None, mok=None, dtype="fp32"):
    resumed = {
        "mok_to_mok": [3.0, 2.0],
        "alltoall_to_alltoall": [3.0, 2.00002],
        "mok_to_alltoall": [3.0000002, 2.0],
        "alltoall_to_mok": [3.0, 2.0000203],
    } | (resumed or {})
    trained = {
        "loss": {"mok": mok or MOK, "alltoall": ALL},
        "tokens_per_s": {"mok": 1000.0, "alltoall": 2000.0},
        "seconds": {"mok": 4.0, "alltoall": 2.0},
    }
    return report.summarize(trained, resumed, save_step=2, dtype=dtype)


def test_summary_has_what_is_promised(tmp_path):
    summary = summarize()
    report.write_summary(summary, tmp_path / "summary.json")
    read = json.loads((tmp_path / "summary.json").read_text())
    assert read["steps"] == 4 and read["dtype"] == "fp32" and read["loss"] == {"mok": MOK, "alltoall": ALL}
    assert read["max_abs_loss_diff"] == pytest.approx(2e-5)
    assert read["resume_max_abs_loss_diff"] == 0.0
    assert set(read["checkpoint_exchange"]) == {"mok_to_alltoall", "alltoall_to_mok"}
    assert read["checkpoint_exchange"]["mok_to_alltoall"] == pytest.approx(2e-7)
    assert read["checkpoint_exchange"]["alltoall_to_mok"] == pytest.approx(3e-7)
    assert read["passed"] is True


@pytest.mark.parametrize(
    "change",
    [
        {"mok": [5.0, 4.0, 3.0, 2.0003]},
        {"mok": [5.0, math.nan, 3.0, 2.0]},
        {"resumed": {"mok_to_mok": [3.0, 2.000002]}},
        {"resumed": {"alltoall_to_mok": [3.0, 2.0001]}},
        {"resumed": {"mok_to_mok": []}},
    ],
)
def test_any_difference_too_large_fails(change):
    assert summarize(**change)["passed"] is False


def test_table_shows_losses_and_verdicts():
    text = report.table(summarize(resumed={"alltoall_to_mok": [3.0, 2.0001]}))
    assert "mok" in text and "alltoall" in text
    line = next(line for line in text.splitlines() if "alltoall continued under mok" in line)
    assert line.endswith("TOO LARGE")
    assert sum(line.endswith("  ok") for line in text.splitlines()) == 3


def test_picture_is_a_png(tmp_path):
    report.draw(summarize(), tmp_path / "loss.png")
    assert (tmp_path / "loss.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--steps", "1"], "--steps 1"),
        (["--steps", "10", "--resume-steps", "6"], "--resume-steps 6"),
        (["--ranks", "3"], "--ranks 3"),
    ],
)
def test_bad_arguments_are_refused_before_anything_is_written(flags, message, tmp_path, capsys):
    assert quickstart.main([*flags, "--out", str(tmp_path / "run")]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_an_output_folder_that_cannot_be_written_is_named(tmp_path, capsys):
    (tmp_path / "file").touch()
    assert quickstart.main(["--out", str(tmp_path / "file" / "run")]) == 2
    assert "--out" in capsys.readouterr().err
