"""What this machine is: everything the checks judge, collected once."""

import importlib.util
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mok_megatron import tuned, versions
from mok_megatron.build import ARCHITECTURES, BuildError, cache, sources
from mok_megatron.build.library import cached_library
from mok_megatron.build.toolkit import Cutlass, Toolkit, find_cutlass, find_toolkit
from mok_megatron.doctor.nvml import Driver, find_driver
from mok_megatron.resources import PACKAGE
from mok_megatron.typed_yaml import ConfigFileError

DISTRIBUTIONS = ("mok-megatron", "torch", "megatron-core", "transformer_engine", "nvidia-cutlass", "nvidia-ml-py")
PROBE_TIMEOUT_S = 180


@dataclass(frozen=True)
class Probe:
    """What a process of its own found out (``probes.py``), or why it found nothing."""

    found: Mapping[str, Any] = field(default_factory=dict)
    error: str | None = None


@dataclass(frozen=True)
class Facts:
    """A machine, as far as the checks need it. Errors are kept as text: each is some check's business."""

    python: tuple[int, int, int]
    executable: str
    distributions: Mapping[str, str | None]  # name -> version, None when not installed
    apex: str | None  # "nvidia", "other", None when not installed
    autoload_disabled: bool  # the user's TORCH_DEVICE_BACKEND_AUTOLOAD=0
    torch: Probe  # keys: see probes.torch_facts
    megatron: Probe  # keys: see probes.megatron_facts
    toolkit: Toolkit | str
    host_compiler: str | None
    cutlass: Cutlass | str
    cache_folder: str | None
    cache_error: str | None
    libraries: tuple[str, ...]  # architectures with a library in the cache
    driver: Driver | str
    symmetric_memory: Probe | None  # None: not tried
    imex_channels: tuple[str, ...]  # device files of IMEX channels
    imex_status: str | None  # what nvidia-imex-ctl says; None when there is no such command
    tuned: tuple[str, ...] | str = ()  # files of tuned settings for these GPUs, or what is wrong with one


def gather(quick: bool = False) -> Facts:
    """Looks at this machine. ``quick`` leaves out the memory round trip between GPUs, which takes some seconds."""
    driver = find_driver()
    folder, cache_error, libraries = _cache()
    gpus = 0 if isinstance(driver, str) else len(driver.gpus)
    return Facts(
        python=sys.version_info[:3],
        executable=sys.executable,
        distributions={name: versions.installed(name) for name in DISTRIBUTIONS},
        apex=which_apex(),
        autoload_disabled=os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD") == "0",
        torch=run_probe("torch"),
        megatron=run_probe("megatron"),
        toolkit=_or_error(find_toolkit),
        host_compiler=host_compiler(),
        cutlass=_or_error(find_cutlass),
        cache_folder=folder,
        cache_error=cache_error,
        libraries=libraries,
        driver=driver,
        symmetric_memory=run_probe("symmetric") if gpus and not quick else None,
        imex_channels=tuple(str(path) for path in sorted(Path("/dev/nvidia-caps-imex-channels").glob("channel*"))),
        imex_status=_imex_status() if gpus else None,
        tuned=_tuned(driver),
    )


def _tuned(driver: Driver | str) -> tuple[str, ...] | str:
    """The files of tuned settings for these GPUs; the error of the first that cannot be read."""
    names = [] if isinstance(driver, str) else sorted({tuned.folder_name(gpu.name) for gpu in driver.gpus})
    try:
        paths = [path for place in tuned.folders() for name in names for path in sorted((place / name).glob("*.yaml"))]
        for path in paths:
            tuned.load(path)
    except (ConfigFileError, FileNotFoundError) as error:
        return str(error)
    return tuple(map(str, paths))


def which_apex() -> str | None:
    """Whose package ``apex`` is, from its files; it is not imported. PyPI's is a toolkit for the Pyramid framework."""
    spec = importlib.util.find_spec("apex")
    if spec is None:
        return None
    for folder in spec.submodule_search_locations or ():
        if Path(folder, "multi_tensor_apply").is_dir() or Path(folder, "optimizers", "fused_adam.py").is_file():
            return "nvidia"
    return "other"


def host_compiler() -> str | None:
    """The C++ compiler that nvcc would call: NVCC_CCBIN, else g++ of PATH."""
    return shutil.which(os.environ.get("NVCC_CCBIN") or "g++")


def run_probe(name: str, timeout_s: float = PROBE_TIMEOUT_S) -> Probe:
    """Runs a function of ``probes.py`` in a process of its own: what crashes or hangs there is a finding here."""
    path = os.pathsep.join([str(PACKAGE.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-P", "-m", "mok_megatron.doctor.probes", name]
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command, env={**os.environ, "PYTHONPATH": path}, stdout=pipe, stderr=pipe, text=True, start_new_session=True
    ) as process:
        try:
            output, errors = process.communicate(timeout=timeout_s)
        except BaseException as error:
            # With the ranks that it has started: they would stay, and keep their GPUs.
            os.killpg(process.pid, signal.SIGKILL)
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
            return Probe(error=f"no answer within {timeout_s:.0f} s")
    lines, said, status = output.strip().splitlines(), errors.strip().splitlines(), process.returncode
    if status == 0 and lines:
        return Probe(found=json.loads(lines[-1]))
    ending = f"signal {-status}" if status < 0 else f"status {status}"
    return Probe(error=said[-1] if said else f"ended with {ending} and said nothing")


def _or_error[T](find: Callable[[], T]) -> T | str:
    try:
        return find()
    except BuildError as error:
        return str(error)


def _cache() -> tuple[str | None, str | None, tuple[str, ...]]:
    try:
        folder = str(cache.folder())
        sources.find_sources()
        return folder, None, tuple(name for name in ARCHITECTURES if cached_library(name))
    except (BuildError, FileNotFoundError) as error:
        return None, str(error), ()


def _imex_status() -> str | None:
    command = shutil.which("nvidia-imex-ctl")
    if command is None:
        return None
    try:
        done = subprocess.run([command, "-N"], capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"no answer: {error}"
    return (done.stdout + done.stderr).strip()


def machine() -> str:
    """One line for reports: system, processor architecture, cores."""
    return f"{platform.system()} {platform.release()}, {platform.machine()}, {os.cpu_count()} cores"
