"""Says aloud that the ranks share a GPU."""

from __future__ import annotations

from tests.faults.pair import SHARE_GPU


def pytest_report_header() -> list[str]:
    return ["tests/faults: both ranks on GPU 0, as MOK_FAULTS_SHARE_GPU=1 asks"] if SHARE_GPU else []
