"""A benchmark's shape and its tensors: the same on every implementation, different on every rank."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mok_megatron.errors import MokConfigError, Problems


@dataclass(frozen=True)
class Shape:
    """One MoE layer. ``tokens`` is T, tokens a rank; ``shared`` the shared expert's intermediate size, 0 for none."""

    tokens: int
    hidden: int
    intermediate: int
    experts: int
    topk: int
    shared: int = 0

    def __str__(self) -> str:
        text = f"T {self.tokens}, H {self.hidden}, I {self.intermediate}, E {self.experts}, K {self.topk}"
        return text + (f", shared {self.shared}" if self.shared else "")

    def check(self, ranks: int) -> None:
        """MokConfigError that lists every size that cannot work on ``ranks`` ranks."""
        problems = Problems()
        for name in ("tokens", "hidden", "intermediate", "experts", "topk"):
            value = getattr(self, name)
            problems.require(value >= 1, f"--{name} is {value}", "give at least 1")
        problems.require(self.shared >= 0, f"--shared is {self.shared}", "give 0 for no shared expert")
        problems.require(
            self.experts % ranks == 0,
            f"--experts {self.experts} do not divide over {ranks} ranks",
            f"the nearest that works is {max(1, round(self.experts / ranks)) * ranks}",
        )
        problems.require(
            self.topk <= self.experts, f"--topk {self.topk} exceeds --experts {self.experts}", "lower --topk"
        )
        problems.raise_if_any(MokConfigError, "this shape cannot be measured:")


def parse_shape(text: str) -> Shape:
    """``"T,H,I,E,K"`` or ``"T,H,I,E,K,SHARED"``."""
    try:
        numbers = [int(word) for word in text.split(",")]
        if len(numbers) not in (5, 6):
            raise ValueError
    except ValueError:
        raise MokConfigError(
            f"--shape {text!r} is not T,H,I,E,K or T,H,I,E,K,SHARED, such as 4096,7168,2048,8,4"
        ) from None
    return Shape(*numbers)


@dataclass(frozen=True)
class Problem:
    """The tensors of one rank. Weights are plain tensors; each implementation makes its own parameters of them."""

    shape: Shape
    x: Tensor  # [T, H]
    topk_ids: Tensor  # [T, K] int64, all different within a row
    topk_weights: Tensor  # [T, K] fp32, each row sums to 1
    w1: Tensor  # [E_local, 2I, H]
    w2: Tensor  # [E_local, H, I]
    shared: tuple[Tensor, Tensor] | None  # [2Is, H], [H, Is]; the same on every rank
    dy: Tensor  # [T, H], the gradient that the backward starts from

    def to(self, dtype: torch.dtype) -> "Problem":
        """The same values in another floating-point type; router weights are never below fp32."""
        shared = None if self.shared is None else (self.shared[0].to(dtype), self.shared[1].to(dtype))
        wide = dtype if dtype == torch.float64 else torch.float32
        return replace(
            self,
            x=self.x.to(dtype),
            topk_weights=self.topk_weights.to(wide),
            w1=self.w1.to(dtype),
            w2=self.w2.to(dtype),
            shared=shared,
            dy=self.dy.to(dtype),
        )


def make_problem(
    shape: Shape, rank: int, ranks: int, device: torch.device, dtype: torch.dtype, imbalance: float = 0.0, seed: int = 1
) -> Problem:
    """Random tensors of unit scale and a random routing.

    Router scores are standard normal; ``imbalance`` times a standard normal offset an expert is added to them, the
    same on every rank, so 0 is balanced up to chance and 1 already gives busy experts several times their share.
    """
    everywhere = torch.Generator(device).manual_seed(seed)
    here = torch.Generator(device).manual_seed(seed + 1000 + rank)
    local = shape.experts // ranks

    def normal(*size: int, scale: float = 1.0, generator: torch.Generator = here) -> Tensor:
        values = torch.randn(*size, generator=generator, device=device, dtype=torch.float32)
        return (values * scale).to(dtype)

    offsets = imbalance * torch.randn(shape.experts, generator=everywhere, device=device)
    shared = None
    if shape.shared:
        shared = (
            normal(2 * shape.shared, shape.hidden, scale=shape.hidden**-0.5, generator=everywhere),
            normal(shape.hidden, shape.shared, scale=shape.shared**-0.5, generator=everywhere),
        )
    scores = torch.randn(shape.tokens, shape.experts, generator=here, device=device) + offsets
    best, ids = scores.topk(shape.topk, dim=1)
    # An expert at a time: fp32 copies of all experts at once would be the benchmark's largest tensor.
    w1 = torch.stack([normal(2 * shape.intermediate, shape.hidden, scale=shape.hidden**-0.5) for _ in range(local)])
    w2 = torch.stack([normal(shape.hidden, shape.intermediate, scale=shape.intermediate**-0.5) for _ in range(local)])
    x, dy = normal(shape.tokens, shape.hidden), normal(shape.tokens, shape.hidden)
    return Problem(shape, x, ids, best.softmax(dim=1), w1, w2, shared, dy)
