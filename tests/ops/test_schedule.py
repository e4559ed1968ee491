"""The schedule against one built row by row in plain Python."""

from dataclasses import dataclass

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from mok_megatron.config import TILE_ROWS
from mok_megatron.errors import MokCapacityError
from mok_megatron.ops.schedule import build_schedule, worst_case_capacity


@dataclass(frozen=True)
class Routing:
    """[EP][max_tokens][K] expert numbers, and how the experts are spread."""

    ids: list[list[list[int]]]
    max_tokens: int
    topk: int
    experts_per_rank: int

    def tensor(self) -> torch.Tensor:
        return torch.tensor(self.ids, dtype=torch.int64).reshape(len(self.ids), self.max_tokens, self.topk)


@st.composite
def routings(draw: st.DrawFn) -> Routing:
    ranks, max_tokens, topk = draw(st.integers(1, 4)), draw(st.integers(0, 6)), draw(st.integers(1, 4))
    experts_per_rank = draw(st.integers(1, 4))
    # Few distinct numbers, so that experts repeat; the shrinker prefers -1.
    route = st.integers(-1, ranks * experts_per_rank - 1)
    token = st.lists(route, min_size=topk, max_size=topk)
    rank = st.lists(token, min_size=max_tokens, max_size=max_tokens)
    ids = draw(st.lists(rank, min_size=ranks, max_size=ranks))
    return Routing(ids, max_tokens, topk, experts_per_rank)


def naive_schedule(routing: Routing, rank: int, tile_rows: int) -> tuple[list[int], list[int], list[int]]:
    rows: list[int] = []
    offsets, counts = [0], []
    for expert in range(rank * routing.experts_per_rank, (rank + 1) * routing.experts_per_rank):
        count = 0
        for source, tokens in enumerate(routing.ids):
            for token, experts in enumerate(tokens):
                for k, wanted in enumerate(experts):
                    if wanted == expert:
                        rows.append(source * routing.max_tokens * routing.topk + token * routing.topk + k)
                        count += 1
        while len(rows) % tile_rows:
            rows.append(-1)
        offsets.append(len(rows))
        counts.append(count)
    return rows, offsets, counts


@given(routings(), st.sampled_from([1, 2, 4, 8]), st.integers(0, 9))
def test_schedule_is_the_naive_one(routing: Routing, tile_rows: int, spare: int) -> None:
    for rank in range(len(routing.ids)):
        rows, offsets, counts = naive_schedule(routing, rank, tile_rows)
        first = rank * routing.experts_per_rank
        arguments = (routing.tensor(), first, routing.experts_per_rank, tile_rows)
        schedule = build_schedule(*arguments)
        assert schedule.row_source.tolist() == rows
        assert schedule.expert_offsets.tolist() == offsets
        assert schedule.rows_per_expert.tolist() == counts
        assert schedule.num_experts == routing.experts_per_rank
        dtypes = {schedule.row_source.dtype, schedule.expert_offsets.dtype, schedule.rows_per_expert.dtype}
        assert dtypes == {torch.int32}

        roomy = build_schedule(*arguments, capacity=len(rows) + spare)
        assert roomy.row_source.tolist() == rows + [-1] * spare
        assert roomy.expert_offsets.tolist() == offsets
        if rows:
            with pytest.raises(MokCapacityError, match=f"{len(rows)} routed rows .* capacity of {len(rows) - 1}"):
                build_schedule(*arguments, capacity=len(rows) - 1)


@given(routings())
def test_rows_lead_back_to_their_route(routing: Routing) -> None:
    for rank in range(len(routing.ids)):
        schedule = build_schedule(routing.tensor(), rank * routing.experts_per_rank, routing.experts_per_rank, 4, 400)
        expert_of_row = torch.bucketize(torch.arange(400), schedule.expert_offsets[1:], right=True).tolist()
        pairs = zip(schedule.source_rank().tolist(), schedule.route().tolist(), expert_of_row, strict=True)
        for source, route, expert in pairs:
            if source >= 0:
                token, k = divmod(route, routing.topk)
                assert routing.ids[source][token][k] == rank * routing.experts_per_rank + expert


@given(st.data(), st.lists(st.integers(0, 5), min_size=4, max_size=4), st.integers(1, 3))
def test_an_expert_sees_the_same_rows_at_every_ep_size(data: st.DataObject, tokens: list[int], topk: int) -> None:
    experts = 4
    total = sum(tokens)
    routes = data.draw(st.lists(st.integers(-1, experts - 1), min_size=total * topk, max_size=total * topk))
    global_ids = torch.tensor(routes, dtype=torch.int64).reshape(total, topk)
    seen = []
    for per_rank in ([total], [tokens[0] + tokens[1], tokens[2] + tokens[3]], tokens):
        starts = [sum(per_rank[:r]) for r in range(len(per_rank))]
        ids = torch.full((len(per_rank), max(per_rank), topk), -1)
        for r, count in enumerate(per_rank):
            ids[r, :count] = global_ids[starts[r] : starts[r] + count]
        local = experts // len(per_rank)
        segments = []
        for rank in range(len(per_rank)):
            s = build_schedule(ids, rank * local, local, tile_rows=4)
            start = torch.tensor(starts)[s.source_rank().clamp(min=0)] * topk
            rows = torch.where(s.row_source >= 0, start + s.route(), -1)
            segments += [part.tolist() for part in rows.tensor_split(s.expert_offsets[1:-1].long())]
        seen.append(segments)
    assert seen[0] == seen[1] == seen[2]


@given(st.integers(1, 3), st.integers(0, 150), st.integers(1, 3), st.integers(1, 5), st.randoms())
def test_worst_case_capacity_is_reached_and_never_exceeded(ranks, max_tokens, topk, experts, random) -> None:
    capacity = worst_case_capacity(ranks, max_tokens, topk, experts)
    routes = ranks * max_tokens * topk
    # One row for each expert but the last, which takes the rest.
    worst = torch.arange(routes).clamp(max=experts - 1)
    some = torch.tensor([random.randrange(-1, experts) for _ in range(routes)], dtype=torch.int64)
    for ids, reached in ((worst, True), (some, False)):
        schedule = build_schedule(ids.reshape(ranks, max_tokens, topk), 0, experts)
        used = int(schedule.expert_offsets[-1])
        assert used == capacity if reached else used <= capacity
    assert capacity % TILE_ROWS == 0


def test_more_routes_than_int32_holds_are_refused() -> None:
    ids = torch.empty(64, 2**22, 8, dtype=torch.int32, device="meta")
    with pytest.raises(MokCapacityError, match="int32"):
        build_schedule(ids, 0, 1)
