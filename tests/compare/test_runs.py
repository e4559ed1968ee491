"""Runs that fail, hang or are refused."""

import os
import time

import pytest

from mok_megatron.compare.runs import RefusedError, RunError, cause, run_logged


def test_output_goes_to_the_log_and_progress_to_the_terminal(tmp_path, capfd):
    text = run_logged(["bash", "-c", "echo step 1; echo noise; echo step 2"], tmp_path / "log", 30, show=r"step \d")
    assert text == (tmp_path / "log").read_text() == "step 1\nnoise\nstep 2\n"
    assert "step 2" in capfd.readouterr().err


def test_a_failure_names_its_cause_and_its_log(tmp_path):
    script = "echo '[rank0]: ValueError: no such thing'; exit 1"
    with pytest.raises(RunError, match=f"exit status 1: ValueError: no such thing; output: {tmp_path}/log"):
        run_logged(["bash", "-c", script], tmp_path / "log", 30)


def test_a_refusal_is_passed_on(tmp_path):
    with pytest.raises(RefusedError, match="pretrain: no"):
        run_logged(["bash", "-c", "echo pretrain: no >&2; exit 2"], tmp_path / "log", 30)


def test_the_deadline_ends_the_whole_group(tmp_path):
    script = f"sleep 100 & echo $! > {tmp_path}/pid; wait"
    start = time.monotonic()
    with pytest.raises(RunError, match="did not finish within --deadline 1 s"):
        run_logged(["bash", "-c", script], tmp_path / "log", 1)
    assert time.monotonic() - start < 20
    child = int((tmp_path / "pid").read_text())
    with pytest.raises(ProcessLookupError):
        for _ in range(100):  # until init has reaped it
            os.kill(child, 0)
            time.sleep(0.1)


def test_a_killed_rank_explains_the_others_errors():
    text = "RuntimeError: Connection closed by peer\n  traceback : Signal 9 (SIGKILL) received by PID 77\n"
    assert cause(text) == "Signal 9 (SIGKILL) received by PID 77"
    assert cause("nothing to see") == "no message"
