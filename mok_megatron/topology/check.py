"""The start-up check: an expert group must lie inside one NVLink domain."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from mok_megatron.errors import MokConfigError
from mok_megatron.topology.domains import Domain, gather_domains

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

MAX_LISTED = 8


class TopologyError(MokConfigError):
    """An expert group crosses NVLink domains. `offending`: its ranks outside the group's main domain."""

    def __init__(self, message: str, offending: list[int]) -> None:
        super().__init__(message)
        self.offending = offending


def check_expert_groups(domains: Mapping[int, Domain] | Sequence[Domain], groups: Iterable[Sequence[int]]) -> None:
    """Refuse expert groups that cross an NVLink domain.

    Args:
        domains: domain of each rank, indexed by the ranks that `groups` name.
        groups: ranks of each expert group.

    Raises:
        TopologyError: listing each offending group and rank, and the remedy.
    """
    listed = [[int(rank) for rank in group] for group in groups]
    lines: list[str] = []
    offending: list[int] = []
    bad_groups = 0
    for index, group in enumerate(listed):
        members: dict[Domain, list[int]] = {}
        for rank in group:
            members.setdefault(domains[rank], []).append(rank)
        if len(members) == 1:
            continue
        bad_groups += 1
        main = max(members, key=lambda domain: len(members[domain]))
        outside = {domain: ranks for domain, ranks in members.items() if domain != main}
        offending += [rank for ranks in outside.values() for rank in ranks]
        if bad_groups <= MAX_LISTED:
            places = "; ".join(f"{rank_list(ranks)} in {domain}" for domain, ranks in outside.items())
            lines.append(f"  group {index} is mainly in {main} ({rank_list(members[main])}), but {places}")
    if not bad_groups:
        return
    if bad_groups > MAX_LISTED:
        lines.append(f"  and {bad_groups - MAX_LISTED} more groups")
    size = max(len(group) for group in listed)
    fitting = _largest_fitting(domains, listed)
    message = (
        f"{bad_groups} of {len(listed)} expert groups (EP {size}) cross NVLink domains, where one GPU cannot reach "
        "another's memory:\n" + "\n".join(lines) + "\n"
        f"Remedy: start the ranks so that each run of {size} lies in one domain (Slurm: block topology and "
        f"--segment; `mok-megatron plan` prints the line), or set --expert-model-parallel-size {fitting}, the "
        "largest size that this placement can hold."
    )
    raise TopologyError(message, sorted(offending))


def require_one_domain(group: ProcessGroup | None, domain: Domain | None = None) -> Domain:
    """Check at start-up that the ranks of an expert group share NVLink; a collective over `group`.

    Returns:
        The domain they share.

    Raises:
        TopologyError: on every rank of the group, with global rank numbers.
    """
    import torch.distributed as dist

    domains = gather_domains(group, domain)
    ranks = dist.get_process_group_ranks(group if group is not None else dist.group.WORLD)
    check_expert_groups(dict(zip(ranks, domains, strict=True)), [ranks])
    return domains[0]


def rank_list(ranks: Sequence[int]) -> str:
    """`rank 3`, `ranks 0-63`, `ranks 0-2, 7, 9-10`."""
    runs: list[tuple[int, int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][1] + 1:
            runs[-1] = (runs[-1][0], rank)
        else:
            runs.append((rank, rank))
    text = ", ".join(f"{low}" if low == high else f"{low}-{high}" for low, high in runs)
    return ("rank " if len(ranks) == 1 else "ranks ") + text


def _largest_fitting(domains: Mapping[int, Domain] | Sequence[Domain], groups: list[list[int]]) -> int:
    """Largest divisor of the group size for which consecutive parts of every group lie in one domain."""
    size = max(len(group) for group in groups)
    for part in range(size, 1, -1):
        parts = (group[i : i + part] for group in groups for i in range(0, len(group), part))
        if size % part == 0 and all(len(Counter(domains[rank] for rank in p)) == 1 for p in parts):
            return part
    return 1
