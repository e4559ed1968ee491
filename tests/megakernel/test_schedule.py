"""The schedule that the device builds is the one that ops/schedule.py defines."""

from __future__ import annotations

import pytest
import torch

from mok_megatron.ops.schedule import build_schedule
from mok_megatron.selftest.problem import VirtualRanks, kernel_config, make_problem

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("ranks,splits", [(1, [700]), (2, [650, 50]), (4, [0, 333, 1, 366])])
def test_equals_the_reference(ranks, splits):
    problem = make_problem(700, 128, 64, 16, 3)
    problem.ids[::7] = -1
    run = VirtualRanks(problem, ranks, kernel_config(), splits=splits)
    steps = run.forward_steps(problem)
    run.launch(steps)
    run.check()
    longest, local = max(splits), 16 // ranks
    routes = torch.full((ranks, longest, 3), -1, device="cuda")
    for rank, ids in enumerate(problem.ids.split(splits)):
        routes[rank, : len(ids)] = ids
    all_weights = torch.zeros(ranks, longest, 3, device="cuda")
    for rank, weights in enumerate(problem.weights.split(splits)):
        all_weights[rank, : len(weights)] = weights
    for rank, step in enumerate(steps):
        found = step.saved.schedule
        wanted = build_schedule(routes, rank * local, local, capacity=len(found.row_source))
        assert torch.equal(found.row_source, wanted.row_source)
        assert torch.equal(found.expert_offsets, wanted.expert_offsets)
        assert torch.equal(found.expert_rows, wanted.rows_per_expert)
        used = int(wanted.expert_offsets[-1])
        assert found.info.tolist() == [used, longest, 0]
        source = wanted.row_source[:used].long()
        expected = torch.where(source >= 0, all_weights.reshape(-1)[source.clamp_min(0)], 0.0)
        assert torch.equal(found.row_weight[:used], expected)
        starts = torch.arange(0, used, 128, device="cuda")
        expert = torch.searchsorted(wanted.expert_offsets.long(), starts, right=True) - 1
        assert torch.equal(found.block_expert[: used // 128].long(), expert)
