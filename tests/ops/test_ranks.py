"""The operator over several ranks: the same bits at every EP size, the numbers of a dense layer, clean memory."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from mok_megatron import MokConfig
from mok_megatron.ops.moe import mok_moe
from tests.ops.problem import (
    BY_EXPERT,
    BY_LAYER,
    REFERENCE,
    Problem,
    assert_same_bits,
    dense,
    make_problem,
    operator,
    to_bytes,
)
from tests.ranks import run_on_ranks

AUTOMATIC = MokConfig(backend="reference", minibatch_size=128)
LARGE = 8192
"""Rows of a minibatch in which nothing is evicted."""

# (operands, settings). 620 tokens with top-3 over 8 experts: several tiles an expert and several macrobatches.
CASES: dict[str, tuple[dict[str, Any], MokConfig]] = (
    {
        f"{str(dtype)[6:]}-macrobatch-{rows}": (
            {"tokens": 620, "dtype": dtype, "shared_inner": 20, "scale": True},
            replace(AUTOMATIC, macrobatch_size=rows),
        )
        for dtype in (torch.float32, torch.bfloat16)
        for rows in (128, 256, None)
    }
    | {
        "one expert gets everything": ({"tokens": 300, "routing": "one"}, replace(AUTOMATIC, macrobatch_size=384)),
        "no route": ({"tokens": 20, "routing": "none", "shared_inner": 3}, AUTOMATIC),
        "no token": ({"tokens": 0, "shared_inner": 3}, AUTOMATIC),
        "short last tiles": ({"tokens": 131, "hidden": 512, "inner": 8, "shared_inner": 128, "topk": 1}, AUTOMATIC),
        "odd sizes": ({"tokens": 411, "hidden": 37, "inner": 19, "topk": 1, "shared_inner": 7}, AUTOMATIC),
        "few tokens": ({"tokens": 5, "experts": 16, "topk": 5, "dtype": torch.bfloat16, "shared_inner": 9}, AUTOMATIC),
        "float16": ({"tokens": 150, "dtype": torch.float16}, AUTOMATIC),
    }
    | {
        f"{form} {wgrad}": (
            {"tokens": 400, "hidden": 128, "inner": 128, "dtype": torch.bfloat16, "shared_inner": 128},
            replace(
                AUTOMATIC, format=form, fp8_wgrad=wgrad, fp8_shared="fp8", fp8_gradients=gradients, macrobatch_size=256
            ),
        )
        for form, wgrad, gradients in (
            ("mxfp8", "fp8", "e5m2"),
            ("mxfp8", "bf16", "e4m3"),
            ("blockwise", "fp8", "e4m3"),
        )
    }
)


def uneven(tokens: int, ranks: int) -> list[int]:
    """A split that differs by rank and leaves rank 1 of several without tokens."""
    weights = [0 if rank == 1 else rank + 2 for rank in range(ranks)]
    split = [tokens * weight // sum(weights) for weight in weights]
    split[0] += tokens - sum(split)
    return split


def _every_case(rank: int) -> dict[tuple[str, int], dict[str, bytes]]:
    groups = {size: dist.new_group(range(size)) for size in (1, 2, 4, 8)}
    results = {}
    for name, (arguments, config) in CASES.items():
        problem = make_problem(**arguments)
        for size, group in groups.items():
            if rank < size:
                mine = problem.share(rank, uneven(problem.x.shape[0], size))
                results[name, size] = to_bytes(operator(mine, group, config))
    return results


@pytest.fixture(scope="module")
def results_by_rank() -> list[dict[tuple[str, int], dict[str, bytes]]]:
    return run_on_ranks(8, _every_case)


@pytest.mark.parametrize("size", [1, 2, 4, 8])
@pytest.mark.parametrize("name", CASES)
def test_every_ep_size_gives_the_same_bits(results_by_rank: Any, name: str, size: int) -> None:
    arguments, config = CASES[name]
    problem = make_problem(**arguments)
    all_kept = replace(config, minibatch_size=LARGE, macrobatch_size=None)
    expected = operator(problem, config=all_kept)
    results = [results_by_rank[rank][name, size] for rank in range(size)]
    for tensor, value in to_bytes(expected).items():
        if tensor not in BY_LAYER:
            assert b"".join(r[tensor] for r in results) == value, f"{tensor} of EP {size} differs from EP 1"
    # The shared expert's weights are replicas: each rank has the gradient of its own tokens, for the data-parallel
    # reduction to add up.
    split = uneven(problem.x.shape[0], size)
    for rank in range(size):
        alone = replace(problem.share(rank, split), w1=problem.w1, w2=problem.w2)
        expected_bytes = to_bytes(operator(alone, config=all_kept))
        for tensor in BY_LAYER:
            assert results[rank].get(tensor) == expected_bytes.get(tensor), f"{tensor} of rank {rank}"


TOKENS = [[0, 1, 3, 5], [257, 0, 513, 1], [0, 0, 0, 0], [0, 0, 0, 2]]


def _against_dense(rank: int) -> list[dict[str, torch.Tensor]]:
    results = []
    for tokens in TOKENS:
        problem = make_problem(sum(tokens), dtype=torch.float64, shared_inner=13, scale=True)
        mine = operator(problem.share(rank, tokens), dist.group.WORLD, replace(REFERENCE, macrobatch_size=256))
        results.append({name: t.numpy() for name, t in mine.items()})
    return results


def test_any_number_of_tokens_on_each_rank_is_the_dense_layer() -> None:
    by_rank = run_on_ranks(4, _against_dense)
    for case, tokens in enumerate(TOKENS):
        expected = dense(make_problem(sum(tokens), dtype=torch.float64, shared_inner=13, scale=True))
        for name, value in expected.items():
            pieces = [torch.from_numpy(results[case][name]) for results in by_rank]
            whole = sum(pieces) if name in BY_LAYER else torch.cat(pieces)
            torch.testing.assert_close(whole, value, rtol=0, atol=1e-11, msg=f"{name}, tokens {tokens}")


def _filled(rank: int) -> None:
    problem = make_problem(400, dtype=torch.bfloat16, shared_inner=13, scale=True)
    group = dist.group.WORLD if dist.is_initialized() else None
    split = uneven(400, group.size() if group else 1)
    mine = problem.share(rank, split)
    config = replace(REFERENCE, macrobatch_size=256)
    expected = operator(mine, group, config)
    assert all(t.isfinite().all() for t in expected.values())
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.utils.deterministic.fill_uninitialized_memory
        assert torch.empty(3).isnan().all()
        assert_same_bits(operator(mine, group, config), expected)
    finally:
        torch.use_deterministic_algorithms(False)


def test_memory_that_nobody_wrote_is_not_read() -> None:
    _filled(0)
    run_on_ranks(2, _filled)


def _poisoned(rank: int) -> None:
    problem = make_problem(60, experts=12, topk=2, shared_inner=4)
    victim = 25  # on rank 1
    x = problem.x.clone()
    x[victim] = float("nan")
    tokens = [20, 25, 15]
    group = dist.group.WORLD
    clean = operator(problem.share(rank, tokens), group)
    results = operator(replace(problem, x=x).share(rank, tokens), group)
    mine = torch.arange(sum(tokens[:rank]), sum(tokens[: rank + 1]))
    assert results["y"].isnan().any() == (rank == 1)
    for name in ("y", "x", "topk_weights"):
        assert torch.equal(results[name][mine != victim], clean[name][mine != victim]), name
    untouched = [e for e in range(4) if 4 * rank + e not in problem.topk_ids[victim]]
    for name in BY_EXPERT:
        assert torch.equal(results[name][untouched], clean[name][untouched]), name


def test_a_poisoned_token_reaches_no_other_rank() -> None:
    run_on_ranks(3, _poisoned)


def _two_calls(rank: int) -> None:
    """Two calls in flight at once, backward in reverse; nothing of one may touch the other."""
    first, second = (make_problem(100, seed=seed).share(rank, [70, 30]) for seed in (1, 2))
    group = dist.group.WORLD
    expected = [to_bytes(operator(p, group)) for p in (first, second)]

    def call(p: Problem) -> tuple[torch.Tensor, torch.Tensor]:
        x = p.x.clone().requires_grad_()
        return mok_moe(x, p.topk_ids, p.topk_weights, p.w1, p.w2, group, REFERENCE), x

    (y1, x1), (y2, x2) = call(first), call(second)
    y2.backward(second.dy)
    y1.backward(first.dy)
    for y, x, e in ((y1, x1, expected[0]), (y2, x2, expected[1])):
        assert to_bytes({"y": y.detach(), "x": x.grad}) == {"y": e["y"], "x": e["x"]}


def test_calls_in_flight_do_not_disturb_each_other() -> None:
    run_on_ranks(2, _two_calls)
