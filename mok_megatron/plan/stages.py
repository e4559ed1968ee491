"""Layers on pipeline stages, and the string that tells Megatron (--pipeline-model-parallel-layout)."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from mok_megatron.configs import ModelConfig

# Megatron's letters: E embedding, t transformer layer, m MTP layer, L loss.
LAYER_LETTER = {"dense": "t", "moe": "t", "mtp": "m"}


@dataclass(frozen=True)
class Stage:
    """What one pipeline stage holds. The first also has the embedding, the last the output layer and loss."""

    dense: int = 0
    moe: int = 0
    mtp: int = 0
    first: bool = False
    last: bool = False

    @property
    def layers(self) -> int:
        return self.dense + self.moe + self.mtp


def layer_kinds(model: ModelConfig) -> list[str]:
    """Kind of each layer in order: "dense", "moe", "mtp"."""
    moe = model.moe
    return ["dense"] * moe.first_dense_layers + ["moe"] * moe.num_moe_layers + ["mtp"] * model.model.mtp_layers


def split_layers(
    kinds: Sequence[str], costs: dict[str, float], stages: int, first_cost: float, last_cost: float
) -> list[Stage]:
    """Consecutive layers on `stages` stages, so that the most loaded stage has as little to do as possible.

    Args:
        kinds: layer_kinds().
        costs: time of a layer of each kind, any unit.
        stages: at most the number of transformer layers.
        first_cost: extra time of the first stage (embedding).
        last_cost: extra time of the last stage (output layer and loss).
    """
    times = [costs[kind] for kind in kinds]
    low, high = 0.0, sum(times) + first_cost + last_cost
    best = _fill(times, stages, high, first_cost, last_cost)
    for _ in range(40):
        middle = (low + high) / 2
        found = _fill(times, stages, middle, first_cost, last_cost)
        if found is None:
            low = middle
        else:
            best, high = found, middle
    assert best is not None  # the first limit holds everything
    bounds = [0, *itertools.accumulate(best)]
    result = []
    for index, (start, end) in enumerate(itertools.pairwise(bounds)):
        counts = {kind: list(kinds[start:end]).count(kind) for kind in LAYER_LETTER}
        result.append(Stage(**counts, first=index == 0, last=index == stages - 1))
    return result


def _fill(times: list[float], stages: int, limit: float, first_cost: float, last_cost: float) -> list[int] | None:
    """Layers of each stage when each takes what fits into `limit`, from the last stage backwards."""
    counts: list[int] = []
    left = len(times)
    for stage in reversed(range(stages)):
        spent = (last_cost if stage == stages - 1 else 0.0) + (first_cost if stage == 0 else 0.0)
        count = 0
        # Every earlier stage needs at least one layer.
        while left - count > stage and (spent + times[left - count - 1] <= limit * (1 + 1e-9)):
            spent += times[left - count - 1]
            count += 1
        if count == 0:
            return None
        counts.append(count)
        left -= count
    return counts[::-1] if left == 0 else None


def layout_string(stages: Sequence[Stage]) -> str:
    """The stages as Megatron writes them, such as ``Et*15|t*15|t*15|t*16mL``."""
    words = []
    for stage in stages:
        transformer = stage.dense + stage.moe
        body = "" if transformer == 0 else "t" if transformer == 1 else f"t*{transformer}"
        words.append(("E" if stage.first else "") + body + "m" * stage.mtp + ("L" if stage.last else ""))
    return "|".join(words)
