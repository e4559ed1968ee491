"""Operands that do not fit: one clear message that lists all of it, on every rank, and no rank left waiting."""

import re
import time
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from mok_megatron import MokConfig, SharedExpert, mok_moe
from mok_megatron.errors import MokInputError, MokTimeoutError
from tests.ops.problem import REFERENCE, Problem, make_problem
from tests.ranks import run_on_ranks


def call(p: Problem, group: dist.ProcessGroup | None = None, config: MokConfig = REFERENCE) -> Tensor:
    return mok_moe(p.x, p.topk_ids, p.topk_weights, p.w1, p.w2, group, config, p.shared)


def good() -> Problem:
    return make_problem(6, hidden=10, inner=4, experts=8, topk=2, shared_inner=3, scale=True)


def shared(p: Problem, **changes: Tensor | None) -> Problem:
    return replace(p, shared=replace(p.shared, **changes))


def with_id(p: Problem, number: int) -> Problem:
    ids = p.topk_ids.clone()
    ids[3, 1] = number
    return replace(p, topk_ids=ids)


META = torch.device("meta")

# What is done to the operands, and what the message must say.
MISTAKES: dict[str, tuple[Callable[[Problem], Problem], str]] = {
    "x 3-D": (lambda p: replace(p, x=p.x.unsqueeze(1)), r"x has shape \[6, 1, 10\]; give \[T, H\]"),
    "x int": (lambda p: replace(p, x=p.x.long()), "x is torch.int64; convert it to torch.bfloat16 or torch.float16"),
    "ids 1-D": (lambda p: replace(p, topk_ids=p.topk_ids[:, 0]), r"topk_ids has shape \[6\]; give \[T, K\] = \[6, K\]"),
    "ids K 0": (lambda p: replace(p, topk_ids=p.topk_ids[:, :0]), r"topk_ids has shape \[6, 0\].*K at least 1"),
    "ids T": (lambda p: replace(p, topk_ids=p.topk_ids[:5]), r"topk_ids has shape \[5, 2\]"),
    "ids float": (lambda p: replace(p, topk_ids=p.topk_ids.float()), "topk_ids is torch.float32.* torch.int32 or"),
    "ids list": (lambda p: replace(p, topk_ids=p.topk_ids.tolist()), "topk_ids is a list; give a torch.Tensor"),
    "ids too high": (lambda p: with_id(p, 8), "topk_ids holds numbers from -?[0-9] to 8; expert numbers are 0 to 7"),
    "ids too low": (lambda p: with_id(p, -2), "topk_ids holds numbers from -2 to [0-7]; .*-1 for no route"),
    "weights K": (lambda p: replace(p, topk_weights=p.topk_weights[:, :1]), r"topk_weights has shape \[6, 1\]"),
    "weights bf16": (
        lambda p: replace(p, topk_weights=p.topk_weights.bfloat16()),
        "topk_weights is torch.bfloat16 beside an x of torch.float32; convert it to torch.float32",
    ),
    "w1 2-D": (lambda p: replace(p, w1=p.w1[0]), r"w1 has shape \[8, 10\]; give \[E_local, 2I, H\], H = 10"),
    "w1 odd": (lambda p: replace(p, w1=p.w1[:, :7]), r"w1 has shape \[8, 7, 10\]"),
    "w1 H": (lambda p: replace(p, w1=p.w1[..., :9]), r"w1 has shape \[8, 8, 9\]"),
    "w1 dtype": (lambda p: replace(p, w1=p.w1.double()), "w1 is torch.float64 .* convert it to torch.float32"),
    "w1 meta": (lambda p: replace(p, w1=p.w1.to(META)), "w1 is on meta and x on cpu; move all operands to one device"),
    "no experts": (lambda p: replace(p, w1=p.w1[:0], w2=p.w2[:0]), r"w1 has shape \[0, 8, 10\]"),
    "w2 swapped": (lambda p: replace(p, w2=p.w2.mT), r"w2 has shape \[8, 4, 10\]; give .* = \[8, 10, 4\]"),
    "w2 E": (lambda p: replace(p, w2=p.w2[:4]), r"w2 has shape \[4, 10, 4\]"),
    "w2 missing": (lambda p: replace(p, w2=None), "w2 is a NoneType; give a torch.Tensor"),
    "shared w1": (lambda p: shared(p, w1=p.shared.w1[:, :9]), r"shared w1 has shape \[6, 9\]; give \[2Is, H\]"),
    "shared w1 odd": (lambda p: shared(p, w1=p.shared.w1[:5]), r"shared w1 has shape \[5, 10\]"),
    "shared w2": (lambda p: shared(p, w2=p.shared.w2[:, :2]), r"shared w2 has shape \[10, 2\].* = \[10, 3\]"),
    "shared w2 missing": (lambda p: shared(p, w2=None), "shared w2 is a NoneType; give a torch.Tensor"),
    "shared w1 missing": (lambda p: shared(p, w1=None), "shared w1 is a NoneType; give a torch.Tensor"),
    "shared dtype": (lambda p: shared(p, w2=p.shared.w2.half()), "shared w2 is torch.float16 .*convert it"),
    "scale shape": (lambda p: shared(p, scale=p.shared.scale.unsqueeze(1)), r"scale has shape \[6, 1\]; .*\[6\]"),
    "scale dtype": (lambda p: shared(p, scale=p.shared.scale.half()), "shared scale is torch.float16 .*float32"),
}


