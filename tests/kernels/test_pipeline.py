"""The barriers between the roles of a CTA on Blackwell, explored completely (pipeline.pml); seeded faults are found."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.kernels.conftest import HERE

MISSING = [tool for tool in ("spin", "gcc") if shutil.which(tool) is None]
pytestmark = pytest.mark.skipif(
    bool(MISSING), reason=f"{' and '.join(MISSING)} not found; on Debian: apt-get install spin gcc"
)

FAULTS = {
    1: ("the issuing warp is not waited for before a tile's slot is used again", "invalid end state"),
    2: ("a product does not wait until its accumulator is drained", "unread"),
    3: ("a product does not wait for what is put back", "part"),
    4: ("a stage is given back when its product is issued, not finished", "stage"),
    5: ("one warp's arrival counts as drained", "invalid end state"),
    6: ("one warp's arrival counts as put back", "invalid end state"),
}


def explore(folder: Path, fault: int) -> str:
    model = str(HERE / "pipeline.pml")
    subprocess.run(["spin", f"-DFAULT={fault}", "-a", model], cwd=folder, check=True, timeout=60, capture_output=True)
    flags = "-O1 -DSAFETY -DCOLLAPSE -DMEMLIM=2048 -w".split()
    subprocess.run(["gcc", *flags, "pan.c", "-o", "pan"], cwd=folder, check=True, timeout=120)
    return subprocess.run(["./pan", "-m100000"], cwd=folder, capture_output=True, text=True, timeout=170).stdout


def test_no_interleaving_hangs_or_reads_the_wrong_tile(tmp_path):
    out = explore(tmp_path, 0)
    assert "errors: 0" in out and "Search not completed" not in out and "max search depth too small" not in out, out
    (states,) = re.findall(r"(\d+) states, stored", out)
    print(f"{int(states):,} states")
    assert int(states) > 500_000, "a model that stops early explores little"


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found(tmp_path, fault):
    what, error = FAULTS[fault]
    out = explore(tmp_path, fault)
    (found,) = re.findall(r"pan:1: (.*) \(at depth", out)
    assert error in found, f"{what}: {found}"
