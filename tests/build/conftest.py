"""A private cache, and a compiler that answers like nvcc in a moment: a script that copies its source."""

from pathlib import Path

import pytest

from mok_megatron.build import toolkit

FAKE_NVCC = r"""#!/bin/bash
# Logs each compilation; prints and fails where the source says so.
case "$1" in
    --version) echo "Cuda compilation tools, release 13.0, V13.0.88"; exit 0 ;;
    --dryrun) echo "#\$ TOP=$(dirname "$0")/.." >&2; exit 0 ;;
esac
while [[ $# -gt 0 ]]; do
    case "$1" in
        -o) output=$2; shift ;;
        -c) source=$2; shift ;;
    esac
    shift
done
here=$(dirname "$0")
if [[ -z ${source:-} ]]; then echo link >>"$here/log"; echo linked >"$output"; exit 0; fi
echo "$(basename "$source")" >>"$here/log"
if grep -q SLEEP "$source"; then sleep "$(sed -n 's/.*SLEEP \([0-9.]*\).*/\1/p' "$source")"; fi
if grep -q FAIL "$source"; then echo "$source(3): error: identifier \"frob\" is undefined" >&2; exit 2; fi
cp "$source" "$output"
"""


@pytest.fixture(autouse=True)
def private_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "cache"
    monkeypatch.setenv("MOK_CACHE_DIR", str(path))
    monkeypatch.delenv("MOK_NVCC_FLAGS", raising=False)
    toolkit._ask.cache_clear()
    return path


@pytest.fixture
def fake_nvcc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """CUDA_HOME with the script above; gives the path of its log, a line a compilation or link."""
    nvcc = tmp_path / "cuda" / "bin" / "nvcc"
    nvcc.parent.mkdir(parents=True)
    nvcc.write_text(FAKE_NVCC)
    nvcc.chmod(0o755)
    monkeypatch.setenv("CUDA_HOME", str(nvcc.parents[1]))
    log = nvcc.parent / "log"
    log.touch()
    return log


@pytest.fixture
def kernels(tmp_path: Path) -> Path:
    """Two translation units and a header."""
    root = tmp_path / "kernels"
    (root / "comm").mkdir(parents=True)
    (root / "forward.cu").write_text('#include "tile.cuh"\nextern "C" int forward() { return TILE; }\n')
    (root / "comm" / "pull.cu").write_text('extern "C" int pull() { return 7; }\n')
    (root / "tile.cuh").write_text("#define TILE 128\n")
    (root / "notes.md").write_text("not a source\n")
    return root
