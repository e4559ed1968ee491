"""Compilers and disassemblers for tests that look at the CUDA sources without a GPU."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sysconfig
from pathlib import Path

import pytest

from mok_megatron.build import BuildError, toolkit
from mok_megatron.build.sources import FLAGS
from mok_megatron.resources import data_folder

HERE = Path(__file__).parent
TIMEOUT_S = 400
"""Of one compilation: 20 s on an idle core."""


def nvcc(source: Path, output: Path, arch: str, *flags: str) -> None:
    """Compile for sm_``arch`` with the library's flags, `flags` last; skips the test where there is no compiler."""
    try:
        tools, cutlass = toolkit.find_toolkit(), toolkit.find_cutlass()
    except BuildError as error:
        pytest.skip(f"needs nvcc and CUTLASS's headers: {str(error).splitlines()[0]}")
    include = ["-I", str(data_folder("kernels")), "-I", str(cutlass.include)]
    gencode = f"-gencode=arch=compute_{arch},code=sm_{arch}"
    command = [str(tools.nvcc), *FLAGS, *include, gencode, *flags, str(source), "-o", str(output)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stderr[-4000:]


def disassembly(binary: Path) -> str:
    """The machine code in a library or cubin as text; skips the test where there is no disassembler."""
    folders = [toolkit.find_toolkit().root / "bin", *Path(sysconfig.get_paths()["purelib"]).glob("nvidia/cu*/bin")]
    for folder in folders:
        if (folder / "cuobjdump").exists() and (folder / "nvdisasm").exists():
            path = {**os.environ, "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}
            done = subprocess.run(
                [str(folder / "cuobjdump"), "-sass", str(binary)], capture_output=True, text=True, timeout=120, env=path
            )
            assert done.returncode == 0, done.stderr[-2000:]
            return done.stdout
    pytest.skip("needs cuobjdump and nvdisasm: pip install nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm")


@pytest.fixture(scope="session")
def layouts(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """layouts.cu, compiled."""
    if shutil.which("g++") is None and shutil.which("c++") is None:
        pytest.skip("needs a C++ compiler for nvcc")
    library = tmp_path_factory.mktemp("layouts") / "layouts.so"
    nvcc(HERE / "layouts.cu", library, "100a", "-shared")
    lib = ctypes.CDLL(str(library))
    lib.instruction.restype = lib.pair_instruction.restype = ctypes.c_uint32
    return lib
