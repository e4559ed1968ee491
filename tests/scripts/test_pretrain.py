"""``scripts/pretrain_deepseek_v3.sh`` as a user runs it: dry runs, refusals, and the tiny preset on the CPU."""

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from mok_megatron.compare.log import read_log
from mok_megatron.compare.presets import PRESETS

SCRIPT = Path(__file__).parents[2] / "scripts" / "pretrain_deepseek_v3.sh"
ENVIRONMENT = os.environ | {"PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess:
    command = ["bash", str(SCRIPT), *arguments]
    return subprocess.run(
        command, env=ENVIRONMENT | environment, capture_output=True, text=True, timeout=150, check=False
    )


@pytest.fixture(scope="module")
def dry_runs() -> dict[str, subprocess.CompletedProcess]:
    """Every preset's dry run, two at a time: each imports Megatron."""
    with ThreadPoolExecutor(2) as pool:
        return dict(zip(PRESETS, pool.map(lambda p: run("--preset", p, "--dry-run"), PRESETS), strict=True))


@pytest.mark.parametrize("preset", PRESETS)
def test_dry_run_prints_and_checks(dry_runs, preset):
    done = dry_runs[preset]
    assert done.returncode == 0, done.stderr
    for part in ("--moe-token-dispatcher-type mok", "CUDA_DEVICE_MAX_CONNECTIONS=1", "parallel layout"):
        assert part in done.stdout
    assert "Megatron's parser, validation and model configuration accept the command" in done.stdout
    assert f"on {PRESETS[preset].gpus:,} ranks" in done.stdout


def test_full_follows_the_reports_schedule(dry_runs):
    text = dry_runs["full"].stdout
    tokens = 14.8e12
    samples = int(text.split("--train-samples ")[1].split()[0])
    assert samples * 4096 == pytest.approx(tokens, rel=1e-9)
    constant = int(text.split("--lr-decay-samples ")[1].split()[0]) - int(
        text.split("--lr-wsd-decay-samples ")[1].split()[0]
    )
    assert constant * 4096 == pytest.approx(10e12, rel=1e-9)
    assert r"0:3072\ 117B:6144\ 235B:9216\ 352B:12288\ 469B:15360" in text
    assert "every expert group lies inside one NVLink domain" in text


def test_dry_run_of_several_nodes_and_a_checkout_with_the_users_flags_last(tmp_path):
    (tmp_path / "pretrain_gpt.py").touch()
    user = ["--train-iters", "20", "--lr", "1e-5", "--made-up-flag"]
    where = {"NNODES": "16", "NODE_RANK": "3", "MASTER_ADDR": "first", "GPUS_PER_NODE": "8"}
    where["MEGATRON_LM"] = str(tmp_path)
    cluster = ["--cluster", "hgx_h200_8gpu", "--expert-model-parallel-size", "8", "--dispatcher=alltoall"]
    done = run("--dry-run", *cluster, *user, **where)
    assert done.returncode == 2
    assert "Megatron's parser refuses this command: unrecognized arguments: --made-up-flag" in done.stderr
    assert "--nnodes 16" in done.stdout and "--node-rank 3" in done.stdout and "--master-addr first" in done.stdout
    command = done.stdout.partition("environment\n")[0].replace("\\\n", " ").split()
    assert command[-len(user) :] == user
    assert "--train-samples" not in command
    assert f"{tmp_path}/pretrain_gpt.py" in command and f"PYTHONPATH={tmp_path}" in done.stdout
    assert command[command.index("--moe-token-dispatcher-type") + 1] == "alltoall"


@pytest.mark.parametrize(
    ("arguments", "environment", "part"),
    [
        (["--preset", "proxy-3gpu", "--dry-run"], {}, "'proxy-3gpu' is unknown"),
        (["--cluster", "hgx_h200_8gpu", "--dry-run"], {}, "--expert-model-parallel-size 64 does not fit"),
        (["--preset"], {}, "--preset needs a value"),
        (["--preset", "tiny", "--data-path", "absent"], {}, "absent.bin"),
        (["--preset", "tiny", "--save", "/dev/null/saved"], {}, "--save /dev/null/saved cannot be written"),
        (["--preset", "tiny"], {"NNODES": "2"}, "runs on one machine"),
        (["--preset", "proxy-2gpu", "--dry-run"], {"MEGATRON_LM": "/dev/null"}, "holds no pretrain_gpt.py"),
        (["--dry-run"], {"SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NUM_TASKS": "8"}, "--ntasks-per-node=1"),
    ],
)
def test_bad_input_is_refused_in_one_message(arguments, environment, part):
    done = run(*arguments, **environment)
    assert done.returncode == 2
    assert part in done.stderr and "Traceback" not in done.stderr
    assert len(done.stderr.splitlines()) <= 3


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_gpu_preset_without_gpus_is_refused():
    done = run("--preset", "proxy-2gpu")
    assert done.returncode == 2 and "torch sees none here" in done.stderr


def test_a_slurm_step_gives_rank_and_rendezvous():
    step = {"SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NUM_TASKS": "2", "SLURM_NODEID": "1", "MASTER_ADDR": "node01"}
    done = run("--preset", "tiny", "--dry-run", **step)
    assert done.returncode == 2 and "NNODES is 2" in done.stderr


def test_help_is_the_scripts_own_text():
    done = run("--help")
    assert done.returncode == 0 and "--preset P" in done.stdout and "MEGATRON_LM" in done.stdout


def test_a_killed_rank_ends_the_others(tmp_path):
    """The launch ends by itself, soon, with a message and another status than 0; what was saved stays."""
    log = tmp_path / "log"
    command = ["bash", str(SCRIPT), "--preset", "tiny", "--train-iters", "100000"]
    command += ["--save", str(tmp_path / "saved"), "--save-interval", "1"]
    with log.open("wb") as output:
        launch = subprocess.Popen(command, env=ENVIRONMENT, stdout=output, stderr=subprocess.STDOUT)
    try:
        saved = tmp_path / "saved" / "latest_checkpointed_iteration.txt"
        _wait(lambda: saved.exists() or launch.poll() is not None, 120)
        ranks = _children(launch.pid)
        assert len(ranks) == 2, log.read_text()[-3000:]
        os.kill(ranks[1], signal.SIGKILL)
        assert launch.wait(timeout=60) not in (0, None)
    finally:
        launch.terminate()
        launch.wait()
    text = log.read_text()
    assert "Signal 9 (SIGKILL) received by PID" in text
    assert len(read_log(text).loss) >= 1
    iteration = int(saved.read_text())
    assert (tmp_path / "saved" / f"iter_{iteration:07d}" / "metadata.json").exists()
    assert all(not Path(f"/proc/{rank}").exists() for rank in ranks)


def _children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _wait(condition, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s"
        time.sleep(0.1)
