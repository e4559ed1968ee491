"""mok_moe over random shapes, types and mistakes: the right numbers where the operands fit, else a MokInputError."""

from __future__ import annotations

import pickle
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
import torch.distributed as dist
from hypothesis import strategies as st
from torch import Tensor

from mok_megatron import MokConfig, SharedExpert, mok_moe
from mok_megatron.errors import MokBackendError, MokInputError
from tests.properties.cases import cases, error_of
from tests.ranks import run_on_ranks

CONFIG = MokConfig(backend="reference", minibatch_size=128)
# Relative to the largest value: a few roundings of each type.
LIMITS = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 2e-2, torch.bfloat16: 1e-1}
BY_TOKEN = ("x", "ids", "weights", "scale", "dy")


@dataclass(frozen=True)
class Call:
    """Arguments of one call, of whatever type, and the gradient of its output."""

    x: Any
    ids: Any
    weights: Any
    w1: Any
    w2: Any
    ws1: Any = None
    ws2: Any = None
    scale: Any = None
    dy: Any = None

    def run(self, group: Any = None, config: Any = CONFIG) -> Tensor:
        shared = None if self.ws1 is None and self.ws2 is None else SharedExpert(self.ws1, self.ws2, self.scale)
        return mok_moe(self.x, self.ids, self.weights, self.w1, self.w2, group, config, shared)


@st.composite
def calls(draw: st.DrawFn) -> Call:
    """Operands that fit: any T from 0, K above E as well, repeated and missing routes, odd strides."""
    tokens, hidden, inner, experts, topk = (
        draw(st.integers(low, high)) for low, high in ((0, 7), (0, 9), (0, 5), (1, 5), (1, 6))
    )
    dtype = draw(st.sampled_from(list(LIMITS)))
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    g = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))

    def normal(*shape: int) -> Tensor:
        made = torch.randn(*shape, 2, generator=g, dtype=torch.float64).to(dtype)
        strides = draw(st.sampled_from(["contiguous", "every other", "transposed"]))
        if strides == "every other":
            return made[..., 0]
        made = made[..., 0].contiguous()
        return made.mT.contiguous().mT if strides == "transposed" and len(shape) > 1 else made

    ids = torch.randint(-1, experts, (tokens, topk), generator=g)
    call = Call(
        normal(tokens, hidden),
        ids.int() if draw(st.booleans()) else ids,
        torch.rand(tokens, topk, generator=g, dtype=torch.float64).to(wide),
        normal(experts, 2 * inner, hidden),
        normal(experts, hidden, inner),
        dy=normal(tokens, hidden),
    )
    if draw(st.booleans()):
        width = draw(st.integers(0, 4))
        call = replace(call, ws1=normal(2 * width, hidden), ws2=normal(hidden, width))
        if draw(st.booleans()):
            call = replace(call, scale=torch.rand(tokens, generator=g, dtype=torch.float64).to(wide))
    return call


def expected(call: Call) -> Tensor:
    """The definition in README.md, in float64, token by token."""
    x, w1, w2 = call.x.double(), call.w1.double(), call.w2.double()

    def expert(row: Tensor, first: Tensor, second: Tensor) -> Tensor:
        gate, up = (first @ row).view(2, -1)
        return second @ (torch.sigmoid(gate) * gate * up)

    rows = []
    for t in range(x.shape[0]):
        total = torch.zeros_like(x[t])
        for k, e in enumerate(call.ids[t].tolist()):
            if e >= 0:
                total = total + call.weights[t, k].double() * expert(x[t], w1[e], w2[e])
        if call.ws1 is not None:
            factor = 1.0 if call.scale is None else call.scale[t].double()
            total = total + factor * expert(x[t], call.ws1.double(), call.ws2.double())
        rows.append(total)
    return (
        torch.stack(rows) if rows else torch.zeros_like(x)
    ) + 0 * w1.sum()  # autograd wants it to depend on something


def leaves_of(call: Call) -> dict[str, Tensor]:
    """What gradients flow to."""
    names = (f.name for f in fields(call) if f.name not in ("ids", "dy") and getattr(call, f.name) is not None)
    return {name: getattr(call, name).detach().requires_grad_() for name in names}


