"""One start of the ranks for many tests."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from tests.ranks import run_on_ranks


def run_once(world_size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """`run_on_ranks`, whose results, or failure, all tests of this process share. Arguments must be hashable."""
    values, failure = _outcome(world_size, function, *args)
    if failure is not None:
        raise AssertionError(str(failure))
    return values


@cache
def _outcome(world_size: int, function: Callable[..., Any], *args: Any) -> tuple[list[Any], AssertionError | None]:
    try:
        return run_on_ranks(world_size, function, *args), None
    except AssertionError as failure:
        return [], failure
