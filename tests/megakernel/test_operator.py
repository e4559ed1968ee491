"""mok_moe on the megakernel: autograd, main_grad, CUDA graphs, no synchronisation, many ranks, no memory growth."""

from __future__ import annotations

import pytest
import torch

from mok_megatron.ops import mok_moe
from mok_megatron.selftest.problem import VirtualRanks, kernel_config, make_problem, plain, relative_error

pytestmark = pytest.mark.gpu


def leaves(problem):
    return [t.clone().requires_grad_() for t in (problem.x, problem.weights, problem.w1, problem.w2)]


def call(problem, tensors, config):
    x, weights, w1, w2 = tensors
    return mok_moe(x, problem.ids, weights, w1, w2, config=config)


def test_autograd_and_main_grad():
    problem = make_problem(300, 256, 128, 4, 2)
    config = kernel_config(backend="megakernel")
    tensors = leaves(problem)
    y = call(problem, tensors, config)
    y.backward(problem.dy)
    exact = plain(problem, torch.float64)
    for name, found in [("y", y), *zip(("dx", "dweights", "dw1", "dw2"), (t.grad for t in tensors), strict=True)]:
        assert relative_error(found, exact[name]) < 0.01, name

    again = leaves(problem)
    for weight in again[2:]:
        weight.main_grad = torch.full(weight.shape, 2.0, device="cuda")
    call(problem, again, config).backward(problem.dy)
    for weight, name in zip(again[2:], ("dw1", "dw2"), strict=True):
        assert weight.grad_added_to_main_grad
        assert relative_error(weight.main_grad - 2.0, exact[name]) < 0.01


def test_no_synchronisation():
    problem = make_problem(300, 256, 128, 4, 2)
    config = kernel_config(backend="megakernel")
    call(problem, leaves(problem), config)  # makes the workspace
    tensors = leaves(problem)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        call(problem, tensors, config).backward(problem.dy)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()


def test_cuda_graph_with_new_routing_at_each_replay():
    problem = make_problem(300, 256, 128, 4, 2)
    run = VirtualRanks(problem, 1, kernel_config())
    forward = run.forward_steps(problem)
    backward = run.backward_steps(problem, forward)
    run.launch(forward)
    run.launch(backward)
    run.check()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for step in (*forward, *backward):
            step.prepare()
            step.run()
    for seed in (1, 2, 3):
        other = make_problem(300, 256, 128, 4, 2, seed=seed)
        for name in ("x", "ids", "weights", "dy"):
            getattr(problem, name).copy_(getattr(other, name))
        forward[0].operands.x.copy_(problem.x)
        graph.replay()
        run.check()
        wanted = VirtualRanks(problem, 1, kernel_config()).run(problem)
        assert torch.equal(forward[0].y, wanted["y"])
        assert torch.equal(backward[0].dx, wanted["dx"])
        assert torch.equal(backward[0].fresh[0], wanted["dw1"])


def test_sixty_four_ranks():
    problem = make_problem(640, 128, 64, 64, 4)
    one = VirtualRanks(problem, 1, kernel_config()).run(problem)
    many = VirtualRanks(problem, 64, kernel_config(num_sms=2, timeout_s=20.0)).run(problem)
    for name in one:
        assert torch.equal(one[name], many[name]), name


def test_memory_does_not_grow():
    config = kernel_config(backend="megakernel", max_tokens=512)
    generator = torch.Generator().manual_seed(0)
    sizes = torch.randint(0, 513, (500,), generator=generator).tolist()
    problem = make_problem(512, 128, 64, 4, 2)
    seen = []
    for step, tokens in enumerate(sizes):
        tensors = [t.detach()[:tokens].requires_grad_() for t in (problem.x, problem.weights)]
        y = mok_moe(tensors[0], problem.ids[:tokens], tensors[1], problem.w1, problem.w2, config=config)
        y.backward(problem.dy[:tokens])
        del y, tensors
        if step % 100 == 99:
            seen.append(torch.cuda.memory_allocated())
    assert len(set(seen)) == 1, seen
