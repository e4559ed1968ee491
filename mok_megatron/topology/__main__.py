"""Check a job's placement before training: ``torchrun ... -m mok_megatron.topology --ep 64``.

Every rank reports its NVLink domain; rank 0 prints which ranks stand where and whether expert groups stay inside one.
Exit status 1 on every rank if a group crosses. Needs no GPU memory and starts no kernel.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from datetime import timedelta

from mok_megatron.errors import MokError
from mok_megatron.topology.check import check_expert_groups, rank_list
from mok_megatron.topology.domains import FABRIC_TIMEOUT_S, Domain, gather_domains
from mok_megatron.topology.layout import MEGATRON_ORDER, ParallelSizes


def summary(domains: Sequence[Domain]) -> str:
    """One line a domain: its ranks, its hosts, and why it is the host where it is."""
    members: dict[Domain, list[int]] = {}
    for rank, domain in enumerate(domains):
        members.setdefault(domain, []).append(rank)
    lines = []
    for domain, ranks in members.items():
        hosts = len({domains[rank].host for rank in ranks})
        reason = f" ({domain.reason})" if domain.reason else ""
        lines.append(f"{domain}: {rank_list(ranks)}, {hosts} host name{'s' * (hosts > 1)}{reason}")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0, or 1 if a group crosses a domain or a fabric is broken."""
    parser = argparse.ArgumentParser(prog="python -m mok_megatron.topology", description=__doc__)
    parser.add_argument("--ep", type=int, required=True, help="expert-model-parallel-size of the training")
    parser.add_argument("--pp", type=int, default=1, help="pipeline-model-parallel-size")
    parser.add_argument("--order", default=MEGATRON_ORDER, help=f"rank order (default {MEGATRON_ORDER})")
    parser.add_argument("--timeout-s", type=float, default=300.0, help="how long to wait for all ranks (default 300)")
    args = parser.parse_args(argv)

    import torch.distributed as dist

    patience = timedelta(seconds=args.timeout_s + FABRIC_TIMEOUT_S)
    dist.init_process_group("gloo", timeout=patience)
    try:
        domains = gather_domains()
        if dist.get_rank() == 0:
            print(summary(domains), flush=True)
        sizes = ParallelSizes(dist.get_world_size(), ep=args.ep, pp=args.pp, order=args.order)
        check_expert_groups(domains, sizes.expert_groups().tolist())
        if dist.get_rank() == 0:
            print(f"all {sizes.world // args.ep} expert groups of {args.ep} ranks lie inside one NVLink domain")
        return 0
    except MokError as error:
        if dist.get_rank() == 0:
            print(error, file=sys.stderr)
        return 1
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
