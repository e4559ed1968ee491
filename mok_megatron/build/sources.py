"""The CUDA sources: which are compiled, for which architectures, with which flags, and their hash."""

import hashlib
import os
import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from mok_megatron.build.errors import BuildError
from mok_megatron.resources import data_folder


@dataclass(frozen=True)
class Architecture:
    """A target of nvcc. ``name`` is what follows ``sm_``; the suffix a admits the instructions of that GPU
    alone.
    """

    name: str
    capability: tuple[int, int]  # as torch.cuda.get_device_capability() gives it
    gpus: str
    run: bool  # whether these kernels have been run on such a GPU, and not only compiled and checked


ARCHITECTURES = {
    arch.name: arch
    for arch in (
        Architecture("90a", (9, 0), "H100, H200, GH200", run=True),
        Architecture("100a", (10, 0), "B200, GB200", run=False),
        Architecture("103a", (10, 3), "B300, GB300", run=False),
    )
}

# Sources under kernels/ that are not part of the library, as path relative to kernels/ -> why.
NOT_IN_LIBRARY: dict[str, str] = {}

_INCLUDE = re.compile(r'^\s*#\s*include\s*(".*?"|<.*?>|\w+)', re.MULTILINE)

HEADER_SUFFIXES = (".cuh", ".h", ".hpp", ".inl")

# NDEBUG: an assert in CUTLASS's main loop would serialise wgmma (ptxas warning C7510).
FLAGS = ("-O3", "-std=c++17", "-DNDEBUG", "--expt-relaxed-constexpr", "-Xcompiler", "-fPIC")


def architecture(name: str) -> Architecture:
    """The architecture called ``name`` ("90a", also "sm_90a" or "9.0a"); BuildError lists those there are."""
    plain = name.strip().lower().removeprefix("sm_").removeprefix("compute_").replace(".", "")
    if plain in ARCHITECTURES:
        return ARCHITECTURES[plain]
    known = ", ".join(f"{a.name} ({a.gpus})" for a in ARCHITECTURES.values())
    raise BuildError(f"unknown architecture '{name}'; the kernels are written for {known}")


def architecture_of(capability: tuple[int, int]) -> Architecture:
    """The architecture of a GPU of that compute capability; BuildError when there is no kernel for it."""
    for arch in ARCHITECTURES.values():
        if arch.capability == capability:
            return arch
    known = ", ".join("{}.{} ({})".format(*a.capability, a.gpus) for a in ARCHITECTURES.values())
    raise BuildError(
        "no kernel for compute capability {}.{}; there are kernels for {}. "
        "On other GPUs choose the reference backend: --mok-backend reference".format(*capability, known)
    )


def extra_flags() -> tuple[str, ...]:
    """Flags from the environment variable MOK_NVCC_FLAGS, for example -lineinfo for a profiler. Split as a shell would,
    but nothing in it is run."""
    text = os.environ.get("MOK_NVCC_FLAGS", "")
    try:
        return tuple(shlex.split(text))
    except ValueError as error:
        raise BuildError(
            f"MOK_NVCC_FLAGS={text!r} cannot be split into flags: {error}; quote it as for a shell"
        ) from error


@dataclass(frozen=True)
class Sources:
    """The translation units and headers of the library, with absolute paths, sorted."""

    root: Path
    units: tuple[Path, ...]
    headers: tuple[Path, ...]

    def hash(self) -> str:
        """SHA-256 (hex) of the names and contents of every unit and header: that of the library."""
        return self._hash(*self.units, *self.headers)

    def unit_hash(self, unit: Path) -> str:
        """The same of one unit and the headers that it includes, so that an edit recompiles what it touches."""
        return self._hash(unit, *self.included(unit))

    def included(self, unit: Path) -> tuple[Path, ...]:
        """Headers under ``root`` that ``unit`` includes, directly or through others, under any condition.

        Every header where an include is computed by a macro, since its name is then not in the text.
        """
        found: set[Path] = set()
        waiting = [unit]
        while waiting:
            path = waiting.pop()
            for name in _INCLUDE.findall(path.read_text()):
                if not name.startswith(('"', "<")):
                    return self.headers
                for folder in (path.parent, self.root):
                    header = Path(os.path.normpath(folder / name[1:-1]))
                    if header in self.headers and header not in found:
                        found.add(header)
                        waiting.append(header)
        return tuple(sorted(found))

    def _hash(self, *paths: Path) -> str:
        digest = hashlib.sha256()
        for path in paths:
            content = path.read_bytes()
            digest.update(f"{path.relative_to(self.root)}\0{len(content)}\0".encode())
            digest.update(content)
        return digest.hexdigest()


def find_sources(root: Path | None = None) -> Sources:
    """Every .cu file under ``root`` (default: the kernels/ folder) except those in NOT_IN_LIBRARY."""
    root = data_folder("kernels") if root is None else root
    files = sorted(path for path in root.rglob("*") if path.is_file())
    units = tuple(path for path in files if path.suffix == ".cu" and str(path.relative_to(root)) not in NOT_IN_LIBRARY)
    if not units:
        raise BuildError(f"no CUDA sources (*.cu) under {root}: reinstall the package")
    return Sources(root, units, tuple(path for path in files if path.suffix in HEADER_SUFFIXES))
