"""Buffers of one rank that outlive a launch: the symmetric heap that peers read and write, and local scratch."""

from __future__ import annotations

import ctypes
import dataclasses
import weakref
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from mok_megatron.config import MokConfig
from mok_megatron.errors import MokBackendError
from mok_megatron.megakernel import binding
from mok_megatron.megakernel.binding import MokShape, MokWorkspace
from mok_megatron.megakernel.failures import failure


class Workspace:
    """One rank's buffers for one shape; every layer of that shape and group shares it, launch after launch.

    Args:
        shape: what the ranks agreed on; `shape.rank` is this one.
        config: settings; its numbers of SMs and its deadline are used.
        heap: [mok_symmetric_bytes] uint8 on the device, zeroed before any rank's first launch.
        peers: device addresses of every rank's heap, in rank order, as seen from this device.
        keep: what must live as long as the workspace (the handle of symmetric memory).
    """

    def __init__(
        self, shape: MokShape, config: MokConfig, heap: torch.Tensor, peers: Sequence[int], keep: Any = None
    ) -> None:
        self.shape, self.config, self.device = shape, config, heap.device
        self._heap, self._keep = heap, keep
        self._peers = torch.tensor(list(peers), dtype=torch.int64).to(self.device)
        scratch_bytes = binding.library().mok_scratch_bytes(ctypes.byref(shape))
        self._scratch = torch.zeros(scratch_bytes, dtype=torch.uint8, device=self.device)
        # The kernel writes here while the host may be reading: memory of the host's, mapped on the device.
        self._error = torch.zeros(ctypes.sizeof(binding.MokError), dtype=torch.uint8).pin_memory()
        self._record = binding.MokError.from_address(self._error.data_ptr())
        sms = torch.cuda.get_device_properties(self.device).multi_processor_count
        self.struct = MokWorkspace(
            shape,
            self._peers.data_ptr(),
            self._scratch.data_ptr(),
            self._error.data_ptr(),
            int(config.timeout_s * 1e9),
            config.num_sms or max(1, sms - (config.reserved_sms or 0)),
            config.fwd_comm_sms,
            config.bwd_comm_sms,
        )

    @property
    def bytes(self) -> int:
        """Device memory held, in bytes."""
        return self._heap.numel() + self._scratch.numel()

    def check(self) -> None:
        """Raise what a launch has recorded so far. Reads host memory only: it neither waits nor synchronises.

        Raises:
            MokTimeoutError, MokCapacityError, MokInputError: see `failures.py`.
        """
        if self._record.code != 0:
            raise failure(self._record, self.config.timeout_s)


def symmetric_workspace(shape: MokShape, config: MokConfig, group: dist.ProcessGroup | None) -> Workspace:
    """A workspace on the current device whose heap every rank of `group` maps; all of them call it together.

    Raises:
        TopologyError: the group crosses NVLink domains; lists the ranks that do.
        MokBackendError: the devices of the group cannot map each other's memory.
    """
    device = torch.device("cuda", torch.cuda.current_device())
    heap_bytes = binding.library().mok_symmetric_bytes(ctypes.byref(shape))
    if group is None:
        heap = torch.zeros(heap_bytes, dtype=torch.uint8, device=device)
        return Workspace(shape, config, heap, [heap.data_ptr()])
    import torch.distributed._symmetric_memory as symmetric_memory

    from mok_megatron.topology import require_one_domain

    require_one_domain(group)
    try:
        heap = symmetric_memory.empty(heap_bytes, dtype=torch.uint8, device=device)
        heap.zero_()
        handle = symmetric_memory.rendezvous(heap, group=group)
    except RuntimeError as error:
        raise MokBackendError(
            f"the GPUs of the expert-parallel group cannot map each other's memory ({error}); place the whole group "
            "inside one NVLink domain, or choose another --moe-token-dispatcher-type"
        ) from error
    workspace = Workspace(shape, config, heap, handle.buffer_ptrs, keep=handle)
    # No rank may write into a heap that its owner has not zeroed yet.
    torch.cuda.synchronize(device)
    dist.barrier(group=group)
    return workspace


def virtual_workspaces(shape: MokShape, config: MokConfig, device: torch.device) -> list[Workspace]:
    """Workspaces of `shape.ranks` ranks that share one device, for tests; each gets its share of the SMs.

    All of them must be resident together: `config.num_sms` is the number for each, or the device's divided by the
    number of ranks.
    """
    ranks = shape.ranks
    sms = torch.cuda.get_device_properties(device).multi_processor_count
    config = dataclasses.replace(config, num_sms=config.num_sms or max(2, sms // ranks))
    heap_bytes = binding.library().mok_symmetric_bytes(ctypes.byref(shape))
    heaps = [torch.zeros(heap_bytes, dtype=torch.uint8, device=device) for _ in range(ranks)]
    torch.cuda.synchronize(device)
    peers = [heap.data_ptr() for heap in heaps]
    workspaces = []
    for rank, heap in enumerate(heaps):
        mine = MokShape.from_buffer_copy(shape)
        mine.rank = rank
        workspaces.append(Workspace(mine, config, heap, peers, keep=heaps))
    return workspaces


# Workspaces by group; a group that is gone takes its workspaces along.
_by_group: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[tuple, Workspace]] = weakref.WeakKeyDictionary()
_without_group: dict[tuple, Workspace] = {}


def find(group: dist.ProcessGroup | None, key: tuple) -> Workspace | None:
    """The workspace that was made for `key` in `group`."""
    return _of(group).get(key)


def keep(group: dist.ProcessGroup | None, key: tuple, workspace: Workspace) -> None:
    """Remember a workspace until `release_workspaces` or the end of the group."""
    _of(group)[key] = workspace


def all_workspaces() -> list[Workspace]:
    """Every workspace that is alive."""
    return [w for table in (*_by_group.values(), _without_group) for w in table.values()]


def release_workspaces(group: dist.ProcessGroup | None = None) -> None:
    """Free the workspaces of a group, or all of them. No launch may be under way; call it on every rank.

    Args:
        group: None means all groups.
    """
    if group is not None:
        _by_group.pop(group, None)
        return
    _by_group.clear()
    _without_group.clear()


def _of(group: dist.ProcessGroup | None) -> dict[tuple, Workspace]:
    return _without_group if group is None else _by_group.setdefault(group, {})
