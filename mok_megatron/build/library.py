"""Builds the kernel library when the cache has none, and loads it."""

import ctypes
import hashlib
import math
import os
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache as remember
from pathlib import Path

from mok_megatron import versions
from mok_megatron.build import cache, compiler, sources
from mok_megatron.build.errors import BuildError
from mok_megatron.build.sources import Architecture, Sources
from mok_megatron.build.toolkit import Cutlass, Toolkit, find_cutlass, find_toolkit

LINK_FLAGS = ("-shared", "-Xlinker", "-z,defs")  # an undefined symbol fails here and not at load


def build_timeout_s() -> float:
    """Deadline in seconds for a build, or for waiting for another process's: MOK_BUILD_TIMEOUT_S, default
    1800.
    """
    text = os.environ.get("MOK_BUILD_TIMEOUT_S", "1800")
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 < seconds < math.inf:
        raise BuildError(f"MOK_BUILD_TIMEOUT_S={text!r} is no number of seconds above 0; leave it out for 1800")
    return seconds


@remember
def load_library(arch: str | None = None) -> ctypes.CDLL:
    """The kernel library of ``arch`` ("90a"; default: of the current CUDA device), built first if need be.

    Raises BuildError: no kernel for the device, no compiler, a failed compilation (with nvcc's output), a
    cache that others may write to, or a deadline.
    """
    target = local_architecture() if arch is None else sources.architecture(arch)
    path = cached_library(target.name) or build([target.name])[target.name]
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise BuildError(
            f"cannot load {path}: {error}. If the machine's driver or C library changed since it was built, "
            f"build it again: mok-megatron build --arch {target.name} --force"
        ) from error


def local_architecture() -> Architecture:
    """The architecture of the current CUDA device."""
    import torch

    if not torch.cuda.is_available():
        raise BuildError("no CUDA device here; name the architecture to build for: mok-megatron build --arch 90a")
    return sources.architecture_of(torch.cuda.get_device_capability())


def cached_library(arch: str) -> Path | None:
    """The library of ``arch`` if the cache has it, checked. Compiles nothing.

    Where there is no compiler, a library of the same sources counts, whichever toolkit compiled it.
    """
    files = sources.find_sources()
    try:
        toolkit, cutlass = find_toolkit(), find_cutlass()
    except BuildError:
        return cache.find_for_sources(files.hash(), arch)
    return cache.find(recipe(files, sources.architecture(arch), toolkit, cutlass))


def recipe(files: Sources, arch: Architecture, toolkit: Toolkit, cutlass: Cutlass) -> cache.Recipe:
    """What the library of ``arch`` is built from. The sources include no torch header; its version is part of
    the recipe all the same, so that an upgrade links (not compiles) anew and old entries can be told apart.
    """
    return cache.Recipe(
        sources=files.hash(),
        arch=arch.name,
        flags=(*sources.FLAGS, *sources.extra_flags(), *LINK_FLAGS),
        nvcc=toolkit.version,
        cutlass=cutlass.version,
        torch=versions.installed("torch") or "none",
    )


def build(
    archs: Sequence[str],
    *,
    force: bool = False,
    jobs: int | None = None,
    root: Path | None = None,
    extra: Sequence[str] = (),
    progress: bool = True,
) -> dict[str, Path]:
    """Builds the library of every architecture that the cache lacks; gives architecture -> library.

    Args:
        archs: names such as "90a".
        force: compile even what the cache has.
        jobs: compilations at once; default: `compiler.default_jobs`.
        root: folder of the sources; default: the package's own.
        extra: flags for nvcc that change what it prints but not the code, such as ("-Xptxas", "-v").
        progress: say on standard error what is being compiled.

    Several processes that call this at once build once: the others wait, and fail with the builder's message
    if it failed. Raises BuildError.
    """
    targets = [sources.architecture(name) for name in dict.fromkeys(archs)]
    files = sources.find_sources(root)
    toolkit, cutlass = find_toolkit(), find_cutlass()
    toolkit.require_supported()
    return {
        arch.name: _Build(
            recipe(files, arch, toolkit, cutlass),
            files,
            toolkit,
            cutlass,
            force,
            jobs,
            tuple(extra),
            progress,
        ).library()
        for arch in targets
    }


@dataclass(frozen=True)
class _Build:
    """One library to be had: from the cache, from another process that builds it, or from nvcc."""

    recipe: cache.Recipe
    files: Sources
    toolkit: Toolkit
    cutlass: Cutlass
    force: bool
    jobs: int | None
    extra: tuple[str, ...]
    shown: bool

    def library(self) -> Path:
        if found := self._cached():
            return found
        progress = compiler.Progress(self.shown)
        failure = cache.folder() / f"{self.recipe.key}.failed"
        asked = time.time()
        with cache.lock(self.recipe.key, build_timeout_s(), progress.say) as waited:
            if found := self._cached():
                return found  # built by another process while this one waited
            if waited and failure.exists() and failure.stat().st_mtime >= asked:
                raise BuildError(failure.read_text())  # it would fail again, once a rank
            try:
                with tempfile.TemporaryDirectory(prefix="link-", dir=cache.folder()) as scratch:
                    built = Path(scratch, cache.LIBRARY)
                    self._compile(built, progress)
                    return cache.store(self.recipe, built)
            except BuildError as error:
                failure.write_text(str(error))
                raise

    def _cached(self) -> Path | None:
        return None if self.force else cache.find(self.recipe)

    def _compile(self, library: Path, progress: compiler.Progress) -> None:
        """Compiles the units that have no object in the cache, then links all objects to ``library``."""
        nvcc, arch = str(self.toolkit.nvcc), self.recipe.arch
        objects = cache.object_folder()
        flags = [
            *(flag for flag in self.recipe.flags if flag not in LINK_FLAGS),
            f"-gencode=arch=compute_{arch},code=sm_{arch}",
            *("-I", str(self.files.root), "-I", str(self.cutlass.include)),
        ]
        commands = []
        for unit in self.files.units:
            made_from = repr((self.files.unit_hash(unit), flags, self.recipe.nvcc, self.recipe.cutlass))
            output = objects / f"{hashlib.sha256(made_from.encode()).hexdigest()[:20]}.o"
            label = f"{unit.relative_to(self.files.root)} for sm_{arch}"
            commands.append(compiler.Command(label, [nvcc, *flags, *self.extra, "-c", str(unit)], output))

        missing = [command for command in commands if self.force or not command.output.exists()]
        # Largest first: the best guess of the longest compilation, which should not start last.
        missing.sort(key=lambda command: Path(command.arguments[-1]).stat().st_size, reverse=True)
        jobs = self.jobs or compiler.default_jobs()
        progress.say(
            f"compiling {len(missing)} of {len(commands)} CUDA files for sm_{arch} with nvcc "
            f"{self.toolkit.version}, "
            f"{min(jobs, max(1, len(missing)))} at a time; kept in {cache.folder()}"
        )
        progress.total = len(missing) + 1
        compiler.run_all(missing, jobs, build_timeout_s(), progress)
        for command in commands:
            cache.check_private(command.output)
            os.utime(command.output)  # in use; `cache.prune_objects` removes what has not been for long
        # The pip packages of the toolkit keep their libraries in lib, where their nvcc does not look.
        link = [nvcc, *LINK_FLAGS, "-L", str(self.toolkit.root / "lib"), *(str(c.output) for c in commands)]
        compiler.run_all([compiler.Command("link", link, library)], 1, build_timeout_s(), progress)
        cache.prune_objects()
