"""The kernel's values and gradients against float64, and what must not change them by a bit."""

from __future__ import annotations

import pytest
import torch

from mok_megatron.selftest.problem import (
    VirtualRanks,
    kernel_config,
    make_problem,
    plain,
    relative_error,
    with_rows_per_expert,
)

pytestmark = pytest.mark.gpu


def assert_close(found, problem, ones=0.0):
    """Errors at most 1.5 times those of bf16 products in torch; weight gradients had `ones` in them before."""
    exact, rounded = plain(problem, torch.float64), plain(problem, torch.bfloat16)
    errors = {}
    for name, value in exact.items():
        got = found[name] - ones if name.startswith(("dw1", "dw2", "dshared")) else found[name]
        error, allowed = relative_error(got, value), 1.5 * relative_error(rounded[name], value)
        if not error <= allowed:
            errors[name] = (error, allowed)
    assert not errors, errors


def assert_same(a, b):
    assert a.keys() == b.keys()
    different = {k: int((a[k] != b[k]).sum()) for k in a if not torch.equal(a[k], b[k])}
    assert not different, different


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("comm", [0, 2])
@pytest.mark.parametrize("shared", [0, 192])
def test_against_float64(ranks, comm, shared):
    problem = make_problem(500, 512, 320, 8, 4, shared=shared, scale=shared > 0)
    run = VirtualRanks(problem, ranks, kernel_config(fwd_comm_sms=comm, bwd_comm_sms=comm))
    run.poison(problem)
    assert_close(run.run(problem), problem)


def test_ragged_experts():
    rows = [0, 1, 63, 64, 65, 127, 128, 129]
    problem = with_rows_per_expert(make_problem(sum(rows), 256, 192, 8, 1), rows)
    run = VirtualRanks(problem, 2, kernel_config())
    run.poison(problem)
    found = run.run(problem)
    assert_close(found, problem)
    assert not found["dw1"][0].any() and not found["dw2"][0].any()


def test_everything_to_one_expert():
    problem = make_problem(700, 256, 128, 4, 1)
    problem.ids.fill_(2)
    run = VirtualRanks(problem, 2, kernel_config())
    run.poison(problem)
    assert_close(run.run(problem), problem)


def test_routes_left_out_and_a_rank_without_tokens():
    problem = make_problem(300, 256, 128, 4, 2, shared=128)
    problem.ids[::3, 0] = -1
    problem.ids[5:40] = -1
    run = VirtualRanks(problem, 2, kernel_config(), splits=[300, 0])
    run.poison(problem)
    assert_close(run.run(problem), problem)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_main_grad(dtype):
    problem = make_problem(400, 256, 128, 4, 2, shared=128)
    found = VirtualRanks(problem, 1, kernel_config()).run(problem, main_grad=dtype)
    if dtype == torch.float32:
        assert_close(found, problem, ones=1.0)
    else:
        fresh = VirtualRanks(problem, 1, kernel_config()).run(problem, main_grad=torch.float32)
        for name in ("dw1", "dw2"):
            assert torch.equal(found[name], fresh[name].bfloat16()), name


def test_same_bits_at_every_ep():
    problem = make_problem(600, 256, 192, 16, 4)
    one = VirtualRanks(problem, 1, kernel_config()).run(problem)
    assert_close(one, problem)
    for ranks in (2, 4, 8, 16):
        run = VirtualRanks(problem, ranks, kernel_config())
        run.poison(problem)
        assert_same(run.run(problem), one)
    uneven = VirtualRanks(problem, 4, kernel_config(), splits=[17, 0, 300, 283])
    assert_same(uneven.run(problem), one)


def test_same_bits_run_to_run():
    problem = make_problem(900, 256, 128, 8, 3)
    run = VirtualRanks(problem, 2, kernel_config())
    first = run.run(problem)
    for _ in range(100):
        assert_same(run.run(problem), first)


@pytest.mark.parametrize("ranks", [1, 2])
def test_same_bits_whatever_the_ring(ranks):
    problem = make_problem(1100, 256, 192, 4, 2)
    whole = VirtualRanks(problem, ranks, kernel_config()).run(problem)
    assert_close(whole, problem)
    for minibatch, macrobatch, comm in ((128, 128, 0), (128, 384, 3), (256, 512, 1), (512, 512, 0), (1024, 1024, 2)):
        run = VirtualRanks(
            problem,
            ranks,
            kernel_config(minibatch_size=minibatch, macrobatch_size=macrobatch, fwd_comm_sms=comm, bwd_comm_sms=comm),
        )
        run.poison(problem)
        assert_same(run.run(problem), whole)
