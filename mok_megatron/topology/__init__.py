"""Where ranks are: NVLink domains, Megatron's rank groups, and the placement of one on the other.

Start with `layout` (which ranks form an expert group), then `domains` (who shares NVLink with whom), `check`
(the refusal of an expert group that crosses a domain) and `placement` (ranks on racks, before anything runs).
"""

from mok_megatron.topology.check import TopologyError, check_expert_groups, require_one_domain
from mok_megatron.topology.domains import Domain, gather_domains, local_domain
from mok_megatron.topology.layout import MEGATRON_ORDER, ParallelSizes
from mok_megatron.topology.placement import Placement

__all__ = [
    "MEGATRON_ORDER",
    "Domain",
    "ParallelSizes",
    "Placement",
    "TopologyError",
    "check_expert_groups",
    "gather_domains",
    "local_domain",
    "require_one_domain",
]
