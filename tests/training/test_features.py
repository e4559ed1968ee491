"""The features of Megatron that the layer trains with: a few on the CPU, all of them on two GPUs."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.training.features import FEATURES, HOST, LATER, LONG, continued, markdown_rows

ROOT = Path(__file__).parents[2]


def run(folder: Path, *arguments: str, timeout_s: float, ranks: int = 2) -> dict[str, dict[str, Any]]:
    """The results of a launch."""
    command = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(ranks), "-m", "tests.training.features"]
    command += ["--out", str(folder / "results.json"), "--data", str(folder)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*command, *arguments],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert (folder / "results.json").exists(), done.stdout[-2000:] + done.stderr[-3000:]
    return json.loads((folder / "results.json").read_text())


@pytest.mark.skipif(torch.cuda.is_available(), reason="the CPU path; GPUs have their own test")
def test_two_features_on_the_cpu(tmp_path):
    results = run(tmp_path, "--steps", "2", "--only", "logs,evicted", timeout_s=240)
    assert [result["verdict"] for result in results.values()] == ["ok", "ok"]
    assert all(len(result["mok"]) == 2 and result["against"] == "alltoall" for result in results.values())


@pytest.mark.gpu
def test_every_feature_on_gpus(tmp_path):
    """With two GPUs those of two ranks too."""
    pytest.importorskip("transformer_engine")
    found = min(2, torch.cuda.device_count())
    results = run(tmp_path, timeout_s=600, ranks=found)
    features, later = ([name for name, f in table.items() if f.ranks <= found] for table in (FEATURES, LATER))
    assert list(results) == [*features, *continued([], tmp_path), LONG, HOST, *later]
    assert {name: result["verdict"] for name, result in results.items() if result["verdict"] != "ok"} == {}


@pytest.mark.parametrize("name", ["features_2xh200", "features_1xh200"])
def test_the_documents_quote_the_record(name):
    record = json.loads((ROOT / "docs" / "results" / f"{name}.json").read_text())
    text = (ROOT / "docs" / "results" / "README.md").read_text()
    rows = markdown_rows(record["features"])
    assert len(rows) >= 15 and all(row in text for row in rows)
    assert all(record[key] for key in ("command", "commit", "hardware", "versions"))
