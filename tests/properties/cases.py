"""Property tests that count their cases: each is a right result or a named error, never a crash or a wrong number."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mok_megatron.errors import MokError

CASES: dict[str, int] = {}
"""How many cases each property test runs, by its name. `test_count.py` adds them up."""

FACTOR = 10 if os.environ.get("HYPOTHESIS_PROFILE") == "explore" else 1


def cases(count: int, **strategies: st.SearchStrategy) -> Callable[[Callable[..., None]], Callable[[], None]]:
    """Make a test of a function of drawn arguments, that fails unless at least `count` cases ran to their end."""

    def decorate(body: Callable[..., None]) -> Callable[[], None]:
        ran = 0

        @settings(max_examples=count * FACTOR, suppress_health_check=list(HealthCheck))
        @given(st.fixed_dictionaries(strategies))
        def run(drawn: dict[str, Any]) -> None:
            nonlocal ran
            body(**drawn)
            ran += 1

        def test() -> None:
            run()
            assert ran >= count, f"{ran} cases of {count}: the strategy has no more to give"

        CASES[body.__name__] = count
        test.__name__, test.__doc__ = body.__name__, body.__doc__
        return test

    return decorate


def error_of(call: Callable[[], Any]) -> MokError | None:
    """The package's own error that `call` raises, or None where it returns; any other exception passes through."""
    try:
        call()
    except MokError as error:
        assert str(error).strip(), "an error without a word"
        return error
    return None


# What a user may hand over where a number is expected.
odd_numbers = st.one_of(
    st.none(),
    st.integers(-3, 300),
    st.sampled_from([-(10**30), -(2**31), 2**31 - 1, 2**31, 2**63, 10**400, 128, 256, 1024]),
    st.floats(),
    st.sampled_from(["", "128", "auto", "reference", "1e3", "; rm -rf /"]),
    st.booleans(),
)
