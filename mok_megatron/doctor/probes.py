"""What only a process that loads torch can tell. Run as ``python -m mok_megatron.doctor.probes NAME``; prints JSON.

The doctor starts each of these in a process of its own, with a deadline, because what they look for includes
libraries that crash on import and GPUs that do not answer.
"""

import datetime
import json
import os
import sys
import tempfile
from typing import Any

SYMMETRIC_TIMEOUT_S = 60


def torch_facts() -> dict[str, Any]:
    """torch as it imports here: version, CUDA build, devices it sees, peer access, and whether it loaded the plugin."""
    import torch

    hooked = getattr(sys.modules.get("mok_megatron.megatron.autoload"), "_hooked", False)
    devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    pairs = [(i, j) for i in range(devices) for j in range(devices) if i != j]
    return {
        "version": torch.__version__,
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if devices else None,
        "devices": devices,
        "no_peer_access": [pair for pair in pairs if not torch.cuda.can_device_access_peer(*pair)],
        "autoloaded": bool(hooked),
    }


def megatron_facts() -> dict[str, Any]:
    """Whether Megatron Core imports, and whether it accepts the dispatcher by itself, as in an unmodified script."""
    import typing
    import warnings

    warnings.simplefilter("ignore")
    import torch  # noqa: F401  its autoload is what is being tested
    from megatron.core.transformer.transformer_config import TransformerConfig

    field = TransformerConfig.__dataclass_fields__["moe_token_dispatcher_type"]
    return {"accepts_mok": "mok" in typing.get_args(field.type)}


def symmetric_facts() -> dict[str, Any]:
    """Every local GPU writes its number into its neighbour's symmetric memory and reads its own back."""
    import torch

    ranks = torch.cuda.device_count()
    with tempfile.NamedTemporaryFile() as meeting:
        torch.multiprocessing.spawn(_exchange, (ranks, meeting.name + ".store"), nprocs=ranks)
    return {"ranks": ranks}


def _exchange(rank: int, ranks: int, store: str) -> None:
    os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"  # the kernels do without it
    import torch
    import torch.distributed as dist
    import torch.distributed._symmetric_memory as symmetric

    torch.cuda.set_device(rank)
    deadline = datetime.timedelta(seconds=SYMMETRIC_TIMEOUT_S)
    dist.init_process_group("nccl", init_method=f"file://{store}", rank=rank, world_size=ranks, timeout=deadline)
    group = dist.group.WORLD
    assert group is not None
    mine = symmetric.empty(1024, dtype=torch.int32, device=torch.device("cuda", rank)).fill_(-1)
    handle = symmetric.rendezvous(mine, group.group_name)
    handle.barrier(timeout_ms=SYMMETRIC_TIMEOUT_S * 1000)
    neighbour = (rank + 1) % ranks
    handle.get_buffer(neighbour, (1024,), torch.int32).fill_(rank)
    handle.barrier(timeout_ms=SYMMETRIC_TIMEOUT_S * 1000)
    expected = (rank - 1) % ranks
    wrong = int((mine != expected).sum())
    dist.destroy_process_group()
    if wrong:
        raise RuntimeError(f"GPU {rank}: {wrong} of 1024 numbers that GPU {expected} wrote did not arrive")


PROBES = {"torch": torch_facts, "megatron": megatron_facts, "symmetric": symmetric_facts}

if __name__ == "__main__":
    print(json.dumps(PROBES[sys.argv[1]]()))
