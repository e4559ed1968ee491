"""The layer that scenarios run: the same numbers on both ranks, each with its share, and what must come of it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mok_megatron.config import MokConfig
from mok_megatron.ops import mok_moe


class Layer:
    """One layer with the same numbers on both ranks; rank 0 has two thirds of its tokens."""

    def __init__(
        self, rank: int, group: Any, tokens: int = 600, hidden: int = 512, inner: int = 256, experts: int = 8,
        topk: int = 4, seed: int = 0, **settings: Any,
    ) -> None:  # fmt: skip
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape: int, std: float = 1.0) -> Tensor:
            return (torch.randn(shape, generator=generator) * std).bfloat16().cuda()

        top = torch.randn(tokens, experts, generator=generator).topk(topk, dim=1)
        self.group, self.config = group, MokConfig(backend="megakernel", minibatch_size=256, **settings)
        self.ids, self.weights = top.indices.int().cuda(), top.values.softmax(1).cuda()
        self.x, self.dy = normal(tokens, hidden), normal(tokens, hidden)
        self.w1 = normal(experts, 2 * inner, hidden, std=hidden**-0.5)
        self.w2 = normal(experts, hidden, inner, std=inner**-0.5)
        cut, half = tokens * 2 // 3, experts // 2
        self._tokens = slice(0, cut) if rank == 0 else slice(cut, None)
        self._experts = slice(0, half) if rank == 0 else slice(half, None)
        mine = [self.x[self._tokens], self.weights[self._tokens], self.w1[self._experts], self.w2[self._experts]]
        self._mine = [t.clone().requires_grad_() for t in mine]

    def forward(self) -> Tensor:
        """y of this rank's tokens."""
        x, weights, w1, w2 = self._mine
        return mok_moe(x, self.ids[self._tokens], weights, w1, w2, self.group, self.config)

    def backward(self, y: Tensor) -> list[Tensor]:
        """y and its gradients."""
        return [y.detach(), *torch.autograd.grad(y, self._mine, self.dy[self._tokens])]

    def step(self) -> list[Tensor]:
        """Forward and backward."""
        return self.backward(self.forward())

    def touch_weights(self) -> None:
        """As an optimizer does, but for their values: what was made of them in FP8 is to be made anew."""
        with torch.no_grad():
            for weight in self._mine[2:]:
                weight.mul_(1)

    def expected(self) -> list[Tensor]:
        """What `step` returns, computed by this GPU alone: the same bits, to which tests/megakernel holds it."""
        leaves = [t.clone().requires_grad_() for t in (self.x, self.weights, self.w1, self.w2)]
        y = mok_moe(leaves[0], self.ids, *leaves[1:], config=self.config)
        cuts = [self._tokens, self._tokens, self._tokens, self._experts, self._experts]
        return [t[cut] for t, cut in zip([y.detach(), *torch.autograd.grad(y, leaves, self.dy)], cuts, strict=True)]

    def check(self, found: list[Tensor]) -> None:
        """`found` is right to the bit."""
        for name, got, wanted in zip(("y", "dx", "dweights", "dw1", "dw2"), found, self.expected(), strict=False):
            assert torch.equal(got, wanted), f"{name} is wrong in {int((got != wanted).sum())} places"
