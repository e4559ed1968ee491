"""mok_moe in FP8 over random shapes and settings: close to the definition where they fit, else a named error."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from hypothesis import strategies as st
from torch import Tensor

from mok_megatron import MokConfig
from mok_megatron.config import GRADIENT_TYPES, PRODUCT_TYPES, SCALE_KINDS
from mok_megatron.errors import MokConfigError, MokInputError
from mok_megatron.formats.recipe import BLOCK_LENGTH
from tests.properties.cases import cases, error_of
from tests.properties.test_operator import Call, expected, leaves_of

LIMIT = {"e4m3": 0.15, "e5m2": 0.3}
"""||found - float64|| / ||float64|| of outputs and gradients: an element of E4M3 is off by up to 1/16, of E5M2 by up to
1/8, about half of it as a root mean square; three such roundings follow one another."""
SIZES = (32, 64, 96, 128, 160, 256)


@dataclass(frozen=True)
class Problem:
    """A call and the settings under which it runs."""

    call: Call
    settings: dict[str, str]


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    """Any T from 0, sizes of which some are multiples of a block, and any of the FP8 settings."""
    tokens, experts, topk = (draw(st.integers(low, high)) for low, high in ((0, 5), (1, 4), (1, 3)))
    hidden, inner, shared = (draw(st.sampled_from(SIZES)) for _ in range(3))
    g = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))

    def normal(*shape: int, std: float = 1.0) -> Tensor:
        return (torch.randn(*shape, generator=g) * std).bfloat16()

    call = Call(
        normal(tokens, hidden),
        torch.randint(-1, experts, (tokens, topk), generator=g),
        torch.rand(tokens, topk, generator=g),
        normal(experts, 2 * inner, hidden, std=hidden**-0.5),
        normal(experts, hidden, inner, std=inner**-0.5),
        dy=normal(tokens, hidden),
    )
    if draw(st.booleans()):
        first, second = normal(2 * shared, hidden, std=hidden**-0.5), normal(hidden, shared, std=shared**-0.5)
        call = replace(call, ws1=first, ws2=second)
    choices = {
        "format": tuple(BLOCK_LENGTH),
        "fp8_gradients": GRADIENT_TYPES,
        "fp8_scales": SCALE_KINDS,
        "fp8_wgrad": PRODUCT_TYPES,
        "fp8_shared": PRODUCT_TYPES,
    }
    return Problem(call, {name: draw(st.sampled_from(values)) for name, values in choices.items()})


def unfit(call: Call, settings: dict[str, str]) -> list[str]:
    """Sizes that are no multiple of a block."""
    sizes = {"H": call.x.shape[1], "I": call.w2.shape[2]}
    if call.ws2 is not None and settings["fp8_shared"] == "fp8":
        sizes["Is"] = call.ws2.shape[1]
    return [f"{name} = {size} is not" for name, size in sizes.items() if size % BLOCK_LENGTH[settings["format"]]]


def values(call: Call, compute: Callable[[Call], Tensor]) -> dict[str, Tensor]:
    """y and its gradients, in float64; of what y does not depend on, where there are no tokens, zeros."""
    leaves = leaves_of(call)
    y = compute(replace(call, **leaves))
    grads = torch.autograd.grad(y, list(leaves.values()), call.dy.to(y.dtype), allow_unused=True)
    pairs = zip(leaves, leaves.values(), grads, strict=True)
    return {"y": y.detach().double()} | {n: torch.zeros_like(v) if g is None else g.double() for n, v, g in pairs}


@cases(200, problem=problems())
def test_any_layer_in_fp8_is_close_or_named(problem: Problem) -> None:
    call, settings = problem.call, problem.settings
    error = error_of(lambda: MokConfig(backend="reference", minibatch_size=128, **settings))
    if error is not None:
        assert isinstance(error, MokConfigError) and "--mok-fp8-wgrad fp8 with fp32 block scales" in str(error)
        return
    config = MokConfig(backend="reference", minibatch_size=128, **settings)
    named = unfit(call, settings)
    if named:
        error = error_of(lambda: call.run(config=config))
        assert isinstance(error, MokInputError) and all(words in str(error) for words in named)
        return
    found, right = (values(call, compute) for compute in (lambda c: c.run(config=config), expected))
    for name, wanted in right.items():
        value = found[name]
        assert value.shape == wanted.shape
        off, size = (value - wanted).norm().item(), wanted.norm().item()
        if name == "weights":  # few numbers, each a single product of dY with an expert's output, which may cancel
            size = 3 * max(size, 0.3 * call.dy.double().norm().item())
        limit = LIMIT["e4m3" if name == "y" else settings["fp8_gradients"]]
        assert off <= limit * size + 1e-6, (name, off / max(size, 1e-30))
