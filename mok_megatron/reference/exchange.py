"""What crosses ranks: routes, agreement on shapes, and rows to and from the rank that computes them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from mok_megatron.config import FORMATS, GRADIENT_TYPES, PRODUCT_TYPES, SCALE_KINDS, TILE_ROWS
from mok_megatron.errors import MokInputError, MokTimeoutError, Problems
from mok_megatron.formats import BlockScaled
from mok_megatron.ops.inputs import FLOAT_DTYPES, MoeInputs, check_expert_numbers, check_inputs
from mok_megatron.ops.schedule import Schedule, build_schedule


@dataclass(frozen=True)
class Agreement:
    """What every rank knows after the first exchange."""

    tokens: list[int]
    """T of every rank."""
    macrobatch_rows: int
    """Rows of a macrobatch, the same everywhere."""


class _Same(NamedTuple):
    """Something that all ranks must have the same of, compared before anything of that shape is exchanged."""

    name: str
    value: Callable[[MoeInputs], int]
    remedy: str
    show: Callable[[int], str] = str


_SAME_ON_ALL_RANKS = (
    _Same("H", lambda call: call.x.shape[1], "give every rank x with the same hidden size"),
    _Same("K", lambda call: call.topk, "give every rank the same top-k"),
    _Same("E_local", lambda call: call.w1.shape[0], "give every rank the same number of experts"),
    _Same("I", lambda call: call.w2.shape[2], "give every rank experts of the same intermediate size"),
    _Same(
        "dtype of x",
        lambda call: FLOAT_DTYPES.index(call.x.dtype),
        "convert x to one dtype on every rank",
        lambda index: str(FLOAT_DTYPES[index]),
    ),
    *(
        _Same(
            name,
            lambda call, field=field, known=known: known.index(getattr(call.config, field)),  # type: ignore[misc]
            "start every rank with the same flags",
            lambda index, known=known: known[index],  # type: ignore[misc]
        )
        for name, field, known in (
            ("the format (--fp8-recipe)", "format", FORMATS),
            ("the gradients' type (--fp8-format)", "fp8_gradients", GRADIENT_TYPES),
            ("the kind of scales (NVTE_FP8_BLOCK_SCALING_FP32_SCALES)", "fp8_scales", SCALE_KINDS),
            ("--mok-fp8-wgrad", "fp8_wgrad", PRODUCT_TYPES),
            ("--mok-fp8-shared", "fp8_shared", PRODUCT_TYPES),
        )
    ),
    _Same(
        "--mok-minibatch-size",
        lambda call: call.config.minibatch_size,
        "start every rank with the same flags",
    ),
    _Same(
        "--mok-macrobatch-size",
        lambda call: call.config.macrobatch_size or 0,
        "start every rank with the same flags",
        lambda rows: str(rows) if rows else "automatic",
    ),
)


def agree(call: MoeInputs) -> Agreement:
    """Check the call on every rank at once, so that a rank with a bad argument stops its peers too.

    Raises:
        MokInputError: on every rank, with what is wrong on each of them.
        MokTimeoutError: a peer did not take part in time.
    """
    problems = check_inputs(call)
    if not problems:
        problems = check_expert_numbers(call)
    mine = torch.full((2 + len(_SAME_ON_ALL_RANKS),), -1, dtype=torch.long)
    mine[0] = int(bool(problems))
    if not problems:
        mine[1] = call.x.shape[0]
        mine[2:] = torch.tensor([same.value(call) for same in _SAME_ON_ALL_RANKS])
    device = torch.device("cpu") if call.device.type == "meta" else call.device
    everyone = _all_gather(mine.to(device), call, "shapes").cpu()
    if everyone[:, 0].any():
        _raise_with_all_reports(call, problems)
    for same, column in zip(_SAME_ON_ALL_RANKS, everyone[:, 2:].t().tolist(), strict=True):
        by_rank = ", ".join(f"rank {rank} has {same.show(value)}" for rank, value in enumerate(column))
        problems.require(len(set(column)) == 1, f"{same.name} differs between ranks: {by_rank}", same.remedy)
    problems.raise_if_any(MokInputError, "mok_moe: the ranks of the expert-parallel group disagree:")
    tokens = everyone[:, 1].tolist()
    # Balanced: every rank gets as many rows as it sends. Taken from all ranks, so that they agree on it.
    balanced = max(tokens) * call.topk
    return Agreement(tokens, call.config.macrobatch_rows(balanced))


def gather_routes(call: MoeInputs, agreement: Agreement) -> Tensor:
    """[EP, max T, K] int64: `topk_ids` of every rank, padded with -1."""
    longest = max(agreement.tokens)
    mine = torch.full((longest, call.topk), -1, dtype=torch.long, device=call.x.device)
    mine[: call.x.shape[0]] = call.topk_ids
    return _all_gather(mine, call, "routes")


def schedules_of_all_ranks(call: MoeInputs, routes: Tensor) -> list[Schedule]:
    """Every rank's schedule: a rank needs its peers' to know which of its rows they want, in which order."""
    experts = call.w1.shape[0]
    return [build_schedule(routes, rank * experts, experts, TILE_ROWS) for rank in range(call.ep_size)]


class RowExchange:
    """Moves the rows of one macrobatch between the ranks that own the tokens and the ranks that compute.

    Args:
        call: the operands; its group is used.
        schedules: every rank's schedule.
        first, end: range of padded rows [first, end) of the macrobatch, clipped to each rank's own rows.
    """

    def __init__(self, call: MoeInputs, schedules: list[Schedule], first: int, end: int) -> None:
        self._call = call
        pieces = [(s.source_rank()[first:end], s.route()[first:end]) for s in schedules]
        source, _ = pieces[call.ep_rank]
        self.rows = source.numel()
        # My rows, grouped by the rank that they come from; rows of one rank keep their order on both sides.
        self._filled = (source >= 0).nonzero().squeeze(1)
        arrival = source[self._filled].sort(stable=True)
        self._filled = self._filled[arrival.indices]
        self._receive_counts = torch.bincount(arrival.values, minlength=call.ep_size).tolist()
        # My tokens' routes that each rank computes in this macrobatch, in that rank's row order.
        wanted = [route[src == call.ep_rank] for src, route in pieces]
        self._send_routes = torch.cat(wanted)
        self._send_counts = [w.numel() for w in wanted]

    def to_experts(self, values: Tensor, per_route: bool = False) -> Tensor:
        """Rows for the experts of this rank.

        Args:
            values: [T, ...], one a token, or [T * K, ...], one a route, if `per_route`.

        Returns:
            [rows, ...], zero in the padding rows.
        """
        index = self._send_routes if per_route else self._send_routes // self._call.topk
        arrived = _all_to_all(values[index], self._send_counts, self._receive_counts, self._call)
        rows = values.new_zeros((self.rows, *values.shape[1:]))
        rows[self._filled] = arrived
        return rows

    def rows_to_experts(self, x: Tensor | BlockScaled) -> Tensor | BlockScaled:
        """As `to_experts`, for [T, H] in its dtype or quantised row-wise, which travels as values and scales."""
        if isinstance(x, Tensor):
            return self.to_experts(x)
        # As bytes: not every backend of torch.distributed knows 8-bit floating point.
        values, scales = (self.to_experts(part.view(torch.uint8)).view(part.dtype) for part in (x.values, x.scales))
        return BlockScaled(values, scales, x.axis, x.length)

    def to_sources(self, rows: Tensor, slots: Tensor) -> None:
        """Send [rows, ...] back: each lands in slot `token * K + k` of its source's `slots` [T * K, ...]."""
        arrived = _all_to_all(rows[self._filled], self._receive_counts, self._send_counts, self._call)
        slots[self._send_routes] = arrived


