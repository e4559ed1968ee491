"""What the NVIDIA driver says of this machine's GPUs, through NVML (package nvidia-ml-py). Creates no CUDA context."""

import ctypes
import importlib
from dataclasses import dataclass
from typing import Any

# NVML's fabric states (nvmlDeviceGetGpuFabricInfoV); NOT_SUPPORTED: no fabric beyond the host.
FABRIC_STATES = {0: "not supported", 1: "not started", 2: "in progress", 3: "completed"}


@dataclass(frozen=True)
class Gpu:
    """One GPU. ``fabric`` is one of FABRIC_STATES' words; ``cluster`` the fabric's UUID in hex, "" without one."""

    name: str
    capability: tuple[int, int]
    memory_gib: float
    fabric: str = "not supported"
    fabric_status: int = 0  # NVML's return code of the registration; 0 is success
    cluster: str = ""


@dataclass(frozen=True)
class Driver:
    """The driver, the newest CUDA it runs, its GPUs, and which pairs of them are joined by NVLink."""

    version: str
    cuda: tuple[int, int]
    gpus: tuple[Gpu, ...]
    nvlink: frozenset[tuple[int, int]] = frozenset()  # ordered pairs (i, j), i < j


def find_driver(nvml: Any = None) -> Driver | str:
    """The driver and its GPUs, or why there is none. ``nvml``: a module with pynvml's functions."""
    if nvml is None:
        try:
            nvml = importlib.import_module("pynvml")
        except ImportError:
            return "the package nvidia-ml-py is not installed"
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        return f"no NVIDIA driver answers (NVML: {error})"
    try:
        cuda = nvml.nvmlSystemGetCudaDriverVersion()
        handles = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
        return Driver(
            version=_text(nvml.nvmlSystemGetDriverVersion()),
            cuda=(cuda // 1000, cuda % 1000 // 10),
            gpus=tuple(_gpu(nvml, handle) for handle in handles),
            nvlink=frozenset(
                (i, j) for j in range(len(handles)) for i in range(j) if _linked(nvml, handles[i], handles[j])
            ),
        )
    except nvml.NVMLError as error:
        return f"the NVIDIA driver answers with an error (NVML: {error})"
    finally:
        nvml.nvmlShutdown()


def _gpu(nvml: Any, handle: Any) -> Gpu:
    major, minor = nvml.nvmlDeviceGetCudaComputeCapability(handle)
    fabric, status, cluster = "not supported", 0, ""
    info = nvml.c_nvmlGpuFabricInfoV_t()
    try:
        nvml.nvmlDeviceGetGpuFabricInfoV(handle, ctypes.byref(info))
        fabric = FABRIC_STATES.get(info.state & 0xFF, f"unknown ({info.state & 0xFF})")
        status = int(info.status)
        uuid = bytes(info.clusterUuid)
        cluster = uuid.hex() if any(uuid) else ""
    except nvml.NVMLError:
        pass  # drivers before fabric information, and GPUs without it
    return Gpu(
        name=_text(nvml.nvmlDeviceGetName(handle)),
        capability=(major, minor),
        memory_gib=nvml.nvmlDeviceGetMemoryInfo(handle).total / 2**30,
        fabric=fabric,
        fabric_status=status,
        cluster=cluster,
    )


def _linked(nvml: Any, one: Any, other: Any) -> bool:
    try:
        return bool(nvml.nvmlDeviceGetP2PStatus(one, other, nvml.NVML_P2P_CAPS_INDEX_NVLINK) == nvml.NVML_P2P_STATUS_OK)
    except nvml.NVMLError:
        return False


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
