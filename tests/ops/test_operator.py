"""The operator on one rank, against a dense layer with autograd."""

from dataclasses import replace

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from mok_megatron import MokConfig, SharedExpert, mok_moe
from tests.ops.problem import REFERENCE, Problem, assert_same_bits, dense, make_problem, operator


def assert_close(results: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], tolerance: float) -> None:
    assert results.keys() == expected.keys()
    for name, value in expected.items():
        assert results[name].dtype == value.dtype and results[name].shape == value.shape, name
        difference = (results[name].double() - value.double()).abs().max().item() if value.numel() else 0.0
        assert difference <= tolerance, f"{name} differs by {difference}"


@pytest.mark.parametrize("tokens", [0, 1, 3, 5, 257, 513])
@pytest.mark.parametrize("shared_inner, scale", [(0, False), (13, False), (17, True)])
def test_output_and_every_gradient_are_those_of_a_dense_layer(tokens: int, shared_inner: int, scale: bool) -> None:
    problem = make_problem(tokens, dtype=torch.float64, shared_inner=shared_inner, scale=scale)
    assert_close(operator(problem), dense(problem), 1e-11)


@pytest.mark.parametrize("routing", ["distinct", "one", "none"])
@pytest.mark.parametrize("topk", [1, 4])
def test_routings_at_the_edge(routing: str, topk: int) -> None:
    problem = make_problem(200, topk=topk, dtype=torch.float64, routing=routing)
    results = operator(problem)
    assert_close(results, dense(problem), 1e-11)
    idle = [e for e in range(8) if not (problem.topk_ids == e).any()]
    assert not results["w1"][idle].any() and not results["w2"][idle].any()


@st.composite
def small_problems(draw: st.DrawFn) -> Problem:
    tokens, topk, experts = draw(st.integers(0, 5)), draw(st.integers(1, 4)), draw(st.integers(1, 4))
    problem = make_problem(
        tokens,
        hidden=draw(st.integers(1, 5)),
        inner=draw(st.integers(1, 5)),
        experts=experts,
        topk=topk,
        dtype=torch.float64,
        shared_inner=draw(st.integers(0, 3)),
        scale=draw(st.booleans()),
    )
    row = st.lists(st.integers(-1, experts - 1), min_size=topk, max_size=topk)
    ids = draw(st.lists(row, min_size=tokens, max_size=tokens))
    return replace(problem, topk_ids=torch.tensor(ids, dtype=torch.int32).reshape(tokens, topk))


@settings(max_examples=60)
@given(small_problems())
def test_any_small_layer(problem: Problem) -> None:
    assert_close(operator(problem), dense(problem), 1e-12)


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-4), (torch.bfloat16, 0.3), (torch.float16, 0.04)])
def test_storage_dtypes(dtype: torch.dtype, tolerance: float) -> None:
    problem = make_problem(257, dtype=dtype, shared_inner=13, scale=True)

    def cast(t: torch.Tensor) -> torch.Tensor:
        return t.double() if t.is_floating_point() else t

    shared = SharedExpert(*(cast(t) for t in (problem.shared.w1, problem.shared.w2, problem.shared.scale)))
    fields = {name: cast(getattr(problem, name)) for name in ("x", "topk_weights", "w1", "w2", "dy")}
    exact = dense(replace(problem, shared=shared, **fields))
    results = operator(problem)
    for name, value in results.items():
        assert value.dtype == (torch.float32 if name in ("topk_weights", "shared_scale") else dtype), name
    assert_close({name: t.double() for name, t in results.items()}, exact, tolerance)


def test_weights_of_routes_that_do_not_exist_are_not_read() -> None:
    problem = make_problem(50)
    poisoned = problem.topk_weights.masked_fill(problem.topk_ids < 0, float("nan"))
    assert_same_bits(operator(replace(problem, topk_weights=poisoned)), operator(problem))


