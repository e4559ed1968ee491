"""Weights are quantised when they change, not at every use: once an optimizer step.

A change is noticed by
- the tensor's version counter, which every in-place operation on it advances;
- its address, which changes where a buffer is swapped for another;
- the end of any `torch.optim.Optimizer.step` in this process: Megatron's optimizers write a parameter through `.data`
  or through the buffer that it is a view of, and neither advances its version counter;
- `WeightCache.forget`, which the Megatron layer calls at the first microbatch of each step, as Megatron tells
  Transformer Engine's layers.

What escapes all four is a write through `.data`, outside an optimizer, between two microbatches: call `forget`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.weak import WeakTensorKeyDictionary


class _Stamp(NamedTuple):
    """The state of a weight when it was quantised."""

    version: int
    address: int
    optimizer_steps: int


class WeightCache:
    """What was made of each weight; an entry lives as long as its weight."""

    def __init__(self) -> None:
        self._entries: Any = WeakTensorKeyDictionary()

    def get[T](self, weight: Tensor, key: Hashable, build: Callable[[Tensor], T]) -> T:
        """`build(weight)` without autograd, or what it gave since the weight last changed.

        Args:
            weight: compared by identity: pass the parameter, not a view made for the call.
            key: tells apart what different callers make of one weight, such as the recipe.
            build: called where there is nothing, or nothing fresh.
        """
        with torch.no_grad():
            if weight.is_inference():  # has no version counter to go by
                return build(weight)
            stamp = _Stamp(weight._version, weight.data_ptr(), _optimizer_steps)
            entries = self._entries.setdefault(weight, {})
            if key not in entries or entries[key][0] != stamp:
                entries.pop(key, None)  # before the new copy exists: the old one may be large
                entries[key] = (stamp, build(weight.detach()))
            value: T = entries[key][1]
            return value

    def forget(self, weight: Tensor) -> None:
        """Quantise `weight` again at its next use."""
        self._entries.pop(weight, None)


CACHE = WeightCache()
"""That of this process: weights are shared by all calls of the operator."""

_optimizer_steps = 0


def _count_step(*unused: Any) -> None:
    global _optimizer_steps
    _optimizer_steps += 1


register_optimizer_step_post_hook(_count_step)