def assert_right(call: Call) -> None:
    """Output and every gradient against the definition."""
    results = []
    for compute in (lambda c: c.run(), expected):
        leaves = leaves_of(call)
        y = compute(replace(call, **leaves))
        assert y.shape == call.x.shape
        grads = torch.autograd.grad(y, list(leaves.values()), call.dy.to(y.dtype), allow_unused=True)
        zeros = [torch.zeros_like(leaf) if g is None else g for leaf, g in zip(leaves.values(), grads, strict=True)]
        results.append({"y": y.detach(), **dict(zip(leaves, zeros, strict=True))})
    found, right = results
    for name, value in right.items():
        assert found[name].dtype == getattr(call, "x" if name == "y" else name).dtype, name
        scale = max(1.0, value.abs().max().item()) if value.numel() else 1.0
        error = (found[name].double() - value.double()).abs().max().item() / scale if value.numel() else 0.0
        assert error <= LIMITS[call.x.dtype], (name, error)


@cases(400, call=calls())
def test_operands_that_fit_give_the_right_numbers(call: Call) -> None:
    assert_right(call)


# ---- mistakes

anything = st.one_of(
    st.none(),
    st.integers(-1, 9),
    st.floats(),
    st.just("x"),
    st.just([[0.5, 1.0]]),
    st.just(torch.randn),
    st.just({}),
)
DTYPES = [*LIMITS, torch.int32, torch.int64, torch.uint8, torch.bool, torch.complex64, torch.float8_e4m3fn]


@st.composite
def mistaken_tensors(draw: st.DrawFn, good: Tensor) -> Any:
    """`good` with another shape, type, device or layout, or no tensor at all. It may also come out as it was."""
    kind = draw(st.sampled_from(["shape", "dtype", "meta", "axes", "cut", "sparse", "anything"]))
    if kind == "shape":
        return torch.zeros(draw(st.lists(st.integers(0, 6), max_size=4)), dtype=good.dtype)
    if kind == "dtype":
        return good.to(draw(st.sampled_from(DTYPES)))
    if kind == "meta":
        return good.to("meta")
    if kind == "axes":
        return draw(st.sampled_from([good.mT if good.dim() > 1 else good, good.unsqueeze(0), good.flatten()]))
    if kind == "cut":
        axis = draw(st.integers(0, good.dim() - 1))
        return good.narrow(axis, 0, draw(st.integers(0, good.shape[axis])))
    if kind == "sparse":
        return good.to_sparse()
    return draw(anything)


@st.composite
def mistaken_calls(draw: st.DrawFn) -> Call:
    call = draw(calls())
    names = [f.name for f in fields(call) if f.name != "dy" and isinstance(getattr(call, f.name), Tensor)]
    chosen = draw(st.lists(st.sampled_from(names), min_size=1, max_size=3, unique=True))
    return replace(call, **{name: draw(mistaken_tensors(getattr(call, name))) for name in chosen})


