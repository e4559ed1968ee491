"""Gradients that go into Megatron's main_grad buffers."""

import pytest
import torch
from torch.nn import Parameter

from mok_megatron import SharedExpert, mok_moe
from tests.ops.problem import REFERENCE, Problem, make_problem, operator

WEIGHTS = ("w1", "w2", "shared_w1", "shared_w2")


def parameters(p: Problem, main_grad_dtype: torch.dtype) -> dict[str, Parameter]:
    tensors = (p.w1, p.w2, p.shared.w1, p.shared.w2)
    weights = {name: Parameter(t.clone()) for name, t in zip(WEIGHTS, tensors, strict=True)}
    for weight in weights.values():
        weight.main_grad = torch.zeros_like(weight, dtype=main_grad_dtype, requires_grad=False)
        weight.grad_added_to_main_grad = False
    return weights


def train_step(p: Problem, weights: dict[str, Parameter], into_main_grad: bool = True) -> torch.Tensor:
    x = p.x.clone().requires_grad_()
    shared = SharedExpert(weights["shared_w1"], weights["shared_w2"])
    y = mok_moe(
        x,
        p.topk_ids,
        p.topk_weights,
        weights["w1"],
        weights["w2"],
        config=REFERENCE,
        shared=shared,
        into_main_grad=into_main_grad,
    )
    y.backward(p.dy)
    return x.grad


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def problem(request: pytest.FixtureRequest) -> Problem:
    return make_problem(200, shared_inner=13, dtype=request.param)


@pytest.mark.parametrize("main_grad_dtype", [torch.float32, torch.bfloat16])
def test_gradients_are_added_in_the_buffers_dtype(problem: Problem, main_grad_dtype: torch.dtype) -> None:
    exact = operator(problem)
    unrounded = parameters(problem, torch.float32)
    train_step(problem, unrounded)
    weights = parameters(problem, main_grad_dtype)
    for weight in weights.values():
        weight.main_grad.fill_(0.5)
    dx = train_step(problem, weights)
    assert torch.equal(dx, exact["x"])
    for name, weight in weights.items():
        # fp32 until the sum is stored, not rounded to the weight's dtype on the way.
        gradient = unrounded[name].main_grad
        assert torch.equal(gradient.to(weight.dtype), exact[name])
        assert torch.equal(weight.main_grad, (gradient + 0.5).to(main_grad_dtype)), name
        assert weight.main_grad.dtype == main_grad_dtype
        assert weight.grad_added_to_main_grad is True


def test_buffers_keep_more_than_bf16_holds() -> None:
    p = make_problem(200, shared_inner=13, dtype=torch.bfloat16)
    weights = parameters(p, torch.float32)
    train_step(p, weights)
    for name, weight in weights.items():
        assert (weight.main_grad != weight.main_grad.bfloat16().float()).any(), name


def test_hooks_fire_with_a_gradient_of_the_right_shape(problem: Problem) -> None:
    weights = parameters(problem, torch.float32)
    seen = []
    keep = []
    for name, weight in weights.items():
        # As Megatron's DistributedDataParallel registers its hook.
        node = weight.expand_as(weight).grad_fn.next_functions[0][0]
        keep.append(node)

        def hook(*_: object, name: str = name, weight: Parameter = weight) -> None:
            assert weight.grad is not None and weight.grad.shape == weight.shape
            assert weight.grad_added_to_main_grad and weight.main_grad.any()
            weight.grad = None
            seen.append(name)

        node.register_hook(hook)
    train_step(problem, weights)
    assert sorted(seen) == sorted(WEIGHTS)


def test_zero_out_wgrad_gives_zeros_to_autograd() -> None:
    p = make_problem(20, shared_inner=5)
    weights = parameters(p, torch.float32)
    for weight in weights.values():
        weight.zero_out_wgrad = True
    train_step(p, weights)
    for weight in weights.values():
        assert weight.grad is not None and not weight.grad.any()
        assert weight.main_grad.any()


def test_microbatches_add_up() -> None:
    whole = make_problem(300, shared_inner=13, dtype=torch.float64)
    together, apart, twice = (parameters(whole, torch.float64) for _ in range(3))
    train_step(whole, together)
    for rank in range(2):
        half = whole.share(rank, [120, 180])
        train_step(Problem(half.x, half.topk_ids, half.topk_weights, whole.w1, whole.w2, half.dy, whole.shared), apart)
    train_step(whole, twice)
    train_step(whole, twice)
    for name in WEIGHTS:
        once = together[name].main_grad
        torch.testing.assert_close(apart[name].main_grad, once, rtol=0, atol=1e-11)
        assert torch.equal(twice[name].main_grad, 2 * once)  # doubling is exact


def test_into_main_grad_false_returns_the_gradients(problem: Problem) -> None:
    exact = operator(problem)
    weights = parameters(problem, torch.float32)
    train_step(problem, weights, into_main_grad=False)
    for name, weight in weights.items():
        assert torch.equal(weight.grad, exact[name]), name
        assert not weight.main_grad.any() and weight.grad_added_to_main_grad is False


def test_weights_without_a_buffer_get_theirs_from_autograd() -> None:
    p = make_problem(20, shared_inner=5)
    weights = parameters(p, torch.float32)
    del weights["w2"].main_grad
    weights["shared_w1"].main_grad = None
    exact = operator(p)
    train_step(p, weights)
    for name in ("w2", "shared_w1"):
        assert torch.equal(weights[name].grad, exact[name])
        assert weights[name].grad_added_to_main_grad is False
    assert torch.equal(weights["w1"].main_grad, exact["w1"])


def test_frozen_weights_stay_untouched() -> None:
    p = make_problem(20, shared_inner=5)
    weights = parameters(p, torch.float32)
    weights["w1"].requires_grad = False
    train_step(p, weights)
    assert not weights["w1"].main_grad.any() and weights["w1"].grad is None
    assert weights["w2"].main_grad.any()


def test_idle_experts_and_no_tokens_add_nothing() -> None:
    for p in (make_problem(40, shared_inner=5, routing="one"), make_problem(0, shared_inner=5)):
        weights = parameters(p, torch.float32)
        for weight in weights.values():
            weight.main_grad.fill_(3)
        train_step(p, weights)
        assert (weights["w1"].main_grad[:-1] == 3).all() and (weights["w2"].main_grad[:-1] == 3).all()
        assert (weights["w1"].main_grad[-1] == 3).all() == (p.x.shape[0] == 0)
