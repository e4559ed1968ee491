"""Finds the CUDA compiler and CUTLASS's headers, without the user doing anything where they are installed."""

import os
import re
import shutil
import subprocess
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path

from mok_megatron import versions
from mok_megatron.build.errors import BuildError

INSTALL_HINT = (
    f"install a CUDA toolkit {versions.CUDA_TOOLKIT} or its pip packages (pip install 'mok-megatron[nvcc]'), "
    "or compile elsewhere with 'mok-megatron build --arch 90a' and copy the folder $MOK_CACHE_DIR"
)


@dataclass(frozen=True)
class Toolkit:
    """A CUDA compiler that answered. ``root`` is its toolkit's folder, as nvcc itself tells it."""

    nvcc: Path
    version: str  # of nvcc, "13.0.88"
    root: Path

    def require_supported(self) -> None:
        """BuildError when this nvcc is too old for the kernels."""
        if not versions.in_range(self.version, versions.CUDA_TOOLKIT):
            raise BuildError(
                f"nvcc {self.version} ({self.nvcc}) is too old for the kernels, which need a CUDA toolkit "
                f"{versions.CUDA_TOOLKIT}: point CUDA_HOME to one, or {INSTALL_HINT}"
            )


def find_toolkit() -> Toolkit:
    """The nvcc of CUDA_HOME or CUDA_PATH if set, else of PATH, /usr/local/cuda or the pip packages.

    Raises BuildError when none answers; the message lists what was tried.
    """
    tried = []
    for nvcc in _candidates():
        try:
            return _ask(nvcc)
        except (OSError, subprocess.SubprocessError, ValueError) as error:
            tried.append(f"{nvcc}: {error}")
    listed = "".join(f"\n  {line}" for line in tried)
    raise BuildError(f"no CUDA compiler (nvcc) found: {INSTALL_HINT}. Tried:{listed}")


def _candidates() -> Iterator[Path]:
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        if os.environ.get(variable):
            nvcc = Path(os.environ[variable], "bin", "nvcc")
            if not nvcc.is_file():
                raise BuildError(
                    f"{variable}={os.environ[variable]} has no bin/nvcc: point it to a CUDA toolkit, or "
                    "unset it "
                    "to search PATH, /usr/local/cuda and the pip packages"
                )
            yield nvcc
            return
    on_path = shutil.which("nvcc")
    if on_path:
        yield Path(on_path)
    yield Path("/usr/local/cuda/bin/nvcc")
    site = Path(sysconfig.get_paths()["purelib"])
    yield from sorted(site.glob("nvidia/cu*/bin/nvcc"), reverse=True)


@cache
def _ask(nvcc: Path) -> Toolkit:
    """Runs nvcc to learn its version and toolkit; it may be a wrapper script, so its path tells nothing."""
    text = subprocess.run([nvcc, "--version"], capture_output=True, text=True, timeout=60, check=True).stdout
    version = re.search(r"\bV(\d+\.\d+\.\d+)", text)
    if version is None:
        raise ValueError(f"'{nvcc} --version' names no version: {text.strip()[:200]}")
    plan = subprocess.run(
        [nvcc, "--dryrun", "-x", "cu", "-c", "/dev/null"], capture_output=True, text=True, timeout=60
    ).stderr
    top = re.search(r"^#\$ TOP=(.+)$", plan, re.MULTILINE)
    root = Path(top[1].strip() if top else nvcc.parent.parent)
    return Toolkit(nvcc, version[1], root.resolve())


@dataclass(frozen=True)
class Cutlass:
    """CUTLASS's headers: the include folder and the version of the wheel that brought it."""

    include: Path
    version: str


def find_cutlass() -> Cutlass:
    """The headers inside the wheel nvidia-cutlass, found through its metadata: nothing of it is imported."""
    header = "include/cutlass/version.h"
    try:
        wheel = metadata.distribution("nvidia-cutlass")
    except metadata.PackageNotFoundError:
        raise BuildError("CUTLASS's headers are missing: pip install 'nvidia-cutlass>=4.2,<5'") from None
    for file in wheel.files or ():
        if file.as_posix().endswith("/" + header):
            include = Path(str(wheel.locate_file(file))).parents[1]
            if (include / "cute" / "tensor.hpp").is_file():
                return Cutlass(include, wheel.version)
    raise BuildError(
        f"nvidia-cutlass {wheel.version} is installed but has no {header}: "
        "pip install --force-reinstall 'nvidia-cutlass>=4.2,<5'"
    )
