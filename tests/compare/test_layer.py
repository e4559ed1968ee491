"""The layer benchmark's part of the comparison: which command, and what of its output is kept."""

import argparse
import json

import pytest

from mok_megatron.compare import command, runs
from mok_megatron.compare.log import Training
from mok_megatron.compare.presets import PRESETS

OUTPUT = """W1130 some warning
T 4096, H 7168, I 2048, E 16, K 8, shared 2048; EP 2, megakernel backend
ms                    forward
mok              2.000 (1.00x)

record: layer.json
"""
SIZES = {
    "seq_length": 4096,
    "world_size": 2,
    "micro_batch_size": 1,
    "data_parallel_size": 2,
    "pipeline_model_parallel_size": 1,
}


def measure(tmp_path, preset: str = "proxy-2gpu", no_layer: bool = False):
    trained = {name: Training([1.0], [500.0], [0.0], [8], None, dict(SIZES)) for name in ("mok", "alltoall")}
    commands: dict[str, list[str]] = {}
    args = argparse.Namespace(no_layer=no_layer, deadline=10.0)
    return command._layer(PRESETS[preset], list(trained), args, tmp_path, commands, trained), commands


def test_the_layer_of_the_model_is_measured(tmp_path, monkeypatch):
    def run_logged(words, log, deadline_s):
        entries = [{"name": "mok", "times": {"both": 6.0}}, {"name": "alltoall", "times": {"both": 16.0}}]
        (tmp_path / "layer.json").write_text(json.dumps({"results": [{"implementations": entries}]}))
        return OUTPUT

    monkeypatch.setattr(runs, "run_logged", run_logged)
    found, commands = measure(tmp_path)
    assert found["layer_table"] == OUTPUT.partition("\n")[2].partition("\n\nrecord")[0]
    assert found["moe_layers"]["alltoall"]["moe_layers_difference_ms"] == pytest.approx(10 * 3 * 4)
    assert "--baselines nccl,alltoall" in " ".join(commands["layer"])
    assert "--shape 4096,7168,2048,16,8,2048" in " ".join(commands["layer"])


def test_a_failed_benchmark_is_reported(tmp_path, monkeypatch):
    def run_logged(words, log, deadline_s):
        raise runs.RunError("failed with exit status 1: no message")

    monkeypatch.setattr(runs, "run_logged", run_logged)
    found, _ = measure(tmp_path)
    assert found == {"no_layer": "The layer benchmark failed with exit status 1: no message"}


def test_it_is_left_out_on_request_and_on_the_cpu(tmp_path):
    assert measure(tmp_path, no_layer=True)[0] == {"no_layer": "Left out."}
    assert measure(tmp_path, preset="tiny")[0] == {"no_layer": "Measured on GPUs only."}
