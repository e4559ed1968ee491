"""Megatron's rank arithmetic: which ranks form a tensor, expert, data or pipeline group.

Megatron numbers ranks by a mixed-radix code. With the order ``tp-cp-ep-dp-pp``, its default, the tensor-parallel
index is the fastest digit and the pipeline stage the slowest. There are two codes over the same ranks: the dense
one (tp, cp, dp, pp) and the expert one (expert tp, ep, expert dp, pp). Source: `initialize_model_parallel` of
``megatron.core.parallel_state``, 0.19.2; tests compare with its `RankGenerator` up to 4,608 ranks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mok_megatron.errors import MokConfigError, Problems

Ranks = npt.NDArray[np.int64]

MEGATRON_ORDER = "tp-cp-ep-dp-pp"
"""Order of the digits, fastest first, unless a launch says otherwise."""


@dataclass(frozen=True)
class ParallelSizes:
    """Sizes of a launch of `world` ranks.

    Raises:
        MokConfigError: at construction, listing every size that does not divide and the nearest that does.
    """

    world: int
    tp: int = 1
    cp: int = 1
    ep: int = 1
    pp: int = 1
    etp: int = 1
    """Expert tensor parallelism (Megatron's --expert-tensor-parallel-size)."""
    order: str = MEGATRON_ORDER

    def __post_init__(self) -> None:
        problems = Problems()
        for name in ("world", "tp", "cp", "ep", "pp", "etp"):
            value = getattr(self, name)
            problems.require(value >= 1, f"{name} is {value}", "give at least 1")
        if not problems:
            self._require_divides(problems, "TP x CP x PP", self.tp * self.cp * self.pp)
            self._require_divides(problems, "expert TP x EP x PP", self.etp * self.ep * self.pp)
            tokens = self.order.split("-")
            problems.require(
                sorted(tokens) == sorted(MEGATRON_ORDER.split("-")),
                f"rank order {self.order!r} is not a permutation of {MEGATRON_ORDER!r}",
                "name each of tp, cp, ep, dp and pp once",
            )
            # Megatron asserts the same: otherwise the dense and the expert code give other pipeline groups.
            problems.require(
                tokens[-1] == "pp" or self.pp == 1 or self.dp == self.edp,
                f"order {self.order!r} does not end in pp and the data-parallel sizes of dense ({self.dp}) "
                f"and expert layers ({self.edp}) differ",
                f"use the order {MEGATRON_ORDER!r}",
            )
        problems.raise_if_any(MokConfigError, "parallel sizes cannot work:")

    def _require_divides(self, problems: Problems, name: str, product: int) -> None:
        low = self.world // product * product
        nearest = f"{low} or {low + product}" if low else f"{product}"
        problems.require(
            self.world % product == 0,
            f"{name} = {product} does not divide {self.world} ranks",
            f"the nearest numbers of ranks are {nearest}",
        )

    @property
    def dp(self) -> int:
        """Replicas of the dense layers."""
        return self.world // (self.tp * self.cp * self.pp)

    @property
    def edp(self) -> int:
        """Replicas of the experts."""
        return self.world // (self.etp * self.ep * self.pp)

    def groups(self, axes: str) -> Ranks:
        """Dense groups over `axes`, such as "tp" or "dp-cp": [groups, ranks of a group]."""
        sizes = {"tp": self.tp, "cp": self.cp, "ep": 1, "dp": self.dp, "pp": self.pp}
        return rank_groups(sizes, self.order, axes)

    def expert_groups(self, axes: str = "ep") -> Ranks:
        """Groups of the expert layers over `axes`: "ep", "dp", "tp-ep": [groups, ranks of a group]."""
        sizes = {"tp": self.etp, "cp": 1, "ep": self.ep, "dp": self.edp, "pp": self.pp}
        return rank_groups(sizes, self.order, axes)

    @property
    def expert_stride(self) -> int:
        """Distance between neighbours of an expert group. 1: each group is a run of consecutive ranks."""
        sizes = {"tp": self.etp, "cp": 1, "ep": self.ep, "dp": self.edp, "pp": self.pp}
        tokens = self.order.split("-")
        return math.prod(sizes[token] for token in tokens[: tokens.index("ep")])

    def stage_of(self, rank: int) -> int:
        """Pipeline stage of a rank (with an order that ends in pp)."""
        return rank // (self.world // self.pp)


def rank_groups(sizes: dict[str, int], order: str, axes: str) -> Ranks:
    """All groups that vary over `axes` and share every other digit.

    Args:
        sizes: size of each digit.
        order: digits from the fastest to the slowest, joined by "-".
        axes: digits that vary inside a group, joined by "-"; their order does not matter.

    Returns:
        [groups, ranks of a group], groups and ranks in the order in which Megatron lists them.
    """
    digits = order.split("-")
    inside = set(axes.split("-"))
    slow_first = digits[::-1]
    ranks = np.arange(math.prod(sizes[digit] for digit in digits)).reshape([sizes[d] for d in slow_first])
    outer = [i for i, digit in enumerate(slow_first) if digit not in inside]
    inner = [i for i, digit in enumerate(slow_first) if digit in inside]
    group_size = math.prod(sizes[slow_first[i]] for i in inner)
    return ranks.transpose(outer + inner).reshape(-1, group_size)
