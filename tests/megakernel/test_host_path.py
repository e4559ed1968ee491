"""What the host does to enqueue a layer: few operations, no check twice. Needs no GPU; times are measured on one, by
tests/training/features.py."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from mok_megatron.config import MokConfig
from mok_megatron.errors import MokInputError
from mok_megatron.megakernel import backend
from mok_megatron.ops import SharedExpert, mok_moe
from tests.megakernel.host_only import Library, Operations, host_only

TOKENS, HIDDEN, INNER, EXPERTS, TOPK = 6, 64, 128, 4, 2
CONFIG = MokConfig(backend="megakernel", max_tokens=16)


@pytest.fixture
def library() -> Iterator[Library]:
    with host_only() as found:
        yield found


class Layer:
    """Operands of a layer with a shared expert, main gradients included."""

    def __init__(self, tokens: int = TOKENS) -> None:
        self.x = torch.zeros(tokens, HIDDEN, dtype=torch.bfloat16, requires_grad=True)
        self.ids = torch.zeros(tokens, TOPK, dtype=torch.int32)
        self.weights = torch.zeros(tokens, TOPK, requires_grad=True)
        self.w1, self.w2 = parameter(EXPERTS, 2 * INNER, HIDDEN), parameter(EXPERTS, HIDDEN, INNER)
        self.shared = SharedExpert(parameter(2 * INNER, HIDDEN), parameter(HIDDEN, INNER))

    def forward(self) -> Tensor:
        return mok_moe(self.x, self.ids, self.weights, self.w1, self.w2, config=CONFIG, shared=self.shared)


def parameter(*shape: int) -> Parameter:
    weight = Parameter(torch.zeros(shape, dtype=torch.bfloat16))
    weight.main_grad, weight.grad_added_to_main_grad = torch.zeros(shape), False
    return weight


def test_one_operation_a_direction_and_four_launches(library: Library) -> None:
    layer = Layer()
    layer.forward().sum().backward()  # makes the workspace, and what autograd gets for weights with a main_grad
    library.launches.clear()
    with Operations() as forward:
        y = layer.forward()
    # Autograd itself may add operations where it stores gradients: only what the layer returns is looked at.
    with Operations() as backward:
        torch.autograd.grad(y, [layer.x, layer.weights, layer.w1, layer.w2], torch.zeros_like(y))
    assert forward.names == ["forward"]
    views = {"detach", "view", "slice"}  # of memory for the weights' places in autograd
    assert [name for name in backward.names if name not in views] == ["zeros_like", "backward"]
    assert "empty_like" not in backward.names  # no memory for gradients that Megatron drops
    assert library.launches == ["mok_forward_prepare", "mok_forward", "mok_backward_prepare", "mok_backward"]


def test_checks_run_once_for_a_kind_of_call(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    Layer().forward()

    def again(*arguments: object) -> None:
        raise AssertionError("checked again")

    for name in ("check_inputs", "_check_for_kernel", "_make_workspace"):
        monkeypatch.setattr(backend, name, again)
    Layer().forward()
    Layer(tokens=3).forward()  # fewer tokens than --mok-max-tokens: the same buffers


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("ids", torch.zeros(TOKENS + 1, TOPK, dtype=torch.int32)),
        ("ids", torch.zeros(TOKENS, TOPK)),
        ("weights", torch.zeros(TOKENS, TOPK + 1)),
        ("x", torch.zeros(TOKENS, HIDDEN)),
        ("x", torch.zeros(HIDDEN, dtype=torch.bfloat16)),
        ("w2", torch.zeros(EXPERTS, HIDDEN, INNER + 64, dtype=torch.bfloat16)),
        ("w2", torch.zeros(EXPERTS, HIDDEN, INNER, dtype=torch.bfloat16).to_sparse()),
        ("w1", None),
        ("shared", SharedExpert(torch.zeros(2 * INNER, HIDDEN), torch.zeros(HIDDEN, INNER))),
        (
            "shared",
            SharedExpert(
                torch.zeros(2 * INNER, HIDDEN, dtype=torch.bfloat16),
                torch.zeros(HIDDEN, INNER, dtype=torch.bfloat16),
                torch.zeros(TOKENS + 1),
            ),
        ),
    ],
)
def test_a_call_that_does_not_fit_is_refused_after_one_that_did(library: Library, field: str, value: object) -> None:
    layer = Layer()
    layer.forward()
    setattr(layer, field, value)
    with pytest.raises(MokInputError):
        layer.forward()
    assert library.launches == ["mok_forward_prepare", "mok_forward"]


def test_more_tokens_than_the_workspace_holds(library: Library) -> None:
    Layer().forward()
    with pytest.raises(MokInputError, match="--mok-max-tokens"):
        Layer(tokens=17).forward()
