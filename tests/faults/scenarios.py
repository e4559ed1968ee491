"""What the two ranks of a Pair do: one function a scenario, called on both with the same arguments.

Names that end in "_" end the process by an exception or a signal, or leave it to end with an error noted; the others
leave the pair as it was, and return or raise what the test looks at.
"""

from __future__ import annotations

import gc
import os
import signal
import time
from pathlib import Path
from typing import Any, TextIO

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from mok_megatron.megakernel import check_errors, release_workspaces
from mok_megatron.ops import mok_moe
from tests.faults.layer import Layer


class Rank:
    """This worker. `say` writes a line for the test before the scenario's answer."""

    def __init__(self, rank: int, answers: TextIO) -> None:
        self.rank, self._answers = rank, answers

    def say(self, text: str) -> None:
        """One line, read by `Worker.line`."""
        self._answers.write(text + "\n")
        self._answers.flush()

    def layer(self, **sizes: Any) -> Layer:
        """A layer on the world's group."""
        return Layer(self.rank, dist.group.WORLD, **sizes)

    def stop(self) -> None:
        """SIGSTOP for this process; the test sends SIGCONT."""
        os.kill(os.getpid(), signal.SIGSTOP)

    def die(self) -> None:
        """SIGKILL."""
        os.kill(os.getpid(), signal.SIGKILL)


# ---- nothing is lost: the right result


def step(r: Rank) -> None:
    """One step."""
    layer = r.layer()
    layer.check(layer.step())


def fp8(r: Rank) -> None:
    """Two steps in FP8, between which the weights count as changed."""
    layer = r.layer(format="blockwise")
    layer.check(layer.step())
    layer.touch_weights()
    layer.check(layer.step())


def interleaved(r: Rank) -> None:
    """Two layers of one shape, so of one workspace: both forwards, then the backwards in both orders."""
    a, b = r.layer(seed=1), r.layer(seed=2)
    for first, second in ((a, b), (b, a)):
        y_first, y_second = first.forward(), second.forward()
        first.check(first.backward(y_first))
        second.check(second.backward(y_second))


def two_streams(r: Rank) -> None:
    """Three layers of two shapes on two streams, with nothing between that orders them."""
    a, b, c = r.layer(seed=1), r.layer(seed=2), r.layer(seed=3, hidden=256, topk=2)
    streams = torch.cuda.Stream(), torch.cuda.Stream()
    torch.cuda.synchronize()
    for _ in range(10):
        with torch.cuda.stream(streams[0]):
            y_a = a.forward()
        with torch.cuda.stream(streams[1]):
            found_b = b.step()
        with torch.cuda.stream(streams[0]):
            found_a = a.backward(y_a)
        with torch.cuda.stream(streams[1]):
            found_c = c.step()
    torch.cuda.synchronize()
    for layer, found in ((a, found_a), (b, found_b), (c, found_c)):
        layer.check(found)


def second_workspace(r: Rank, rounds: int) -> list[list[int]]:
    """Workspaces of two shapes in turn, then all released; free bytes and open files after each round."""
    seen = []
    for _ in range(rounds):
        a, c = r.layer(), r.layer(hidden=1024, topk=2, tokens=3000)
        for layer in (a, c, a, c):
            layer.check(layer.step())
        del a, c, layer
        release_workspaces()
        torch.cuda.empty_cache()
        dist.barrier()  # a peer's mapping keeps memory alive
        torch.cuda.synchronize()
        seen.append([torch.cuda.mem_get_info()[0], len(os.listdir("/proc/self/fd"))])
        dist.barrier()  # the peer may have the same GPU
    return seen


