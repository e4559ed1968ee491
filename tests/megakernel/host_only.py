"""The host's side of the megakernel without a GPU: everything but the launches happens, on CPU tensors."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mok_megatron import megakernel
from mok_megatron.config import MokConfig
from mok_megatron.megakernel import binding, operators, workspace
from mok_megatron.ops import backend, formats

STREAM = types.SimpleNamespace(cuda_stream=0, wait_stream=lambda stream: None)
DEVICE = types.SimpleNamespace(multi_processor_count=132, major=9, minor=0)


class Library:
    """Takes every launch, and counts them by name."""

    def __init__(self) -> None:
        self.launches: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.endswith("_bytes"):
            return lambda shape: 64

        def launch(*arguments: object) -> int:
            assert len(arguments) == 4
            self.launches.append(name)
            return 0

        return launch


@contextlib.contextmanager
def host_only() -> Iterator[Library]:
    """Calls of `mok_moe` with the backend megakernel on the CPU go to a `Library` that does nothing."""
    library = Library()
    on_cpu = torch.library.Library("mok_megatron", "FRAGMENT")
    on_cpu.impl("forward", operators._forward, "CPU")
    on_cpu.impl("backward", operators._backward, "CPU")
    with contextlib.ExitStack() as stack:
        for owner, name, value in (
            (binding, "library", lambda: library),
            (binding, "_function", lambda step: getattr(library, step)),
            (megakernel, "unavailable_reason", lambda device: None),
            (formats, "check_format", lambda *arguments: None),
            (backend, "check_format", lambda *arguments: None),
            (backend, "_selected", {}),
            (workspace, "symmetric_workspace", _workspace),
            (torch.cuda, "current_stream", lambda *arguments: STREAM),
            (torch.cuda, "is_current_stream_capturing", lambda: False),
            (torch.cuda, "get_device_properties", lambda *arguments: DEVICE),
            (torch.cuda, "synchronize", lambda *arguments: None),
        ):
            stack.enter_context(mock.patch.object(owner, name, value))
        yield library
        workspace.release_workspaces()
        workspace._last_stream.clear()
        on_cpu._destroy()


def _workspace(shape: binding.MokShape, config: MokConfig, group: object) -> workspace.Workspace:
    with mock.patch.object(torch.Tensor, "pin_memory", lambda tensor: tensor):
        heap = torch.zeros(64, dtype=torch.uint8)
        return workspace.Workspace(shape, config, heap).connect([heap.data_ptr()])


class Operations(TorchDispatchMode):
    """Names of the operations that torch dispatches."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))
