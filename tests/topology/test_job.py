"""The placement check of a job, as torchrun starts it."""

import os
import subprocess
import sys

import pytest

from mok_megatron.topology import Domain
from mok_megatron.topology.__main__ import main, summary


def run_job(ranks: int, *words: str, store) -> list[subprocess.CompletedProcess[str]]:
    """Start `ranks` processes with torchrun's environment, all at once, and wait for them."""
    processes = []
    for rank in range(ranks):
        environment = {
            **os.environ,
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(store),
            "PYTHONWARNINGS": "ignore",
        }
        command = [sys.executable, "-m", "mok_megatron.topology", "--timeout-s", "60", *words]
        processes.append(
            subprocess.Popen(command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        )
    results = []
    for process in processes:
        out, error = process.communicate(timeout=120)
        results.append(subprocess.CompletedProcess(process.args, process.returncode, out, error))
    return results


@pytest.fixture
def free_port():
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_two_ranks_of_one_machine(free_port):
    first, second = run_job(2, "--ep", "2", store=free_port)
    assert (first.returncode, second.returncode) == (0, 0), first.stderr + second.stderr
    assert "ranks 0-1, 1 host name" in first.stdout
    assert "all 1 expert groups of 2 ranks lie inside one NVLink domain" in first.stdout
    assert second.stdout == ""


def test_sizes_that_do_not_divide_stop_the_check(free_port, monkeypatch, capsys):
    for name, value in {"RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port}.items():
        monkeypatch.setenv(name, str(value))
    assert main(["--ep", "3"]) == 1
    assert "EP x PP = 3 does not divide 1 ranks" in capsys.readouterr().err


def test_summary_lists_domains_with_ranks_and_reasons():
    rack = [Domain("fabric", "aa/1", f"tray{i // 4}") for i in range(8)]
    alone = Domain("host", "boot", "node9", "no CUDA device")
    lines = summary([*rack, alone]).splitlines()
    assert lines == [
        "NVLink clique aa/1: ranks 0-7, 2 host names",
        "host node9: rank 8, 1 host name (no CUDA device)",
    ]