def many_steps(r: Rank, steps: int, samples: int) -> list[dict[str, int]]:
    """Steps of layers of four kinds with another number of tokens each time; what the process holds, now and then."""
    kinds: list[dict[str, Any]] = [{}, {"topk": 2}, {"hidden": 256, "inner": 192}, {"format": "blockwise"}]
    layers = [r.layer(max_tokens=600, **kind) for kind in kinds]
    generator = torch.Generator().manual_seed(r.rank)  # ranks differ in their numbers of tokens
    sizes = torch.randint(0, 601, (steps,), generator=generator).tolist()
    seen = []
    for done, tokens in enumerate(sizes, 1):
        layer = layers[done % len(layers)]
        layer.touch_weights()
        x, weights = (t[:tokens].detach().requires_grad_() for t in (layer.x, layer.weights))
        leaves = [x, weights, *layer._mine[2:]]
        y = mok_moe(x, layer.ids[:tokens], weights, *leaves[2:], layer.group, layer.config)
        torch.autograd.grad(y, leaves, layer.dy[:tokens])
        del y
        if done % (steps // samples) == 0:
            torch.cuda.synchronize()
            pages = int(Path("/proc/self/statm").read_text().split()[1])
            seen.append(
                {
                    "torch": torch.cuda.memory_allocated(),
                    "device": torch.cuda.mem_get_info()[0],
                    "host": pages * os.sysconf("SC_PAGE_SIZE"),
                    "files": len(os.listdir("/proc/self/fd")),
                }
            )
    for layer in layers:
        layer.check(layer.step())
    return seen


def exception_between(r: Rank) -> None:
    """The user's code fails between forward and backward on both ranks, catches it, and goes on."""
    layer = r.layer()
    try:
        y = layer.forward()
        raise ValueError("the user's own")
    except ValueError:
        del y
    layer.check(layer.step())


def stopped(r: Rank) -> None:
    """Rank 1 is stopped between forward and backward, for less than the deadline."""
    layer = r.layer(timeout_s=20.0)
    y = layer.forward()
    if r.rank == 1:
        r.stop()
    layer.check(layer.backward(y))


class Numbers(Dataset):
    """Batches of a data loader."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, i: int) -> Tensor:
        return torch.full((4,), float(i))


def data_loaders(r: Rank) -> None:
    """A forked and a spawned data loader deliver while the layer runs."""
    layer = r.layer()
    layer.step()
    for method in ("fork", "spawn"):
        loader = DataLoader(Numbers(), batch_size=2, num_workers=1, multiprocessing_context=method)
        sums = []
        for batch in loader:
            found = layer.step()
            sums.append(batch.cuda().sum().item())
        assert sums == [4.0, 20.0, 36.0, 52.0], sums
        layer.check(found)


def group_destroyed(r: Rank) -> None:
    """A group and its workspace go while launches are under way."""
    layer = Layer(r.rank, dist.new_group([0, 1]), tokens=6000, seed=4, max_tokens=6000)
    layer.step()
    _leave_under_way(layer, layer.group)


def world_destroyed(r: Rank) -> None:
    """Likewise, of all groups."""
    layer = r.layer(tokens=6000, seed=4, max_tokens=6000)
    layer.step()
    _leave_under_way(layer, None)


def _leave_under_way(layer: Layer, group: Any) -> None:
    torch.cuda.synchronize()
    dist.barrier()
    for _ in range(20):
        found = layer.step()
    dist.destroy_process_group(group)
    layer.group = None
    del group
    gc.collect()
    layer.check(found)


# ---- an error on both ranks, and the pair goes on


def other_size(r: Rank, **sizes: int) -> None:
    """Rank 1 has another size from the first call on."""
    r.layer(**{"hidden": 768, **(sizes if r.rank == 1 else {})}).step()


def no_memory(r: Rank) -> None:
    """Rank 1's GPU is full when the workspace is made."""
    torch.cuda.synchronize()
    dist.barrier()
    hog = None
    if r.rank == 1:
        free, _ = torch.cuda.mem_get_info()
        hog = torch.empty(max(0, free - (512 << 20)), dtype=torch.uint8, device="cuda")
    dist.barrier()
    try:
        r.layer(max_tokens=400_000).step()
    finally:
        del hog
        torch.cuda.empty_cache()


def recover(r: Rank) -> None:
    """What docs/kernel.md says: after an error, every rank releases its workspaces; then all goes on."""
    release_workspaces()
    dist.barrier()
    step(r)


def other_layer(r: Rank) -> None:
    """Ranks go on with layers of different shapes, both known."""
    a, c = r.layer(), r.layer(hidden=256, topk=2)
    a.step()
    c.step()
    _go_on(c if r.rank == 1 else a)


def other_direction(r: Rank) -> None:
    """Rank 0 goes on to a forward, rank 1 to a backward."""
    layer = r.layer()
    y = layer.forward()
    if r.rank == 1:
        layer.backward(y)
    else:
        layer.forward()
    torch.cuda.synchronize()
    check_errors()


# ---- the end of a rank


def never_comes_(r: Rank, victim: int) -> None:
    """A rank dies before the first call."""
    layer = r.layer()
    if r.rank == victim:
        r.die()
    layer.forward()


def dies_before_(r: Rank) -> None:
    """Rank 1 dies between two launches."""
    layer = r.layer()
    layer.step()
    torch.cuda.synchronize()
    dist.barrier()
    if r.rank == 1:
        r.die()
    _go_on(layer)


def runs_(r: Rank) -> None:
    """Launch after launch, until the test kills a rank."""
    layer = r.layer(tokens=8192, hidden=2048, inner=1024, topk=8)
    layer.step()
    torch.cuda.synchronize()
    dist.barrier()
    r.say("running")
    _go_on(layer)


def dies_after_(r: Rank) -> None:
    """Rank 1 dies as soon as its own launches have ended."""
    layer = r.layer()
    wanted = layer.expected()
    layer.step()
    torch.cuda.synchronize()
    dist.barrier()
    found = layer.step()
    torch.cuda.synchronize()
    if r.rank == 1:
        r.die()
    assert all(map(torch.equal, found, wanted))


def stopped_too_long_(r: Rank) -> None:
    """Rank 1 is stopped for longer than the deadline, and comes back."""
    layer = r.layer()
    layer.step()
    torch.cuda.synchronize()
    dist.barrier()
    if r.rank == 1:
        r.stop()
    _go_on(layer)


def one_launch_more_(r: Rank) -> None:
    """Rank 0 launches once more than rank 1, and ends without asking."""
    layer = r.layer()
    for _ in range(3):
        layer.step()
    if r.rank == 0:
        layer.forward()
    torch.cuda.synchronize()


def raises_between_(r: Rank) -> None:
    """Rank 1 ends by an exception of the user's code between forward and backward."""
    layer = r.layer()
    y = layer.forward()
    torch.cuda.synchronize()
    if r.rank == 1:
        raise ValueError("the user's own")
    layer.backward(y)
    _go_on(layer)


def _go_on(layer: Layer) -> None:
    end = time.monotonic() + 30
    while time.monotonic() < end:
        for _ in range(2):
            layer.step()
        torch.cuda.synchronize()