def test_the_good_operands_are_good() -> None:
    call(good())


@pytest.mark.parametrize("name", MISTAKES)
def test_one_mistake_is_named_with_its_remedy(name: str) -> None:
    change, message = MISTAKES[name]
    with pytest.raises(MokInputError, match=message) as refusal:
        call(change(good()))
    assert "on rank 0" in str(refusal.value)
    # A mistake of shape may leave others that follow from it, but one of dtype or number stands alone.
    assert "\n  2. " not in str(refusal.value) or "has shape" in message


def test_all_mistakes_come_in_one_message() -> None:
    p = good()
    p = replace(
        p,
        topk_ids=p.topk_ids.float(),
        topk_weights=p.topk_weights[:, :1],
        w1=p.w1[..., :9].half(),
        shared=SharedExpert(p.shared.w1, p.shared.w2[:, :1], p.shared.scale.double()),
    )
    with pytest.raises(MokInputError) as refusal:
        call(p)
    for part in ("topk_ids is", "topk_weights has", "w1 has", "w1 is", "shared w2 has", "shared scale is"):
        assert f". {part} " in str(refusal.value), part
    assert "\n  6. " in str(refusal.value)


BAD_RANK = 1
ON_ONE_RANK = ("x 3-D", "ids list", "ids too low", "weights bf16", "w2 swapped", "w2 missing", "shared w2 missing")

DISAGREEMENTS: dict[str, tuple[dict, MokConfig, str]] = {
    "H": ({"hidden": 12}, REFERENCE, "H differs between ranks: rank 0 has 10, rank 1 has 12, rank 2 has 10; give"),
    "K": ({"topk": 3}, REFERENCE, "K differs between ranks: rank 0 has 2, rank 1 has 3, rank 2 has 2; give"),
    "E_local": ({"experts": 1}, REFERENCE, "E_local differs between ranks: rank 0 has 2, rank 1 has 1, rank 2 has 2"),
    "I": ({"inner": 5}, REFERENCE, "I differs between ranks: rank 0 has 4, rank 1 has 5, rank 2 has 4"),
    "dtype": (
        {"dtype": torch.bfloat16},
        REFERENCE,
        "dtype of x differs between ranks: rank 0 has torch.float32, rank 1 has torch.bfloat16",
    ),
    "macrobatch": (
        {},
        replace(REFERENCE, macrobatch_size=256),
        "--mok-macrobatch-size differs between ranks: rank 0 has automatic, rank 1 has 256",
    ),
    "wgrad": ({}, replace(REFERENCE, fp8_wgrad="fp8"), "--mok-fp8-wgrad differs .* rank 0 has bf16, rank 1 has fp8"),
    "minibatch": ({}, replace(REFERENCE, minibatch_size=256), "--mok-minibatch-size differs .* rank 1 has 256"),
}


