"""``scripts/compare.sh`` as a user runs it, on the CPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mok_megatron.compare import command

SCRIPT = Path(__file__).parents[2] / "scripts" / "compare.sh"


def test_compare_of_tiny_gives_table_json_and_picture(tmp_path):
    """Three steps of the tiny preset under both dispatchers; hybridep cannot run on the CPU and is skipped."""
    arguments = ["--preset", "tiny", "--dispatchers", "mok,hybridep,alltoall", "--steps", "3", "--out", str(tmp_path)]
    done = subprocess.run(
        ["bash", str(SCRIPT), *arguments],
        env=os.environ | {"PYTHON": sys.executable, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "skipping hybridep" in done.stderr
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert list(summary["results"]) == ["mok", "alltoall"] and list(summary["not_run"]) == ["hybridep"]
    for result in summary["results"].values():
        assert len(result["loss"]) == 3 and result["ms_per_step"] > 0 and result["tokens_per_s_per_gpu"] > 0
    # fp32, and the log has seven digits.
    assert summary["results"]["mok"]["max_abs_loss_diff"] < 1e-5
    assert done.stdout.startswith("\ndispatcher")
    report = (tmp_path / "report.md").read_text()
    assert "--dispatcher alltoall" in report and summary["run"]["versions"]["torch"] in report
    assert (tmp_path / "compare.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--dispatchers", "mok,mox", "--steps", "0"], "--dispatchers names mox"),
        (["--preset", "tiny", "--dispatchers", "deepep"], "none of the dispatchers can run here"),
        (["--preset", "tiny", "--dispatchers", "mok", "--out", "/dev/null/out"], "cannot write to --out"),
        (["--preset", "tiny", "--dispatchers", "mok", "--data-path", "absent"], "absent.bin"),
    ],
)
def test_bad_input_is_refused_in_one_message(arguments, part, tmp_path, capfd, monkeypatch):
    monkeypatch.setenv("PYTHON", sys.executable)
    out = [] if "--out" in arguments else ["--out", str(tmp_path / "out")]
    assert command.main([*arguments, *out]) == 2
    captured = capfd.readouterr()
    assert part in captured.err and "Traceback" not in captured.err and captured.out == ""