def _all_gather(mine: Tensor, call: MoeInputs, what: str) -> Tensor:
    if call.group is None:
        return mine.unsqueeze(0)
    out = [torch.empty_like(mine) for _ in range(call.ep_size)]
    _wait(dist.all_gather(out, mine.contiguous(), group=call.group, async_op=True), call, what)
    return torch.stack(out)


def _all_to_all(send: Tensor, send_counts: list[int], receive_counts: list[int], call: MoeInputs) -> Tensor:
    if call.group is None:
        return send
    received = send.new_empty((sum(receive_counts), *send.shape[1:]))
    work = dist.all_to_all_single(
        received, send.contiguous(), receive_counts, send_counts, group=call.group, async_op=True
    )
    _wait(work, call, "rows")
    return received


def _wait(work: dist.Work, call: MoeInputs, what: str) -> None:
    try:
        work.wait(timedelta(seconds=call.config.timeout_s))
    except RuntimeError as error:
        raise MokTimeoutError(
            f"mok_moe: rank {call.ep_rank} of {call.ep_size} in the expert-parallel group waited for the {what} of "
            f"its peers; one of them ended, or did not get here within {call.config.timeout_s:g} s "
            f"(--mok-timeout-s). Look for the first error of another rank. torch.distributed says: {error}"
        ) from error


def _raise_with_all_reports(call: MoeInputs, problems: Problems) -> None:
    """Every rank says what it found wrong, and all of them raise the same message."""
    mine = problems.text("") if problems else ""
    reports: list[str] = [mine]
    if call.group is not None:
        gathered: list[str | None] = [None] * call.ep_size
        dist.all_gather_object(gathered, mine, group=call.group)
        reports = [text or "" for text in gathered]
    parts = [f"\non rank {rank} of the group:{text}" for rank, text in enumerate(reports) if text]
    raise MokInputError("mok_moe: arguments that do not fit" + "".join(parts))
