"""Ranks on nodes and racks: an expert group takes whole nodes of one NVLink domain, the rest are spares."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from mok_megatron.configs import ClusterConfig
from mok_megatron.topology.domains import Domain
from mok_megatron.topology.layout import ParallelSizes, Ranks


def usable_gpus(cluster: ClusterConfig, ep: int, tp: int = 1) -> int:
    """GPUs of one domain that whole expert groups of `ep` ranks, on whole nodes, can take; 0: none fits.

    A tensor-parallel group of `tp` ranks must not be cut by a domain's edge either.
    """
    unit = math.lcm(ep, tp, cluster.node.gpus)
    usable = cluster.domain_gpus // unit * unit
    if usable == 0 and math.lcm(ep, tp) <= cluster.domain_gpus:
        unit = math.lcm(ep, tp)  # a domain of one node, or a job smaller than a node
        usable = cluster.domain_gpus // unit * unit if cluster.domain.nodes == 1 else 0
    return usable


@dataclass(frozen=True)
class Placement:
    """Rank r on domain `r // per_domain`: consecutive ranks fill one domain's usable nodes before the next."""

    cluster: ClusterConfig
    sizes: ParallelSizes
    per_domain: int
    """Ranks that a full domain holds."""

    @property
    def domains(self) -> int:
        return math.ceil(self.sizes.world / self.per_domain)

    @property
    def nodes_per_domain(self) -> int:
        """Nodes that the job takes in a full domain: the size of a Slurm segment."""
        return math.ceil(min(self.per_domain, self.sizes.world) / self.cluster.node.gpus)

    @property
    def spare_nodes(self) -> int:
        """Nodes of each domain that no whole expert group can use."""
        return self.cluster.domain.nodes - math.ceil(self.per_domain / self.cluster.node.gpus)

    @property
    def free_nodes(self) -> int:
        """Nodes of the last domain that another job, or more of this one, could use: spares excluded."""
        return math.ceil(self.per_domain / self.cluster.node.gpus) * self.domains - self.nodes

    @property
    def nodes(self) -> int:
        return math.ceil(self.sizes.world / self.ranks_per_node)

    @property
    def ranks_per_node(self) -> int:
        return min(self.cluster.node.gpus, self.sizes.world)

    def domain_of(self, ranks: Ranks) -> Ranks:
        """Domain number of each rank, same shape."""
        return ranks // self.per_domain

    def node_of(self, ranks: Ranks) -> Ranks:
        """Node of each rank, counted inside its domain from 0, same shape."""
        return ranks % self.per_domain // self.cluster.node.gpus

    def gpu_of(self, ranks: Ranks) -> Ranks:
        """GPU of each rank, counted inside its node from 0, same shape."""
        return ranks % self.per_domain % self.cluster.node.gpus

    def described_domains(self) -> list[Domain]:
        """What each rank would report at start-up if it stood where this placement puts it."""
        name = self.cluster.domain.name
        numbers = self.domain_of(np.arange(self.sizes.world))
        return [Domain("described", f"{name} {number}") for number in numbers.tolist()]

    def span(self, groups: Ranks) -> tuple[int, int]:
        """Of the group that is spread widest: (ranks inside one domain, domains). [groups, ranks of a group]."""
        domains = self.domain_of(groups)
        widest = 1 + (np.diff(np.sort(domains, axis=1), axis=1) != 0).sum(axis=1)
        count = int(widest.max())
        return math.ceil(groups.shape[1] / count), count
