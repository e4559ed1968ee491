"""Two real GPUs: one process each, NVLink between them."""

from __future__ import annotations

import os
import socket

import pytest
import torch

from mok_megatron.selftest.problem import VirtualRanks, kernel_config, make_problem

pytestmark = pytest.mark.gpu(count=2)


def worker(rank: int, port: int) -> None:
    import torch.distributed as dist

    from mok_megatron.ops import mok_moe

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), TORCH_SYMM_MEM_DISABLE_MULTICAST="1")
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", rank=rank, world_size=2, device_id=torch.device("cuda", rank))
    try:
        wanted_config = kernel_config()
        for seed, splits, ring in ((0, [500, 300], None), (1, [0, 800], 512)):
            problem = make_problem(800, 512, 320, 8, 4, shared=192, seed=seed)  # the same numbers on GPU 0
            wanted = VirtualRanks(problem, 1, wanted_config).run(problem) if rank == 0 else {}
            mine = slice(0, splits[0]) if rank == 0 else slice(splits[0], None)
            experts = slice(4 * rank, 4 * rank + 4)
            device = torch.device("cuda", rank)
            x, weights = (t[mine].to(device).requires_grad_() for t in (problem.x, problem.weights))
            w1, w2 = (w[experts].contiguous().to(device).requires_grad_() for w in (problem.w1, problem.w2))
            shared = tuple(w.to(device).requires_grad_() for w in problem.shared)
            config = kernel_config(backend="megakernel", macrobatch_size=ring, fwd_comm_sms=2 * seed)
            for _ in range(10):
                y = mok_moe(x, problem.ids[mine].to(device), weights, w1, w2, dist.group.WORLD, config, shared)
                grads = torch.autograd.grad(y, [x, weights, w1, w2], problem.dy[mine].to(device))
            sent = [None, None]
            dist.all_gather_object(sent, [t.detach().cpu() for t in (y, *grads)])
            if rank == 0:
                for i, name in enumerate(("y", "dx", "dweights", "dw1", "dw2")):
                    assert torch.equal(torch.cat([part[i] for part in sent]), wanted[name].cpu()), (seed, name)
    finally:
        dist.destroy_process_group()


def test_same_bits_as_one_gpu():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    torch.multiprocessing.spawn(worker, (port,), nprocs=2)
