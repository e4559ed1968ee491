"""The self-test passes where the layer is right, and says what is wrong and where when it is not."""

from __future__ import annotations

import json

import pytest
import torch

from mok_megatron import cli
from mok_megatron.selftest import checks, command, problem


def test_the_reference_passes(capsys, tmp_path):
    out = tmp_path / "selftest.json"
    assert cli.main(["selftest", "--only", "e", "--json", str(out)]) == 0
    listed = {check.name for check in checks.reference_checks() if "e" in check.name}
    results = json.loads(out.read_text())["checks"]
    assert {r["check"] for r in results} == listed and all(r["status"] == "ok" for r in results)
    assert f"{len(listed)} of {len(listed)} checks hold" in capsys.readouterr().out


def spoiled(name, change):
    def layer(p):
        found = problem.reference(p)
        found[name] = change(found[name].clone())
        return found

    return layer


def swapped(t):
    """Two rows exchanged: what a wrong layout of the accumulators would do."""
    t[[3, 11]] = t[[11, 3]]
    return t


@pytest.mark.parametrize(
    "name,change,check",
    [
        ("y", swapped, "one tile: forward"),
        ("dx", lambda t: t * 1.02, "one tile: data gradients"),
        ("dw1", lambda t: t.index_fill(1, torch.tensor([7]), float("nan")), "one tile: weight gradients"),
        ("dscale", lambda t: torch.zeros_like(t), "shared expert"),
    ],
)
def test_a_wrong_layer_fails_the_check_that_is_about_it(name, change, check, capsys):
    chosen = [c for c in checks.reference_checks() if c.name == check]
    (result,) = command.run_checks(chosen, spoiled(name, change))
    assert result["status"] == "FAIL" and f"{name}: error" in str(result["found"])
    assert f"FAIL   {check}" in capsys.readouterr().out
    if change is swapped:
        assert "in 1 tiles (0,0)" in str(result["found"]) and "first (3, " in str(result["found"])


def test_results_that_change_from_run_to_run_fail():
    runs = iter(range(100))

    def layer(p):
        found = problem.reference(p)
        found["dw2"][0, 0, 0] += next(runs) // 5
        return found

    chosen = [c for c in checks.reference_checks() if c.name == "repeated"]
    (result,) = command.run_checks(chosen, layer)
    assert result["status"] == "FAIL" and "dw2: 1 of" in str(result["found"])


def test_an_error_of_the_device_ends_the_run(capsys):
    def layer(p):
        raise torch.AcceleratorError("CUDA error: an illegal instruction was encountered\nmore")

    results = command.run_checks(checks.reference_checks()[:3], layer)
    assert [r["status"] for r in results] == ["ERROR"]
    assert "--only" in capsys.readouterr().out


def test_unknown_check_and_missing_gpu(capsys):
    assert cli.main(["selftest", "--only", "nonsense"]) == 2
    assert "one tile: forward" in capsys.readouterr().err
    if not torch.cuda.is_available():
        assert cli.main(["selftest", "--gpu"]) == 2
        assert "no CUDA device" in capsys.readouterr().err


@pytest.mark.gpu
def test_the_megakernel_passes(capsys):
    assert cli.main(["selftest", "--gpu"]) == 0, capsys.readouterr().out
