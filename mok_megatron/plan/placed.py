"""Expert groups of a plan and where they stand; the proof that each lies in one NVLink domain."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mok_megatron.plan.search import Plan
from mok_megatron.topology import check_expert_groups


@dataclass(frozen=True)
class ExpertGroup:
    """One expert group: ranks `first` to `last`, of pipeline stage `stage`, in NVLink domain `domain`."""

    index: int
    first: int
    last: int
    stage: int
    domain: int
    nodes: str

    @property
    def ranks(self) -> str:
        return f"{self.first}-{self.last}" if self.last > self.first else str(self.first)


def expert_groups(plan: Plan) -> list[ExpertGroup]:
    """Every expert group in Megatron's order."""
    placement, groups = plan.placement, plan.sizes.expert_groups()
    first, last = groups[:, 0], groups[:, -1]
    domains, low, high = placement.domain_of(first), placement.node_of(first), placement.node_of(last)
    return [
        ExpertGroup(
            index=i,
            first=int(first[i]),
            last=int(last[i]),
            stage=plan.sizes.stage_of(int(first[i])),
            domain=int(domains[i]),
            nodes=f"{low[i]}-{high[i]}" if high[i] > low[i] else str(low[i]),
        )
        for i in range(len(groups))
    ]


def group_proof(plan: Plan) -> str:
    """Check every expert group, by Megatron's arithmetic and this placement, and say what was found.

    Raises:
        TopologyError: a group crosses a domain; a plan never should.
    """
    groups, name = plan.sizes.expert_groups(), plan.placement.cluster.domain.name
    check_expert_groups(plan.placement.described_domains(), groups.tolist())
    contiguous = bool((np.diff(groups, axis=1) == 1).all())
    if not contiguous:
        raise AssertionError(f"expert groups of {plan.sizes} are not runs of ranks")
    if plan.sizes.ep == 1:
        return "EP 1: each rank is an expert group of its own"
    return (
        f"proof: expert stride {plan.sizes.expert_stride}, so group g is ranks {plan.sizes.ep}g to "
        f"{plan.sizes.ep}g + {plan.sizes.ep - 1}; groups checked ({len(groups):,}, all): consecutive, and inside one "
        f"{name}"
    )
