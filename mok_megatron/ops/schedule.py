"""Who computes which row: the schedule, in plain torch.

The megakernel builds the same tensors on the device; tests hold the two equal.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mok_megatron.config import TILE_ROWS
from mok_megatron.errors import MokCapacityError


@dataclass(frozen=True)
class Schedule:
    """The routed rows that one rank computes, in the order in which it computes them.

    Rows are sorted by (local expert, source rank, token, k), and the segment of each expert is padded to a
    multiple of `tile_rows`. The order follows the global order of the tokens and not the number of ranks, so an
    expert sees the same rows in the same tiles at every EP size.
    """

    row_source: Tensor
    """[capacity] int32: where a row comes from, `source_rank * max_tokens * K + token * K + k`; -1 is padding."""
    expert_offsets: Tensor
    """[E_local + 1] int32: the first row of each expert's segment, and the number of rows in use."""
    rows_per_expert: Tensor
    """[E_local] int32: routes of each expert, without padding."""
    max_tokens: int
    """The largest T over the ranks of the group: the stride of a rank in `row_source`."""
    topk: int
    """K."""

    @property
    def num_experts(self) -> int:
        """E_local."""
        return self.rows_per_expert.numel()

    def source_rank(self) -> Tensor:
        """[capacity] int64: the rank that owns the token of each row, -1 for padding."""
        return torch.where(self.row_source >= 0, self.row_source.long() // self._rank_stride(), -1)

    def route(self) -> Tensor:
        """[capacity] int64: `token * K + k` of each row on its source rank; not valid for padding."""
        return self.row_source.long() % self._rank_stride()

    def _rank_stride(self) -> int:
        return max(1, self.max_tokens * self.topk)  # without tokens there is only padding, and nothing to divide


def build_schedule(
    topk_ids: Tensor,
    first_expert: int,
    num_local_experts: int,
    tile_rows: int = TILE_ROWS,
    capacity: int | None = None,
) -> Schedule:
    """The schedule of the rank that holds experts [first_expert, first_expert + num_local_experts).

    Args:
        topk_ids: [EP, max_tokens, K] integers, every rank's global expert numbers, -1 where there is no route;
            a rank with fewer tokens is padded with -1.
        first_expert: the first expert of this rank.
        num_local_experts: E_local.
        tile_rows: every segment is padded to a multiple of this.
        capacity: length of `row_source`. Default: the rows in use.

    Raises:
        MokCapacityError: the rows in use exceed `capacity`, or the routes exceed int32.
    """
    _, max_tokens, topk = topk_ids.shape
    if topk_ids.numel() > torch.iinfo(torch.int32).max:
        raise MokCapacityError(
            f"{topk_ids.numel()} routes (EP x tokens x top-k) do not fit row_source's int32; "
            "give each rank fewer tokens (--micro-batch-size, --seq-length)"
        )
    # Flattened, the routes stand in (source rank, token, k) order: a stable sort by expert is all there is to do.
    local_expert = topk_ids.reshape(-1).long() - first_expert
    here = (local_expert >= 0) & (local_expert < num_local_experts)
    routes = here.nonzero().squeeze(1)
    expert_of_route, order = local_expert[routes].sort(stable=True)
    routes = routes[order]

    rows_per_expert = torch.bincount(expert_of_route, minlength=num_local_experts)
    padded = (rows_per_expert + tile_rows - 1) // tile_rows * tile_rows
    offsets = torch.zeros(num_local_experts + 1, dtype=torch.long, device=topk_ids.device)
    offsets[1:] = padded.cumsum(0)
    used = int(offsets[-1])
    capacity = used if capacity is None else capacity
    if used > capacity:
        raise MokCapacityError(
            f"{used} routed rows do not fit the schedule's capacity of {capacity}; worst_case_capacity() always does"
        )

    # Row of a route: the start of its expert's segment plus its place among that expert's routes.
    first_of_expert = rows_per_expert.cumsum(0) - rows_per_expert
    place = torch.arange(routes.numel(), device=topk_ids.device) - first_of_expert[expert_of_route]
    row_source = torch.full((capacity,), -1, dtype=torch.int32, device=topk_ids.device)
    row_source[offsets[:-1][expert_of_route] + place] = routes.int()
    return Schedule(row_source, offsets.int(), rows_per_expert.int(), max_tokens, topk)


def worst_case_capacity(ranks: int, max_tokens: int, topk: int, num_local_experts: int) -> int:
    """The most rows that any routing can give one rank, padding included.

    Every route of every rank may come here: a token's experts need not be distinct, so K counts and not
    min(K, E_local). Padding is largest where each expert but one has a single row, so that each wastes a tile less
    one row.
    """
    routes = ranks * max_tokens * topk
    padding = min(num_local_experts, routes) * (TILE_ROWS - 1)
    return (routes + padding) // TILE_ROWS * TILE_ROWS