def fits(call: Call) -> bool:
    """Whether the operands are what mok_moe's docstring asks for."""
    operands = {f.name: getattr(call, f.name) for f in fields(call) if f.name != "dy"}
    shared = call.ws1 is not None or call.ws2 is not None
    needed = {"x", "ids", "weights", "w1", "w2"} | ({"ws1", "ws2"} if shared else set())
    if not shared:
        operands = {name: value for name, value in operands.items() if name in needed}
    given = {name: value for name, value in operands.items() if value is not None or name in needed}
    if not all(isinstance(v, Tensor) and v.layout == torch.strided and v.device.type == "cpu" for v in given.values()):
        return False
    if call.x.dim() != 2 or call.x.dtype not in LIMITS:
        return False
    (tokens, hidden), dtype = call.x.shape, call.x.dtype
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    if call.w1.dim() != 3 or call.ids.dim() != 2 or call.w1.shape[0] < 1 or call.ids.shape[1] < 1:
        return False
    (experts, double, _), topk = call.w1.shape, call.ids.shape[1]
    shapes = {"ids": (tokens, topk), "weights": (tokens, topk), "w1": (experts, double // 2 * 2, hidden)}
    shapes |= {"w2": (experts, hidden, double // 2), "scale": (tokens,)}
    if shared:
        if call.ws1.dim() != 2:
            return False
        width = call.ws1.shape[0] // 2
        shapes |= {"ws1": (2 * width, hidden), "ws2": (hidden, width)}
    types = {"ids": (torch.int32, torch.int64), "weights": (wide,), "scale": (wide,)}
    if any(given[n].shape != shape for n, shape in shapes.items() if n in given):
        return False
    if any(value.dtype not in types.get(n, (dtype,)) for n, value in given.items()):
        return False
    return call.ids.numel() == 0 or bool(call.ids.min() >= -1 and call.ids.max() < experts)


def check_mistaken(call: Call) -> None:
    if fits(call):
        assert_right(replace(call, dy=torch.ones_like(call.x)))
        return
    error = error_of(call.run)
    assert isinstance(error, MokInputError), error
    assert "\n  1. " in str(error) and "; " in str(error), str(error)


@cases(700, call=mistaken_calls())
def test_operands_that_do_not_fit_are_named(call: Call) -> None:
    check_mistaken(call)


@cases(200, call=calls(), number=st.integers(-(2**63), 2**63 - 1) | st.integers(-4, 9), place=st.integers(0, 41))
def test_experts_that_do_not_exist_are_named(call: Call, number: int, place: int) -> None:
    ids = call.ids.long()
    if ids.numel() == 0:
        return
    ids.view(-1)[place % ids.numel()] = number
    check_mistaken(replace(call, ids=ids))


@cases(100, call=calls(), config=anything, group=anything, shared=anything | st.lists(st.none(), max_size=5).map(tuple))
def test_other_arguments_of_the_wrong_type_are_named(call: Call, config: Any, group: Any, shared: Any) -> None:
    operands = (call.x, call.ids, call.weights, call.w1, call.w2)
    bad = [v for v in (config, group) if v is not None]
    bad += [] if shared is None else [shared]
    error = error_of(lambda: mok_moe(*operands, group, config, shared))
    assert isinstance(error, MokInputError) == bool(bad), error


@cases(40, call=calls())
def test_a_backend_that_cannot_run_is_named(call: Call) -> None:
    error = error_of(lambda: call.run(config=MokConfig(backend="megakernel", minibatch_size=128)))
    assert isinstance(error, MokBackendError) and "--mok-backend reference" in str(error)


# ---- several ranks

RANKS = 2


def share(call: Call, rank: int, first: int) -> Call:
    """What `rank` of two brings, where rank 0 has the first `first` tokens; E is even."""
    part = slice(0, first) if rank == 0 else slice(first, None)
    values = {name: getattr(call, name)[part] for name in BY_TOKEN if getattr(call, name) is not None}
    return replace(call, **values, w1=call.w1.chunk(RANKS)[rank], w2=call.w2.chunk(RANKS)[rank])


@st.composite
def problems_of_two_ranks(draw: st.DrawFn) -> tuple[Call, int, bool]:
    """A layer with an even number of experts, the tokens of rank 0, and whether rank 1 is to make a mistake."""
    call = draw(calls())
    call = replace(call, w1=torch.cat([call.w1, call.w1]), w2=torch.cat([call.w2, call.w2]))
    return call, draw(st.integers(0, call.x.shape[0])), draw(st.booleans())


drawn: list[tuple[Call, int, bool, dict[str, Any]]] = []


@cases(80, problem=problems_of_two_ranks(), data=st.data())
def draw_for_two_ranks(problem: Any, data: st.DataObject) -> None:
    call, first, mistaken = problem
    mistake = {}
    if mistaken:
        mine = share(call, 1, first)
        name = data.draw(st.sampled_from(["x", "weights", "w1", "w2"]))
        # torch cannot unpickle a tensor of 8-bit floats.
        strategy = mistaken_tensors(getattr(mine, name))
        mistake = {name: data.draw(strategy.filter(lambda v: getattr(v, "dtype", None) != torch.float8_e4m3fn))}
        mistaken = not fits(replace(mine, **mistake))
    drawn.append((call, first, mistaken, mistake if mistaken else {}))


def on_rank(rank: int, pickled: bytes) -> list[Any]:
    """What each call gave on this rank: its output, or what it said."""
    results: list[Any] = []
    for call, first, _, mistake in pickle.loads(pickled):
        mine = replace(share(call, rank, first), **(mistake if rank == 1 else {}))
        try:
            results.append(mine.run(dist.group.WORLD))
        except MokInputError as error:
            results.append(str(error))
    return results


def test_two_ranks_give_the_bits_of_one_or_the_same_message() -> None:
    draw_for_two_ranks()
    by_rank = run_on_ranks(RANKS, on_rank, pickle.dumps(drawn), timeout_s=100)
    for (call, _, mistaken, _), results in zip(drawn, zip(*by_rank, strict=True), strict=True):
        if mistaken:
            assert isinstance(results[0], str) and results[0] == results[1]
            assert "on rank 1 of the group:" in results[0] and "on rank 0 of the group:" not in results[0]
        else:
            assert torch.equal(torch.cat(results), call.run())
    assert 0.2 < sum(mistaken for _, _, mistaken, _ in drawn) / len(drawn) < 0.8
