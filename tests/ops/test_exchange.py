"""The rows that an exchange hands to the experts."""

import torch

from mok_megatron.config import TILE_ROWS, MokConfig
from mok_megatron.ops.inputs import MoeInputs
from mok_megatron.reference.exchange import RowExchange, agree, gather_routes, schedules_of_all_ranks


def test_rows_stand_where_the_schedule_says_and_padding_is_zero() -> None:
    tokens, hidden, experts = 5, 8, 3
    x = torch.arange(1.0, tokens * hidden + 1).view(tokens, hidden)
    ids = torch.tensor([[2], [0], [2], [-1], [0]])
    w1, w2 = torch.ones(experts, 4, hidden), torch.ones(experts, hidden, 2)
    call = MoeInputs(x, ids, torch.ones(tokens, 1), w1, w2, None, None, MokConfig())
    schedules = schedules_of_all_ranks(call, gather_routes(call, agree(call)))

    # Memory that nobody wrote is NaN here, so padding that is only left alone shows.
    torch.use_deterministic_algorithms(True)
    try:
        rows = RowExchange(call, schedules, 0, 2 * TILE_ROWS).to_experts(x)
    finally:
        torch.use_deterministic_algorithms(False)

    wanted = torch.zeros(2 * TILE_ROWS, hidden)
    wanted[:2] = x[[1, 4]]  # expert 0
    wanted[TILE_ROWS : TILE_ROWS + 2] = x[[0, 2]]  # expert 2; expert 1 has no rows
    assert torch.equal(rows, wanted)
