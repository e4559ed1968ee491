"""CPU host mode: what it replaces, what it puts back, and where it refuses to run."""

import importlib

import pytest
import torch

from mok_megatron import host
from mok_megatron.host.mode import HostModeError
from mok_megatron.host.replacements import REPLACEMENTS, TRAINING_REPLACEMENTS

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="CPU host mode is for machines without a GPU")


@pytest.fixture(autouse=True)
def off_before_and_after():
    """Each test starts and ends with host mode off, whatever ran in this process before."""
    was_on = host.active()
    host.disable()
    yield
    host.disable()
    if was_on:
        host.enable()


def value(module: str, name: str) -> tuple[object, bool]:
    """A named object, and whether its owner defines it itself (and does not inherit it)."""
    owner = importlib.import_module(module)
    *parents, attribute = name.split(".")
    for parent in parents:
        owner = getattr(owner, parent)
    return getattr(owner, attribute), attribute in vars(owner)


def test_every_entry_is_replaced_and_put_back():
    table = REPLACEMENTS + TRAINING_REPLACEMENTS
    before = [value(entry.module, entry.name) for entry in table]
    host.enable(training=True)
    for entry, (original, _) in zip(table, before, strict=True):
        assert value(entry.module, entry.name)[0] is not original, f"{entry.module}.{entry.name} was not replaced"
    host.disable()
    for entry, state in zip(table, before, strict=True):
        assert value(entry.module, entry.name) == state, f"{entry.module}.{entry.name} was not put back"


def test_table_names_each_place_once_and_says_why():
    places = [(entry.module, entry.name) for entry in REPLACEMENTS + TRAINING_REPLACEMENTS]
    assert len(places) == len(set(places))
    assert all(entry.reason for entry in REPLACEMENTS + TRAINING_REPLACEMENTS)


def test_enabling_twice_wraps_once():
    host.enable()
    once = torch.zeros
    host.enable()
    assert torch.zeros is once
    host.enable(training=True)
    assert torch.zeros is once and torch.cuda.device_count() == 1
    host.disable()
    assert torch.cuda.device_count() == 0 and not host.active()


def test_context_manager_leaves_things_as_they_were():
    with host.cpu_host_mode():
        assert host.active()
    assert not host.active()
    host.enable()
    with host.cpu_host_mode():
        pass
    assert host.active()


def test_refuses_where_there_is_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    zeros = torch.zeros
    with pytest.raises(HostModeError, match="CUDA_VISIBLE_DEVICES"):
        host.enable()
    assert torch.zeros is zeros and not host.active()


def test_cuda_devices_mean_the_cpu():
    host.enable()
    for device in ("cuda", "cuda:0", torch.device("cuda", 1), torch.cuda.current_device()):
        assert torch.zeros(2, device=device).device.type == "cpu"
        assert torch.ones(2).to(device).device.type == "cpu"
        assert torch.ones(2).to(torch.float64).to(device=device).dtype == torch.float64
    assert torch.zeros(2, device="meta").device.type == "meta"
    x = torch.ones(2, requires_grad=True)
    assert x.cuda() is x
    assert x.type() == "torch.cuda.FloatTensor" and x.type(torch.float64).dtype == torch.float64
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda.current_stream().wait_stream(torch.cuda.Stream())
    assert torch.cuda.Stream().record_event().query()


def test_tracked_random_numbers_repeat_and_leave_the_outer_stream_alone():
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker

    host.enable()
    torch.manual_seed(1)
    expected = [torch.rand(3) for _ in range(2)]

    def draw(seed):
        tracker = CudaRNGStatesTracker()
        tracker.add("here", seed)
        torch.manual_seed(1)
        outer = [torch.rand(3)]
        with tracker.fork("here"):
            first = torch.rand(3)
        outer.append(torch.rand(3))
        with tracker.fork("here"):
            second = torch.rand(3)
        assert all(map(torch.equal, outer, expected)), "a fork changed the outer stream"
        assert not torch.equal(first, second), "a fork started again from the seed"
        return torch.stack([first, second])

    assert torch.equal(draw(5), draw(5))
    assert not torch.equal(draw(5), draw(6))
    with pytest.raises(KeyError, match="absent"), CudaRNGStatesTracker().fork("absent"):
        pass
