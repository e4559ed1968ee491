"""``scripts/pretrain_deepseek_v3.sh`` as a user runs it: dry runs, refusals, and the tiny preset on the CPU."""

import importlib.util
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from mok_megatron.compare import dry_run as module
from mok_megatron.compare.log import read_log
from mok_megatron.compare.presets import PRESETS

SCRIPT = Path(__file__).parents[2] / "scripts" / "pretrain_deepseek_v3.sh"
ENVIRONMENT = os.environ | {"PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess:
    command = ["bash", str(SCRIPT), *arguments]
    return subprocess.run(
        command, env=ENVIRONMENT | environment, capture_output=True, text=True, timeout=150, check=False
    )


@pytest.fixture
def dry_run(tmp_path, capsys):
    """A dry run whose last step, which imports Megatron for seconds, happens in this process: (status, output)."""
    python, passed_on = tmp_path / "python", tmp_path / "passed_on"
    python.write_text(
        f"""#!/bin/sh
case "$*" in
*mok_megatron.compare.dry_run*) printf '%s\\0' "$@" >{passed_on} ;;
*) exec {sys.executable} "$@" ;;
esac
"""
    )
    python.chmod(0o755)

    def run_here(*arguments: str, **environment: str) -> tuple[int, str]:
        done = run(*arguments, "--dry-run", PYTHON=str(python), **environment)
        assert done.returncode == 0, done.stderr
        words = passed_on.read_text().split("\0")[:-1]
        assert words[:2] == ["-m", "mok_megatron.compare.dry_run"]
        capsys.readouterr()
        status = module.main(words[2:])
        captured = capsys.readouterr()
        return status, done.stdout + captured.out + captured.err

    return run_here


@pytest.mark.parametrize("preset", PRESETS)
def test_dry_run_prints_and_checks(dry_run, preset):
    status, text = dry_run("--preset", preset)
    assert status == 0, text
    for part in ("--moe-token-dispatcher-type mok", "CUDA_DEVICE_MAX_CONNECTIONS=1", "parallel layout"):
        assert part in text
    assert "Megatron's parser, validation and model configuration accept the command" in text
    assert f"on {PRESETS[preset].gpus:,} ranks" in text


def test_full_follows_the_reports_schedule():
    done = run("--dry-run")
    assert done.returncode == 0, done.stderr
    text = done.stdout
    tokens = 14.8e12
    samples = int(text.split("--train-samples ")[1].split()[0])
    assert samples * 4096 == pytest.approx(tokens, rel=1e-9)
    constant = int(text.split("--lr-decay-samples ")[1].split()[0]) - int(
        text.split("--lr-wsd-decay-samples ")[1].split()[0]
    )
    assert constant * 4096 == pytest.approx(10e12, rel=1e-9)
    assert r"0:3072\ 117B:6144\ 235B:9216\ 352B:12288\ 469B:15360" in text
    assert "every expert group lies inside one NVLink domain" in text


def test_dry_run_of_several_nodes_and_a_checkout_with_the_users_flags_last(dry_run, tmp_path):
    (tmp_path / "pretrain_gpt.py").touch()
    user = ["--train-iters", "20", "--lr", "1e-5", "--made-up-flag"]
    where = {"NNODES": "16", "NODE_RANK": "3", "MASTER_ADDR": "first", "GPUS_PER_NODE": "8"}
    where["MEGATRON_LM"] = str(tmp_path)
    cluster = ["--cluster", "hgx_h200_8gpu", "--expert-model-parallel-size", "8", "--dispatcher=alltoall"]
    status, text = dry_run(*cluster, *user, **where)
    assert status == 2
    assert "Megatron's parser refuses this command: unrecognized arguments: --made-up-flag" in text
    assert "--nnodes 16" in text and "--node-rank 3" in text and "--master-addr first" in text
    command = text.partition("environment\n")[0].replace("\\\n", " ").split()
    assert command[-len(user) :] == user
    assert "--train-samples" not in command
    assert f"{tmp_path}/pretrain_gpt.py" in command and f"PYTHONPATH={tmp_path}" in text
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


@pytest.fixture
def with_gpus(tmp_path):
    """The script on a node that says it has so many H200s; its launch is printed instead of started."""
    python = tmp_path / "python"

    def run_there(gpus: int, *arguments: str, **environment: str) -> subprocess.CompletedProcess:
        python.write_text(
            f"""#!/bin/sh
case "$*" in
*torch.cuda.device_count*) echo {gpus} NVIDIA H200 ;;
*torch.distributed.run*) echo "$@" ;;
*) exec {sys.executable} "$@" ;;
esac
"""
        )
        python.chmod(0o755)
        return run(*arguments, PYTHON=str(python), **environment)

    return run_there


def test_a_launch_uses_the_gpus_found(with_gpus):
    user = ["--transformer-impl", "local"]
    done = with_gpus(2, "--preset", "proxy-2gpu", *user)
    assert done.returncode == 0, done.stderr
    command = done.stdout.split()
    assert command[:5] == ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    assert command[5:7] == ["-m", "mok_megatron.pretrain"] and command[-2:] == user
    assert "2 GPUs of Two NVIDIA H200s over NVLink" in done.stderr


def test_a_launch_on_several_nodes(with_gpus):
    step = {"SLURM_STEP_NUM_NODES": "128", "SLURM_STEP_NUM_TASKS": "128", "SLURM_NODEID": "7", "MASTER_ADDR": "node01"}
    user = ["--expert-model-parallel-size", "8", "--transformer-impl", "local", "--train-iters", "5"]
    done = with_gpus(8, *user, **step)
    assert done.returncode == 0, done.stderr
    start = "--nnodes 128 --node-rank 7 --master-addr node01 --master-port 29500 --nproc-per-node 8"
    assert start in done.stdout
    assert "on 1,024 GPUs of NVIDIA HGX H200" in done.stderr


@pytest.mark.parametrize(
    ("gpus", "arguments", "environment", "part"),
    [
        (1, ["--preset", "proxy-2gpu"], {}, "runs on 2 GPUs, and 1 were found"),
        (8, ["--transformer-impl", "local"], {}, "--expert-model-parallel-size 64 does not fit whole"),
        (2, ["--preset", "proxy-8gpu"], {"GPUS_PER_NODE": "8"}, "torch sees 2 GPUs here"),
        (2, ["--preset", "proxy-2gpu", "--gpus", "4"], {}, "this launch has 1 x 2"),
        (8, [], {"NNODES": "128", "NODE_RANK": "0"}, "NVLink domain"),
        (8, ["--expert-model-parallel-size", "8", "--transformer-impl", "local"], {"NNODES": "128"}, "set MASTER_ADDR"),
    ],
)
def test_a_launch_that_does_not_fit_is_refused(with_gpus, gpus, arguments, environment, part):
    done = with_gpus(gpus, *arguments, **environment)
    assert done.returncode == 2 and done.stdout == ""
    assert part in done.stderr and "Traceback" not in done.stderr


@pytest.mark.skipif(
    importlib.util.find_spec("transformer_engine") is not None, reason="Transformer Engine is installed"
)
def test_missing_transformer_engine_is_named(with_gpus):
    done = with_gpus(2, "--preset", "proxy-2gpu", "--dispatcher", "hybridep")
    assert done.returncode == 2
    assert "Transformer Engine is not installed" in done.stderr and "EXTRAS=te" in done.stderr


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
        _wait(lambda: saved.exists() or launch.poll() is not None, 70)
        ranks = _children(launch.pid)
        assert len(ranks) == 2, log.read_text()[-3000:]
        os.kill(ranks[1], signal.SIGKILL)
        assert launch.wait(timeout=100) not in (0, None)
    finally:
        launch.terminate()
        launch.wait()
    text = log.read_text()
    assert "Signal 9 (SIGKILL) received by PID" in text
    assert len(read_log(text).loss) >= 1
    iteration = int(saved.read_text())
    assert (tmp_path / "saved" / f"iter_{iteration:07d}" / "metadata.json").exists()
    assert all(not Path(f"/proc/{rank}").exists() for rank in ranks)


def test_a_checkpoint_that_cannot_be_written_ends_the_run_and_leaves_the_one_before(tmp_path):
    """The folder is writable at the start and no more at the second checkpoint, as on a full or failing disk."""
    saved = tmp_path / "saved"
    saved.mkdir()
    (saved / "iter_0000002").write_text("in the way")
    done = run("--preset", "tiny", "--train-iters", "4", "--save", str(saved), "--save-interval", "1")
    assert done.returncode not in (0, None)
    text = done.stdout + done.stderr
    assert "iter_0000002" in text and "Error" in text
    assert len(read_log(text).loss) == 2
    assert (saved / "latest_checkpointed_iteration.txt").read_text() == "1"
    assert (saved / "iter_0000001" / "metadata.json").exists()
    again = run("--preset", "tiny", "--train-iters", "4", "--load", str(saved))
    assert again.returncode == 0, again.stderr[-3000:]
    assert len(read_log(again.stdout + again.stderr).loss) == 3


def _children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _wait(condition, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s"
        time.sleep(0.1)
