"""Buffers of one rank that outlive a launch: the symmetric heap that peers read and write, and local scratch."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import dataclasses
import functools
import os
import sys
import weakref
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from mok_megatron.config import MokConfig
from mok_megatron.errors import MokBackendError, MokConfigError, MokError, Problems
from mok_megatron.megakernel import binding
from mok_megatron.megakernel.agreement import exchange
from mok_megatron.megakernel.binding import MokShape, MokWorkspace
from mok_megatron.megakernel.failures import failure


def number_of_ctas(config: MokConfig, sms: int) -> int:
    """CTAs of a launch on a device of `sms` SMs: one each, and all resident together.

    Raises:
        MokConfigError: settings that ask for more SMs than there are, or leave none for the products.
    """
    problems = Problems()
    if config.num_sms is not None:
        remedy = f"give at most {sms}, or leave it out"
        problems.require(config.num_sms <= sms, f"--mok-num-sms {config.num_sms} exceeds this GPU's {sms} SMs", remedy)
    reserved = config.reserved_sms or 0
    ctas = config.num_sms or sms - reserved
    most = max(config.fwd_comm_sms, config.bwd_comm_sms)
    problems.require(
        ctas > most,
        f"--mok-reserved-sms {reserved} and {most} SMs that communicate leave none of this GPU's {sms} SMs",
        "lower --mok-reserved-sms, --mok-fwd-comm-sms or --mok-bwd-comm-sms",
    )
    problems.raise_if_any(MokConfigError, "these settings do not fit this GPU:")
    return ctas


class Workspace:
    """One rank's buffers for one shape; every layer of that shape and group shares it, launch after launch.

    Args:
        shape: what the ranks agreed on; `shape.rank` is this one.
        config: settings; its numbers of SMs and its deadline are used.
        heap: [mok_symmetric_bytes] uint8 on the device, zeroed before any rank's first launch.
        side_by_side: launches may overlap those of other workspaces on the device: virtual ranks, which together
            take no more SMs than there are.
    """

    def __init__(self, shape: MokShape, config: MokConfig, heap: torch.Tensor, side_by_side: bool = False) -> None:
        self.shape, self.config, self.device = shape, config, heap.device
        self._side_by_side = side_by_side
        ctas = number_of_ctas(config, torch.cuda.get_device_properties(self.device).multi_processor_count)
        scratch_bytes = binding.library().mok_scratch_bytes(ctypes.byref(shape))
        scratch = torch.zeros(scratch_bytes, dtype=torch.uint8, device=self.device)
        self._peers = torch.zeros(shape.ranks, dtype=torch.int64, device=self.device)
        # The kernel writes here while the host may be reading: memory of the host's, mapped on the device.
        error = torch.zeros(ctypes.sizeof(binding.MokError), dtype=torch.uint8).pin_memory()
        self.bytes = heap.numel() + scratch.numel()
        """Device memory held, in bytes."""
        self._notes = _Notes(binding.MokError.from_address(error.data_ptr()), config.timeout_s)
        # What launches use outlives them, also where the last reference goes while they run.
        self._memory = [heap, scratch, self._peers, error]
        weakref.finalize(self, _end, self._notes, self._memory, self.device).atexit = False
        self.struct = MokWorkspace(
            shape,
            self._peers.data_ptr(),
            scratch.data_ptr(),
            error.data_ptr(),
            int(config.timeout_s * 1e9),
            ctas,
            config.fwd_comm_sms,
            config.bwd_comm_sms,
        )
        _alive.add(self)

    def connect(self, heaps: Sequence[int], keep: Any = None) -> Workspace:
        """Take over the device addresses of every rank's heap, in rank order, as seen from this device.

        Args:
            keep: what must live as long as the workspace (the handle of symmetric memory, other ranks' heaps).
        """
        self._peers.copy_(torch.tensor(list(heaps), dtype=torch.int64))
        self._memory.append(keep)
        return self

    @functools.cached_property
    def row_bytes(self) -> int:
        """Of a row as it is dispatched."""
        return int(binding.library().mok_row_bytes(ctypes.byref(self.shape)))

    def launch_stream(self) -> int:
        """The current CUDA stream, after making it wait for the launch before on this device.

        A launch needs all its SMs at once, and workspaces are shared between layers: two launches must not overlap,
        whatever streams their layers run on. Inside a CUDA graph it is left to the capture to order its streams.
        """
        stream = torch.cuda.current_stream(self.device)
        last = _last_stream.get(self.device)
        # By handles: torch's streams say of None neither that it is equal nor that it is not.
        other = last is None or last.cuda_stream != stream.cuda_stream
        if other and not self._side_by_side and not torch.cuda.is_current_stream_capturing():
            if last is not None:
                stream.wait_stream(last)
            _last_stream[self.device] = stream
        return stream.cuda_stream

    def check(self) -> None:
        """Raise what a launch has recorded so far. Reads host memory only: it neither waits nor synchronises.

        Raises:
            MokTimeoutError, MokCapacityError, MokInputError: see `failures.py`.
        """
        if self._notes.record.code != 0:
            self._notes.told = True
            raise self._notes.error()

    def untold(self) -> MokError | None:
        """What was recorded and never raised; it counts as told from now on. Waits for nothing."""
        return self._notes.untold()


class _Notes:
    """What launches record, and what has become of it; outlives the workspace while its last launch runs."""

    def __init__(self, record: binding.MokError, timeout_s: float) -> None:
        self.record, self.timeout_s, self.told = record, timeout_s, False
        self.pid = os.getpid()  # a forked child shares the object and not the device

    def error(self) -> MokError:
        return failure(self.record, self.timeout_s)

    def untold(self) -> MokError | None:
        if self.told or os.getpid() != self.pid or self.record.code == 0:
            return None
        self.told = True
        return self.error()


def _end(notes: _Notes, memory: list[Any], device: torch.device) -> None:
    if os.getpid() != notes.pid:
        return
    # Launches may be under way (a group destroyed behind them). A CUDA error here is another's, and raised there.
    with contextlib.suppress(RuntimeError):
        if not torch.cuda.is_current_stream_capturing():
            torch.cuda.synchronize(device)
    _print(notes.untold())
    memory.clear()


def _print(error: MokError | None) -> None:
    if error is not None:
        print(f"mok_megatron: {type(error).__name__}: {error}", file=sys.stderr, flush=True)


def report_errors() -> None:
    """Print what launches have recorded and nothing has raised; runs when the process ends.

    The error of a process's last launch has no next call to be raised from. Waits for nothing.
    """
    for workspace in all_workspaces():
        _print(workspace.untold())


_alive: weakref.WeakSet[Workspace] = weakref.WeakSet()
_last_stream: dict[torch.device, torch.cuda.Stream] = {}
atexit.register(report_errors)


def symmetric_workspace(shape: MokShape, config: MokConfig, group: dist.ProcessGroup | None) -> Workspace:
    """A workspace on the current device whose heap every rank of `group` maps; all of them call it together.

    Raises:
        TopologyError: the group crosses NVLink domains; lists the ranks that do.
        MokBackendError: a rank has no memory for it, or the devices cannot map each other's. On every rank.
        MokTimeoutError: a rank of the group did not come within the deadline.
    """
    device = torch.device("cuda", torch.cuda.current_device())
    heap_bytes = binding.library().mok_symmetric_bytes(ctypes.byref(shape))
    if group is None:
        try:
            heap = torch.zeros(heap_bytes, dtype=torch.uint8, device=device)
            return Workspace(shape, config, heap).connect([heap.data_ptr()])
        except RuntimeError as error:
            raise MokBackendError(_no_memory(shape, error)) from error
    import torch.distributed._symmetric_memory as symmetric_memory

    from mok_megatron.topology import Domain, check_expert_groups, local_domain

    # Each rank tells the others how far it came, so that nobody waits for one that has given up.
    told: dict[str, Any] = {}
    failed: Exception | None = None
    try:
        told["domain"] = dataclasses.asdict(local_domain())
        heap = symmetric_memory.empty(heap_bytes, dtype=torch.uint8, device=device)
        heap.zero_()
        workspace = Workspace(shape, config, heap)
        torch.cuda.current_stream(device).synchronize()  # no rank may write into a heap before it is zero
    except MokError as error:
        told["problem"], failed = str(error), error
    except RuntimeError as error:
        told["problem"], failed = _no_memory(shape, error), error
    answers = exchange(group, told, "to allocate its workspace", config.timeout_s)
    problems = [f"\n  rank {r}: {answer['problem']}" for r, answer in enumerate(answers) if "problem" in answer]
    if problems:
        title = "mok_moe: not every rank of the expert-parallel group can share memory with the others:"
        raise MokBackendError(title + "".join(problems)) from failed
    ranks = dist.get_process_group_ranks(group)
    domains = [Domain(**answer["domain"]) for answer in answers]
    check_expert_groups(dict(zip(ranks, domains, strict=True)), [ranks])
    try:
        handle = symmetric_memory.rendezvous(heap, group=group)
    except RuntimeError as error:
        raise MokBackendError(
            f"the GPUs of the expert-parallel group cannot map each other's memory ({error}); place the whole group "
            "inside one NVLink domain, or choose another --moe-token-dispatcher-type"
        ) from error
    return workspace.connect(handle.buffer_ptrs, keep=handle)


def _no_memory(shape: MokShape, error: Exception) -> str:
    library, reason = binding.library(), str(error).strip().split("\n", 1)[0]
    gib = [f(ctypes.byref(shape)) / 2**30 for f in (library.mok_symmetric_bytes, library.mok_scratch_bytes)]
    return (
        f"cannot allocate a workspace of {gib[0]:.2f} GiB that peers map and {gib[1]:.2f} GiB of scratch, for "
        f"{shape.max_tokens} tokens a rank, H {shape.hidden}, K {shape.topk} and {shape.ring_rows} rows a macrobatch "
        f"({reason}); free memory on that GPU, or lower --mok-max-tokens or --mok-macrobatch-size"
    )


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
        workspaces.append(Workspace(mine, config, heap, side_by_side=True).connect(peers, keep=heaps))
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
    return list(_alive)


def release_workspaces(group: dist.ProcessGroup | None = None) -> None:
    """Free the workspaces of a group, or all of them, once their launches have ended; call it on every rank.

    A layer whose backward is still to come keeps its workspace until then.

    Args:
        group: None means all groups.

    Raises:
        MokTimeoutError, MokCapacityError, MokInputError: the first error that a launch has recorded and no call has
            raised yet. Everything is released all the same.
    """
    tables = [_by_group.pop(group, {})] if group is not None else [*_by_group.values(), _without_group]
    workspaces = [workspace for table in tables for workspace in table.values()]
    for table in tables:
        table.clear()
    for device in {workspace.device for workspace in workspaces}:
        torch.cuda.synchronize(device)
    errors = [error for error in (workspace.untold() for workspace in workspaces) if error is not None]
    if errors:
        raise errors[0]


def _of(group: dist.ProcessGroup | None) -> dict[tuple, Workspace]:
    return _without_group if group is None else _by_group.setdefault(group, {})
