"""The harness must not let a failure pass, and must say which rank failed and where."""

import os
import time

import pytest
import torch
import torch.distributed as dist

from tests.ranks import run_on_ranks


def _sum_of_ranks(rank: int, offset: int) -> torch.Tensor:
    total = torch.tensor(rank + offset)
    dist.all_reduce(total)
    return total + rank


def test_results_come_in_the_order_of_the_ranks() -> None:
    assert run_on_ranks(3, _sum_of_ranks, 10) == [33, 34, 35]


def _fail_on_two(rank: int) -> None:
    dist.barrier()
    if rank != 1:
        raise ValueError(f"no luck on {rank}")
    time.sleep(60)


def _die(rank: int) -> None:
    if rank == 1:
        os._exit(7)


def _hang(rank: int) -> None:
    if rank == 1:
        time.sleep(60)


@pytest.mark.parametrize(
    "function, words",
    [
        (_fail_on_two, ["rank 0 of 3", "no luck on 0", "rank 2 of 3", "no luck on 2", "rank 1 of 3: gave no result"]),
        (_die, ["rank 1 of 3: ended with exit status 7"]),
        (_hang, ["rank 1 of 3: gave no result within 6 s", "it was here:", "in _hang"]),
    ],
)
def test_every_rank_that_failed_is_named(function, words: list[str]) -> None:
    with pytest.raises(AssertionError) as failure:
        run_on_ranks(3, function, timeout_s=6)
    for word in words:
        assert word in str(failure.value)
