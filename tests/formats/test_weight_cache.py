"""A weight is quantised again exactly when it may have changed."""

from __future__ import annotations

import gc
import weakref

import torch
from torch.nn import Parameter

from mok_megatron.formats import WeightCache


class Counted:
    """What to build of a weight, and how often that was asked for."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, weight: torch.Tensor) -> torch.Tensor:
        assert not torch.is_grad_enabled() and not weight.requires_grad
        self.calls += 1
        return weight.clone()


def test_built_once_while_nothing_changes() -> None:
    cache, build, weight = WeightCache(), Counted(), Parameter(torch.ones(3))
    first = cache.get(weight, "a", build)
    assert cache.get(weight, "a", build) is first and build.calls == 1
    cache.get(weight, "b", build)
    cache.get(Parameter(torch.ones(3)), "a", build)
    assert build.calls == 3
    assert cache.get(weight, "a", build) is first


def test_every_kind_of_change_is_noticed() -> None:
    cache, build, weight = WeightCache(), Counted(), Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([Parameter(torch.ones(1))])  # of something else: Megatron's steps a copy in fp32

    def in_place() -> None:
        with torch.no_grad():
            weight.mul_(2)

    def behind_its_back() -> None:
        weight.data.mul_(2)
        optimizer.step()

    def other_buffer() -> None:
        weight.data = weight.data * 2

    def told() -> None:
        weight.data.mul_(2)
        cache.forget(weight)

    for calls, change in enumerate((in_place, behind_its_back, other_buffer, told), 1):
        cache.get(weight, "a", build)
        assert build.calls == calls
        change()
        assert torch.equal(cache.get(weight, "a", build), weight)


def test_a_write_through_data_alone_goes_unnoticed() -> None:
    """What the optimizer hook and `forget` are for; were it noticed, they could go."""
    cache, build, weight = WeightCache(), Counted(), Parameter(torch.ones(3))
    cache.get(weight, "a", build)
    weight.data.mul_(2)
    cache.get(weight, "a", build)
    assert build.calls == 1


def test_an_entry_dies_with_its_weight() -> None:
    cache, weight = WeightCache(), Parameter(torch.ones(3))
    made = weakref.ref(cache.get(weight, "a", Counted()))
    assert made() is not None
    del weight
    gc.collect()
    assert made() is None


def test_inference_tensors_have_no_version_and_are_not_kept() -> None:
    cache, build = WeightCache(), Counted()
    with torch.inference_mode():
        weight = torch.ones(3)
        for calls in (1, 2):
            cache.get(weight, "a", build)
            assert build.calls == calls
