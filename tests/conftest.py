"""Settings shared by all tests: one thread a process, deterministic hypothesis, and the skip of GPU tests."""

import os

# Before torch is imported: many tests start several ranks on a few cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TORCH_SHOW_CPP_STACKTRACES", "0")
os.environ.setdefault("MPLBACKEND", "Agg")

import pytest
import torch
from hypothesis import HealthCheck, settings

torch.set_num_threads(1)

settings.register_profile(
    "default",
    deadline=None,  # a loaded machine is slow, not wrong
    derandomize=True,  # the same examples in every run; HYPOTHESIS_PROFILE=explore looks further
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("explore", deadline=None, max_examples=2000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


def missing_gpu(count: int = 1, capability: tuple[int, int] = (9, 0)) -> str | None:
    """Why a test that needs ``count`` GPUs of ``capability`` or later cannot run here; None if it can."""
    if not torch.cuda.is_available():
        return "needs a CUDA GPU; torch.cuda.is_available() is False"
    found = torch.cuda.device_count()
    if found < count:
        return f"needs {count} CUDA GPUs; this machine has {found}"
    seen = torch.cuda.get_device_capability()
    if seen < capability:
        return "needs compute capability {}.{}; this GPU has {}.{}".format(*capability, *seen)
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        for mark in item.iter_markers("gpu"):
            reason = missing_gpu(*mark.args, **mark.kwargs)
            if reason:
                item.add_marker(pytest.mark.skip(reason=reason))
