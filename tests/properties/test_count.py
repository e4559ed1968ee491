"""At least 2,000 generated cases run in CI; each test makes sure itself that it ran as many as it says."""

from __future__ import annotations

import importlib
from pathlib import Path

from hypothesis import strategies as st

from tests.properties.cases import CASES, cases

PROMISED = 2000


def test_at_least_two_thousand_cases() -> None:
    for path in Path(__file__).parent.glob("test_*.py"):
        importlib.import_module(f"tests.properties.{path.stem}")
    print(f"{sum(CASES.values())} generated cases in {len(CASES)} tests")
    assert sum(CASES.values()) >= PROMISED


def test_a_test_that_runs_too_few_cases_fails() -> None:
    seen = []
    for count, values in ((3, [1, 2, 3]), (9, [1, 2, 3])):

        @cases(count, value=st.sampled_from(values))
        def few(value: int) -> None:
            seen.append(value)

        del CASES["few"]
        if count <= len(values):
            few()
        else:
            try:
                few()
            except AssertionError as error:
                assert "3 cases of 9" in str(error)
            else:
                raise RuntimeError("counted cases that did not run")
    assert set(seen) == {1, 2, 3}
