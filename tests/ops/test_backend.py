"""Which backend a call gets."""

import pytest
import torch

from mok_megatron import MokConfig, mok_moe
from mok_megatron.errors import MokBackendError
from mok_megatron.ops import backend
from tests.ops.problem import make_problem

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


def test_megakernel_where_there_is_none_names_the_remedy() -> None:
    p = make_problem(3)
    with pytest.raises(MokBackendError, match="--mok-backend megakernel: .* set --mok-backend reference"):
        mok_moe(p.x, p.topk_ids, p.topk_weights, p.w1, p.w2, config=MokConfig(backend="megakernel"))


def test_the_reference_serves_every_device_that_asks_for_it() -> None:
    for device in (CPU, GPU):
        assert backend.select_backend(MokConfig(backend="reference"), device).name == "reference"
    assert backend.select_backend(MokConfig(), CPU).name == "reference"


@pytest.mark.parametrize("choice", ["auto", "megakernel"])
def test_a_gpu_never_falls_back_by_itself(monkeypatch: pytest.MonkeyPatch, choice: str) -> None:
    monkeypatch.setattr(backend, "megakernel_problem", lambda device: f"{device} is too old")
    with pytest.raises(MokBackendError, match=f"--mok-backend {choice}: cuda:0 is too old; .*--mok-backend reference"):
        backend.select_backend(MokConfig(backend=choice), GPU)
