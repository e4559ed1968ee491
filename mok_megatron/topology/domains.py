"""NVLink domains: which GPUs can read and write one another's memory.

Across hosts, the driver says so: NVML's fabric information gives each GPU the UUID of its NVLink cluster and a
clique inside it, and two GPUs are connected if both agree (NVML API reference, nvmlDeviceGetGpuFabricInfoV; NCCL
decides by the same pair). Where there is no such fabric, the domain is the host.
"""

from __future__ import annotations

import ctypes
import logging
import os
import socket
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mok_megatron.errors import MokConfigError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

logger = logging.getLogger(__name__)

FABRIC_TIMEOUT_S = 60.0
"""How long to wait for a GPU that is still registering with its fabric."""

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class FabricError(MokConfigError):
    """The GPU belongs to an NVLink fabric that is not ready or reports an error."""


@dataclass(frozen=True)
class Domain:
    """An NVLink domain as one rank sees it. Two ranks share NVLink if their domains are equal."""

    kind: str
    """"fabric": cluster and clique of NVML; "host": the machine; "described": a place in a plan."""
    key: str
    host: str = field(default="", compare=False)
    """Name of the machine, for messages."""
    reason: str = field(default="", compare=False)
    """Why the domain is the host, where it is."""

    def __str__(self) -> str:
        if self.kind == "host":
            return f"host {self.host or self.key}"
        return f"NVLink clique {self.key}" if self.kind == "fabric" else self.key


def local_domain(
    device: int | str | None = None,
    *,
    timeout_s: float = FABRIC_TIMEOUT_S,
    nvml: Any = None,
    host: str | None = None,
) -> Domain:
    """The domain of one GPU of this process.

    Args:
        device: a torch CUDA device index, or a GPU UUID ("GPU-..."); None: torch's current device.
        timeout_s: how long to wait while the fabric manager still registers the GPU.
        nvml: a module with pynvml's functions (default: pynvml, from nvidia-ml-py).
        host: name of this machine (default: its host name).

    Raises:
        FabricError: a fabric exists, but is not ready within `timeout_s` or reports an error. Taking the host
            instead would hide a broken rack.
    """
    name = host or socket.gethostname()
    uuid = device if isinstance(device, str) else _device_uuid(device)
    if uuid is None:
        return _host_domain(name, "no CUDA device")
    api: Any = nvml
    if api is None:
        try:
            import pynvml

            api = pynvml
        except ImportError:
            return _host_domain(name, "the package nvidia-ml-py is not installed")
    try:
        api.nvmlInit()
    except api.NVMLError as error:
        return _host_domain(name, f"NVML is not available: {error}")
    try:
        return _fabric_domain(api, uuid, name, timeout_s)
    finally:
        api.nvmlShutdown()


def gather_domains(group: ProcessGroup | None = None, domain: Domain | None = None) -> list[Domain]:
    """Domain of every rank of `group`, in its rank order. A collective; its deadline is the group's timeout.

    Args:
        domain: this rank's domain, if it is known already.

    Raises:
        FabricError: on every rank, if any rank's fabric is not ready; the message lists those ranks.
    """
    import torch.distributed as dist

    mine: Domain | str
    try:
        mine = domain if domain is not None else local_domain()
    except FabricError as error:
        mine = f"rank {dist.get_rank()}: {error}"  # told to all: one rank's error must not leave the others waiting
    answers: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(answers, mine, group=group)
    failures = [answer for answer in answers if isinstance(answer, str)]
    if failures:
        raise FabricError("NVLink fabric is not ready:\n  " + "\n  ".join(failures))
    return answers


def _fabric_domain(nvml: Any, uuid: str, host: str, timeout_s: float) -> Domain:
    deadline = time.monotonic() + timeout_s
    while True:
        info = nvml.c_nvmlGpuFabricInfoV_t()
        try:
            handle = nvml.nvmlDeviceGetHandleByUUID(uuid)
            nvml.nvmlDeviceGetGpuFabricInfoV(handle, ctypes.byref(info))
        except nvml.NVMLError as error:  # drivers before fabric information, or a GPU without NVSwitch
            return _host_domain(host, f"no fabric information for {uuid}: {error}")
        state = info.state & 0xFF  # one byte in the driver's structure, which pynvml reads with its padding
        if state != nvml.NVML_GPU_FABRIC_STATE_IN_PROGRESS:
            break
        if time.monotonic() >= deadline:
            raise FabricError(
                f"GPU {uuid} of {host} is still registering with its NVLink fabric after {timeout_s:.0f} s; "
                "see `nvidia-smi -q` (Fabric), the fabric manager of the NVLink switches and nvidia-imex"
            )
        time.sleep(min(1.0, max(0.0, deadline - time.monotonic())))
    if state == nvml.NVML_GPU_FABRIC_STATE_NOT_SUPPORTED:
        return _host_domain(host, "the GPU has no NVLink fabric beyond its host")
    if state == nvml.NVML_GPU_FABRIC_STATE_NOT_STARTED:
        raise FabricError(
            f"GPU {uuid} of {host} has not started to register with its NVLink fabric; start the fabric manager "
            "of its NVLink switches (`nvidia-smi -q`, Fabric, must say Completed)"
        )
    if info.status != nvml.NVML_SUCCESS:
        raise FabricError(
            f"GPU {uuid} of {host} failed to register with its NVLink fabric (NVML status {info.status}); see "
            "`nvidia-smi -q` (Fabric) and take this node out of the job"
        )
    cluster = bytes(info.clusterUuid)
    if not any(cluster):  # single-host NVSwitch systems complete with an empty UUID
        return _host_domain(host, "the fabric has no cluster UUID: NVLink ends at the host")
    return Domain("fabric", f"{cluster.hex()}/{int(info.cliqueId)}", host)


def _host_domain(host: str, reason: str) -> Domain:
    """The boot id is the same in every container of a machine and different on every machine."""
    logger.info("NVLink domain of %s is the host: %s", host, reason)
    try:
        key = _BOOT_ID.read_text().strip()
    except OSError:
        key = host
    return Domain("host", key, host, reason)


def _device_uuid(device: int | None) -> str | None:
    import torch

    if not torch.cuda.is_available():
        return None
    if device is None:
        local_rank = os.environ.get("LOCAL_RANK")
        current = torch.cuda.current_device()
        # Before torch.cuda.set_device every rank of a host would report GPU 0; LOCAL_RANK is torchrun's word.
        device = int(local_rank) if current == 0 and local_rank and torch.cuda.device_count() > 1 else current
    return f"GPU-{torch.cuda.get_device_properties(device).uuid}"
