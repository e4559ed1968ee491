"""The checks, simplest first: each assumes that those before it hold, so the first failure is the one to look at."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from mok_megatron.errors import MokError, MokTimeoutError
from mok_megatron.selftest.problem import (
    DEVICE,
    Problem,
    Result,
    VirtualRanks,
    kernel_config,
    make_problem,
    plain,
    relative_error,
    with_rows_per_expert,
)

ALLOWED = 1.5
"""Errors may be this many times those of the same layer with torch's bf16 products, both against float64."""

Run = Callable[[Problem], Result]
"""The layer under test: forward and backward of a problem."""


class CheckFailedError(MokError):
    """What differs, and where."""


@dataclass(frozen=True)
class Check:
    """One check. ``run(layer)`` gives a short account of what was found; it raises MokError where it fails."""

    name: str
    what: str
    run: Callable[[Run], str]


def close(found: Result, problem: Problem, names: Sequence[str] = ()) -> str:
    """Holds `names` of the results (default: all) against float64. Gives the worst error and what is allowed."""
    exact, rounded = plain(problem, torch.float64), plain(problem, torch.bfloat16)
    worst, wrong = (0.0, ""), []
    for name in names or exact:
        error = relative_error(found[name], exact[name])
        allowed = ALLOWED * relative_error(rounded[name], exact[name])
        worst = max(worst, (error / max(allowed, 1e-30), f"{name} {error:.1e}, allowed {allowed:.1e}"))
        if not error <= allowed:
            wrong.append(f"{name}: error {error:.2e}, allowed {allowed:.2e}, {_where(found[name], exact[name])}")
    if wrong:
        raise CheckFailedError("; ".join(wrong))
    return "worst: " + worst[1]


def same(found: Result, wanted: Result) -> str:
    """Holds all results equal to the last bit."""
    wrong = [
        f"{name}: {_where(found[name], wanted[name], 0)}" for name in wanted if not _equal(found[name], wanted[name])
    ]
    if wrong:
        raise CheckFailedError("; ".join(wrong))
    return "same bits"


def _equal(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a, b) and bool(a.isfinite().all())