def test_layout_and_integer_type_change_nothing() -> None:
    problem = make_problem(130, shared_inner=8)

    def transposed(t: torch.Tensor) -> torch.Tensor:
        return t.transpose(-1, -2).contiguous().transpose(-1, -2)

    other = replace(
        problem,
        x=transposed(problem.x),
        topk_weights=transposed(problem.topk_weights),
        topk_ids=transposed(problem.topk_ids).int(),
        dy=transposed(problem.dy),
    )
    assert not other.x.is_contiguous()
    assert_same_bits(operator(other), operator(problem))
    weights = {"w1": transposed(problem.w1), "w2": transposed(problem.w2)}
    assert_close(operator(replace(problem, **weights)), operator(problem), 1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_macrobatch_size_and_repetition_change_no_bit(dtype: torch.dtype) -> None:
    problem = make_problem(513, experts=3, dtype=dtype, shared_inner=8)
    expected = operator(problem, config=MokConfig(backend="reference"))  # all rows kept
    for rows in (128, 256, 640):
        config = replace(REFERENCE, macrobatch_size=rows)
        assert_same_bits(operator(problem, config=config), expected)
    assert_same_bits(operator(problem, config=MokConfig(backend="reference")), expected)


@pytest.mark.parametrize("tokens", [1, 2, 5, 129, 131])
def test_the_shared_expert_gives_a_token_the_same_bits_in_any_company(tokens: int) -> None:
    # Matrix libraries sum in another order where there are few rows, and how many there are depends on EP.
    p = make_problem(256, hidden=512, topk=1, routing="none", shared_inner=128, scale=True)
    alone = p.share(0, [tokens, 256 - tokens])
    alone = replace(alone, w1=p.w1, w2=p.w2)
    results, expected = operator(alone), operator(p)
    for name in ("y", "x", "shared_scale"):
        assert torch.equal(results[name], expected[name][:tokens]), name


def test_the_sum_over_k_runs_in_fp32_in_the_order_of_k() -> None:
    # One hidden unit, one expert: every route yields about 1. In another order, or in bf16, 1e8 swallows the ones.
    x = torch.ones(1, 1, dtype=torch.bfloat16)
    w1, w2 = torch.tensor([[[40.0], [1 / 40]]]).bfloat16(), torch.ones(1, 1, 1, dtype=torch.bfloat16)
    ids = torch.zeros(1, 4, dtype=torch.int64)

    def weighted(*weights: float) -> float:
        return mok_moe(x, ids, torch.tensor([weights], dtype=torch.float32), w1, w2, config=REFERENCE).item()

    assert weighted(1e8, -1e8, 1, 1) == weighted(0, 0, 1, 1) == pytest.approx(2, rel=0.02)


def test_a_poisoned_token_reaches_nobody_else() -> None:
    problem = make_problem(200, experts=12, topk=2, shared_inner=8, scale=True)
    victim = 77
    x = problem.x.clone()
    x[victim] = float("nan")
    clean, results = operator(problem), operator(replace(problem, x=x))
    others = torch.arange(200) != victim
    assert results["y"][victim].isnan().all()
    for name in ("y", "x", "topk_weights", "shared_scale"):
        assert torch.equal(results[name][others], clean[name][others]), name
    untouched = [e for e in range(12) if e not in problem.topk_ids[victim]]
    for name in ("w1", "w2"):
        assert torch.equal(results[name][untouched], clean[name][untouched]), name


def test_only_what_requires_a_gradient_gets_one() -> None:
    p = make_problem(9)
    x = p.x.clone().requires_grad_()
    y = mok_moe(x, p.topk_ids, p.topk_weights, p.w1, p.w2, config=REFERENCE)
    y.backward(p.dy)
    assert torch.equal(x.grad, operator(p)["x"])
    assert p.w1.grad is None and p.topk_weights.grad is None
    with torch.no_grad():
        assert not mok_moe(x, p.topk_ids, p.topk_weights, p.w1, p.w2, config=REFERENCE).requires_grad


def test_shared_expert_as_a_tuple() -> None:
    p = make_problem(9, shared_inner=5)
    pair = (p.shared.w1, p.shared.w2)
    y = mok_moe(p.x, p.topk_ids, p.topk_weights, p.w1, p.w2, config=REFERENCE, shared=pair)
    assert torch.equal(y, operator(p)["y"])


def test_a_second_backward_says_why_it_cannot() -> None:
    p = make_problem(9)
    x = p.x.clone().requires_grad_()
    y = mok_moe(x, p.topk_ids, p.topk_weights, p.w1, p.w2, config=REFERENCE).sum()
    y.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="retain_graph is not supported"):
        y.backward()


def test_a_double_backward_is_refused() -> None:
    p = make_problem(9)
    x = p.x.clone().requires_grad_()
    y = mok_moe(x, p.topk_ids, p.topk_weights, p.w1, p.w2, config=REFERENCE)
    (dx,) = torch.autograd.grad(y, x, p.dy.clone().requires_grad_(), create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dx.sum().backward()


def test_operands_changed_in_place_before_the_backward_are_noticed() -> None:
    p = make_problem(9)
    w1 = p.w1.clone().requires_grad_()
    y = mok_moe(p.x, p.topk_ids, p.topk_weights, w1, p.w2, config=REFERENCE)
    with torch.no_grad():
        w1.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
