"""The installed entry point: `import torch` brings the plugin to an unmodified Megatron program, and nothing else."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

# What any program that uses Megatron's MoE layer does, on a CPU; it knows nothing of mok_megatron.
PROGRAM = """
import json, sys
import torch

report = {}

def loaded():
    return sorted(name for name in sys.modules if name.split(".")[0] in ("megatron", "mok_megatron", "wrapt"))

report["after import torch"] = loaded()

import argparse, datetime, tempfile
import megatron.core.transformer.moe.moe_layer
from megatron.core import parallel_state
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
from megatron.core.transformer import TransformerConfig
from megatron.training import arguments

def layer(dispatcher):
    config = TransformerConfig(
        num_layers=1, hidden_size=32, num_attention_heads=4, num_moe_experts=4, moe_ffn_hidden_size=48,
        gated_linear_unit=True, activation_func=torch.nn.functional.silu, add_bias_linear=False,
        use_cpu_initialization=True, moe_token_dispatcher_type=dispatcher,
    )
    spec = get_moe_module_spec(use_te=False, num_experts=4, moe_grouped_gemm=False)
    try:
        return type(spec(config=config)).__name__
    except ValueError as error:
        return str(error)

def defaults():
    parser = arguments.add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    found = {name: str(value) for name, value in vars(parser.parse_args([])).items()}
    # Megatron 0.19.2's own --help fails on a per cent sign in one of its texts, so the flags are listed without it.
    return found, " ".join(parser.format_usage().split())

with tempfile.TemporaryDirectory() as folder:
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    report["as it is"] = {"mok": layer("mok"), "allgather": layer("allgather"), "defaults": defaults()}
    report["patched by name"] = [n for n in loaded() if n.startswith("mok_megatron")]
    if "--register" in sys.argv:
        import mok_megatron
        for _ in range(2):
            mok_megatron.register()
        report["registered"] = {"mok": layer("mok"), "allgather": layer("allgather"), "defaults": defaults()}
        wrapped = TransformerConfig.__post_init__, arguments.add_megatron_arguments
        report["wrapped once"] = [not hasattr(function.__wrapped__, "__wrapped__") for function in wrapped]
    torch.distributed.destroy_process_group()
print("REPORT" + json.dumps(report))
"""


@pytest.fixture(scope="module")
def reports() -> dict[str, dict[str, Any]]:
    """Of the program with the plugin, and of the program without it until it asks for it; side by side."""
    running = {}
    for name, autoload, options in (("installed", "1", []), ("explicit", "0", ["--register"])):
        environment = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": autoload}
        running[name] = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", PROGRAM, *options],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
    found = {}
    for name, process in running.items():
        output, errors = process.communicate(timeout=150)
        lines = [line for line in output.splitlines() if line.startswith("REPORT")]
        assert process.returncode == 0 and lines, errors[-4000:]
        found[name] = json.loads(lines[0].removeprefix("REPORT"))
    return found


def test_import_torch_imports_a_hook_and_nothing_else(reports: dict[str, dict[str, Any]]) -> None:
    modules = reports["installed"]["after import torch"]
    ours = [name for name in modules if not name.startswith("wrapt")]
    assert ours == ["mok_megatron", "mok_megatron.megatron", "mok_megatron.megatron.autoload"]
    assert reports["explicit"]["after import torch"] == []


def test_an_unmodified_program_gets_the_layer_that_it_names(reports: dict[str, dict[str, Any]]) -> None:
    report = reports["installed"]["as it is"]
    assert report["mok"] == "MokMoELayer"
    assert report["allgather"] == "MoELayer"


def test_without_autoload_mok_is_unknown_until_registered(reports: dict[str, dict[str, Any]]) -> None:
    report = reports["explicit"]
    assert report["as it is"]["mok"] == "Unsupported token dispatcher type: mok"
    assert report["patched by name"] == []
    assert report["registered"]["mok"] == "MokMoELayer"
    assert report["registered"]["allgather"] == "MoELayer"


def test_registering_twice_patches_once(reports: dict[str, dict[str, Any]]) -> None:
    assert reports["explicit"]["wrapped once"] == [True, True]


@pytest.mark.parametrize(("run", "state"), [("installed", "as it is"), ("explicit", "registered")])
def test_flags_are_added_and_no_default_changes(reports: dict[str, dict[str, Any]], run: str, state: str) -> None:
    before, help_before = reports["explicit"]["as it is"]["defaults"]
    after, help_after = reports[run][state]["defaults"]
    added = {name: value for name, value in after.items() if name not in before}
    assert added.pop("log_mok") == "False"
    assert added and all(name.startswith("mok_") and value == "None" for name, value in added.items())
    assert {name: value for name, value in after.items() if name in before} == before
    assert "{allgather,alltoall,flex}" in help_before and "--mok-" not in help_before
    assert "{allgather,alltoall,flex,mok}" in help_after
    assert "--mok-backend {auto,megakernel,reference}" in help_after