def _where(found: Tensor, wanted: Tensor, tolerance: float = 0.05) -> str:
    """Which elements are wrong: their number, the first, and the tiles of 128 rows and 256 columns that have any."""
    f, w = found.double(), wanted.double()
    bad = ~((f - w).abs() <= tolerance * w.abs().max())
    if not bad.any():
        return "spread evenly"
    first = tuple(bad.nonzero()[0].tolist())
    matrix = bad.reshape(-1, bad.shape[-1])
    rows, cols = matrix.nonzero(as_tuple=True)
    tiles = sorted(set(zip((rows // 128).tolist(), (cols // 256).tolist(), strict=True)))
    listed = " ".join(f"({r},{c})" for r, c in tiles[:6]) + (" ..." if len(tiles) > 6 else "")
    return (
        f"{int(bad.sum())} of {bad.numel()} elements wrong, first {first}: {f[first].item():.4g} for "
        f"{w[first].item():.4g}; in {len(tiles)} tiles {listed}"
    )


# ---- the same for every backend


def _layer_checks(device: torch.device) -> list[Check]:
    make = functools.partial(make_problem, device=device)
    one_tile = make(128, 256, 128, 1, 1)
    several = make(500, 512, 320, 8, 4)
    shared = make(300, 256, 192, 4, 2, shared=128, scale=True)
    rows = [0, 1, 63, 64, 65, 127, 128, 129]
    ragged = with_rows_per_expert(make(sum(rows), 256, 192, 8, 1), rows)
    one_expert = replace(make(700, 256, 128, 4, 1), ids=torch.full((700, 1), 2, dtype=torch.int32, device=device))
    left_out = make(300, 256, 128, 4, 2)
    left_out.ids[::3, 0] = -1
    left_out.ids[5:40] = -1

    def no_gradient_without_rows(layer: Run) -> str:
        found = layer(ragged)
        said = close(found, ragged)
        if found["dw1"][0].any() or found["dw2"][0].any():
            raise CheckFailedError("an expert without rows has a gradient that is not zero")
        return said

    def repeats(layer: Run, times: int = 20) -> str:
        first = layer(several)
        for _ in range(times):
            same(layer(several), first)
        return f"same bits {times} times"

    forward, data, weights = ("y",), ("dx", "dweights"), ("dw1", "dw2")
    return [
        Check(
            "one tile: forward", "FC1, SwiGLU, FC2: K-major operands", lambda f: close(f(one_tile), one_tile, forward)
        ),
        Check("one tile: data gradients", "dHidden, dX: N-major weights", lambda f: close(f(one_tile), one_tile, data)),
        Check(
            "one tile: weight gradients", "both operands M-, N-major", lambda f: close(f(one_tile), one_tile, weights)
        ),
        Check("several tiles", "cut-off tiles, padding, top-k", lambda f: close(f(several), several)),
        Check("shared expert", "gated, with its gradients", lambda f: close(f(shared), shared)),
        Check("ragged experts", "0, 1, 63 ... 129 rows", no_gradient_without_rows),
        Check("one expert gets all", "its neighbours nothing", lambda f: close(f(one_expert), one_expert)),
        Check("routes left out", "-1 in topk_ids", lambda f: close(f(left_out), left_out)),
        Check("repeated", "bits from run to run", repeats),
    ]


def reference_checks() -> list[Check]:
    """For the reference backend, on the CPU; to be run with `problem.reference`."""
    return _layer_checks(torch.device("cpu"))


# ---- of the kernel alone


def kernel(problem: Problem, ranks: int = 1, splits: Sequence[int] | None = None, **settings: Any) -> Result:
    """The megakernel on virtual ranks of one GPU, its buffers full of NaN beforehand."""
    run = VirtualRanks(problem, ranks, kernel_config(**settings), splits)
    run.poison(problem)
    return run.run(problem)


def kernel_checks() -> list[Check]:
    """For the megakernel, on the first GPU; to be run with `kernel`."""
    problem = make_problem(600, 256, 192, 16, 4)
    large = make_problem(4096, 1024, 512, 8, 4)

    def main_grad(_: Run) -> str:
        some = make_problem(400, 256, 128, 4, 2, shared=128)
        found = VirtualRanks(some, 1, kernel_config()).run(some, main_grad=torch.float32)
        before = {name: value - 1 for name, value in found.items() if name.startswith(("dw1", "dw2", "dshared"))}
        return close(found | before, some)

    def rings(_: Run) -> str:
        whole = kernel(problem)
        for minibatch, macrobatch in ((128, 128), (256, 512), (512, 1024)):
            same(kernel(problem, minibatch_size=minibatch, macrobatch_size=macrobatch), whole)
        return "same bits with 128, 512 and 1024 rows as with all"

    def ranks(_: Run) -> str:
        one = kernel(problem)
        for number, splits, comm in (
            (2, None, 0),
            (2, None, 2),
            (4, [17, 0, 300, 283], 0),
            (8, None, 0),
            (16, None, 0),
        ):
            same(kernel(problem, number, splits, fwd_comm_sms=comm, bwd_comm_sms=comm), one)
        return "same bits at EP 2, 4, 8 and 16 as at EP 1"

    def many_tiles(_: Run) -> str:
        run = VirtualRanks(large, 2, kernel_config(minibatch_size=1024))
        found = run.run(large)
        said = close(found, large)
        for _again in range(3):
            same(run.run(large), found)
        return said

    def absent_peer(_: Run) -> str:
        run = VirtualRanks(problem, 2, kernel_config(timeout_s=0.5))
        run.launch(run.forward_steps(problem), leave_out=[1])
        try:
            run.check()
        except MokTimeoutError as error:
            if "rank 1" in str(error):
                return "an error names it"
            raise CheckFailedError(f"the error does not name rank 1: {error}") from error
        raise CheckFailedError("a rank that never launched went unnoticed")

    return [
        *_layer_checks(DEVICE),
        Check("main_grad", "added to in fp32", main_grad),
        Check("rings", "accumulators carried from macrobatch to macrobatch", rings),
        Check("virtual ranks", "exchange, uneven and empty ranks", ranks),
        Check("many tiles", "more of them than SMs, EP 2", many_tiles),
        Check("absent peer", "deadline and error", absent_peer),
    ]
