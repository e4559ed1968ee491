"""The megakernel backend: binding.py (C interface), workspace.py (buffers), steps.py (launches), backend.py."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from mok_megatron.build.sources import ARCHITECTURES

if TYPE_CHECKING:
    from mok_megatron.megakernel.backend import MegakernelBackend
    from mok_megatron.megakernel.workspace import release_workspaces

__all__ = ["MegakernelBackend", "check_errors", "release_workspaces", "unavailable_reason"]


def unavailable_reason(device: torch.device) -> str | None:
    """Why the megakernel cannot run on `device`, or None. Does not build anything."""
    if device.type != "cuda":
        return f"the operands are on {device.type}, and the megakernel runs on CUDA devices"
    major, minor = torch.cuda.get_device_capability(device)
    if all(arch.capability != (major, minor) for arch in ARCHITECTURES.values()):
        known = ", ".join("{}.{} ({})".format(*arch.capability, arch.gpus) for arch in ARCHITECTURES.values())
        name = torch.cuda.get_device_name(device)
        return f"{name} has compute capability {major}.{minor}, and there are kernels for {known}"
    return None


def check_errors(wait: bool = False) -> None:
    """Raise what any launch of this process has recorded so far (a deadline, an overflow).

    Args:
        wait: for the launches under way first, as before anything that trusts their results. Else nothing is waited
            for: an error is raised as soon as it is known, at the latest by a later call of the layer.

    Raises:
        MokTimeoutError, MokCapacityError, MokInputError: from the first workspace that has one.
    """
    from mok_megatron.megakernel.workspace import all_workspaces

    workspaces = all_workspaces()
    if wait:
        for device in {workspace.device for workspace in workspaces}:
            torch.cuda.synchronize(device)
    for workspace in workspaces:
        workspace.check()


def symmetric_bytes() -> int:
    """Memory of this process that peers map, in bytes. It does not come from torch's allocator, whose statistics leave
    it out."""
    from mok_megatron.megakernel.backend import symmetric_bytes as of_workspaces

    return of_workspaces()


def __getattr__(name: str) -> Any:
    # Late: the binding builds and loads a library, which a machine without a GPU must not try.
    if name == "MegakernelBackend":
        from mok_megatron.megakernel.backend import MegakernelBackend

        return MegakernelBackend
    if name == "release_workspaces":
        from mok_megatron.megakernel.workspace import release_workspaces

        return release_workspaces
    raise AttributeError(f"module 'mok_megatron.megakernel' has no attribute {name!r}")