def _bad_on_one_rank(rank: int) -> dict[str, tuple[str, float]]:
    """The message of each case, and the seconds until it came."""
    group = dist.group.WORLD
    heard = {}

    def listen(name: str, p: Problem, config: MokConfig = REFERENCE) -> None:
        start = time.monotonic()
        try:
            call(p, group, config)
            heard[name] = ("no error", 0.0)
        except MokInputError as error:
            heard[name] = (str(error), time.monotonic() - start)

    for name in ON_ONE_RANK:
        mine = replace(good(), w1=good().w1[:3], w2=good().w2[:3])
        listen(name, MISTAKES[name][0](mine) if rank == BAD_RANK else mine)
    for name, (changes, config, _) in DISAGREEMENTS.items():
        arguments = {"tokens": 6, "hidden": 10, "inner": 4, "experts": 2, "topk": 2}
        bad = rank == BAD_RANK
        listen(name, make_problem(**arguments | (changes if bad else {})), config if bad else REFERENCE)
    listen("all", make_problem(rank, hidden=rank + 1, inner=rank + 1, experts=rank + 1, topk=rank + 1))
    listen("two ranks", replace(good(), w2=None) if rank else good())
    call(make_problem(rank + 1, experts=2), group)  # the group still works
    return heard


def test_a_mistake_on_one_rank_stops_all_of_them_with_the_same_message() -> None:
    by_rank = run_on_ranks(3, _bad_on_one_rank, timeout_s=60)
    for heard in by_rank:
        for name, (message, seconds) in heard.items():
            assert message == by_rank[0][name][0], name
            assert seconds < 10, name
    heard = by_rank[0]
    for name in ON_ONE_RANK:
        assert f"on rank {BAD_RANK} of the group:" in heard[name][0], name
        assert "on rank 0" not in heard[name][0] and "on rank 2" not in heard[name][0]
    for name, (_, _, message) in DISAGREEMENTS.items():
        assert re.search(message, heard[name][0]), f"{message!r} not in {heard[name][0]!r}"
        assert "\n  2. " not in heard[name][0], name
    for word in ("H", "K", "E_local", "I"):
        assert f". {word} differs between ranks: rank 0 has 1, rank 1 has 2, rank 2 has 3;" in heard["all"][0]
    assert "on rank 1 of the group" in heard["two ranks"][0] and "on rank 2 of the group" in heard["two ranks"][0]


def _a_peer_stays_away(rank: int) -> str:
    if rank == 1:
        time.sleep(2)
        return ""
    start = time.monotonic()
    with pytest.raises(MokTimeoutError) as error:
        call(make_problem(4, experts=1), dist.group.WORLD, replace(REFERENCE, timeout_s=0.5))
    assert 0.4 < time.monotonic() - start < 1.9
    return str(error.value)


def _a_peer_ends(rank: int) -> str:
    if rank == 1:
        dist.barrier()
        return ""
    dist.barrier()
    with pytest.raises(MokTimeoutError) as error:
        call(make_problem(4, experts=1), dist.group.WORLD, replace(REFERENCE, timeout_s=10))
    return str(error.value)


@pytest.mark.parametrize("case", [_a_peer_stays_away, _a_peer_ends])
def test_a_peer_that_does_not_come_is_an_error_and_no_hang(case: Callable[[int], str]) -> None:
    message, _ = run_on_ranks(2, case, timeout_s=60)
    assert "rank 0 of 2 in the expert-parallel group waited for the shapes" in message
    assert "(--mok-timeout-s)" in message
