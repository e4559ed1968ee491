"""The refusal of expert groups that cross an NVLink domain."""

import datetime

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from mok_megatron.configs import load_cluster
from mok_megatron.topology import (
    Domain,
    ParallelSizes,
    Placement,
    TopologyError,
    check_expert_groups,
    gather_domains,
    require_one_domain,
)
from mok_megatron.topology import domains as domains_module
from mok_megatron.topology.check import rank_list
from mok_megatron.topology.domains import FabricError
from mok_megatron.topology.placement import usable_gpus


def racks(*counts):
    """Domains of consecutive ranks: `counts[i]` ranks in rack i."""
    return [Domain("fabric", f"rack{i}/0") for i, count in enumerate(counts) for _ in range(count)]


def test_groups_inside_racks_pass():
    check_expert_groups(racks(64, 64), ParallelSizes(128, ep=64).expert_groups())
    check_expert_groups(racks(72), ParallelSizes(72, ep=8).expert_groups())
    check_expert_groups(racks(1), [[0]])


def test_a_crossing_group_is_refused_with_its_ranks_and_a_remedy():
    with pytest.raises(TopologyError) as caught:
        check_expert_groups(racks(72, 56), ParallelSizes(128, ep=64).expert_groups())
    message = str(caught.value)
    assert caught.value.offending == list(range(64, 72))
    assert "1 of 2 expert groups (EP 64) cross" in message
    assert (
        "group 1 is mainly in NVLink clique rack1/0 (ranks 72-127), but ranks 64-71 in NVLink clique rack0/0" in message
    )
    assert "--segment" in message
    assert "--expert-model-parallel-size 8" in message


def test_scattered_ranks_leave_no_size_but_one():
    domains = [Domain("host", f"h{rank % 2}", f"h{rank % 2}") for rank in range(8)]
    with pytest.raises(TopologyError, match="--expert-model-parallel-size 1, the largest") as caught:
        check_expert_groups(domains, ParallelSizes(8, ep=4).expert_groups())
    assert caught.value.offending == [1, 3, 5, 7]


def test_many_offenders_are_counted_and_not_all_printed():
    with pytest.raises(TopologyError, match="and 72 more groups") as caught:
        check_expert_groups(
            [Domain("host", f"h{rank}", f"h{rank}") for rank in range(160)], ParallelSizes(160, ep=2).expert_groups()
        )
    assert len(caught.value.offending) == 80
    assert len(str(caught.value).splitlines()) < 15


def test_ranks_may_be_global_numbers_of_one_group():
    domains = {100: Domain("host", "a"), 101: Domain("host", "b")}
    with pytest.raises(TopologyError, match="rank 101 in host b"):
        check_expert_groups(domains, [[100, 101]])


@given(st.lists(st.integers(1, 12), min_size=1, max_size=6), st.sampled_from([1, 2, 3, 4, 6]))
def test_refuses_exactly_the_crossing_groups(counts, ep):
    domains = racks(*counts)
    world = len(domains) // ep * ep
    groups = [list(range(i, i + ep)) for i in range(0, world, ep)]
    crossing = [group for group in groups if len({domains[rank] for rank in group}) > 1]
    if not crossing:
        check_expert_groups(domains, groups)
        return
    with pytest.raises(TopologyError) as caught:
        check_expert_groups(domains, groups)
    assert f"{len(crossing)} of {len(groups)} expert groups" in str(caught.value)
    assert {rank for group in crossing for rank in group} >= set(caught.value.offending)
    for group in crossing:
        assert set(group) & set(caught.value.offending)


@pytest.mark.parametrize(
    ("ranks", "text"),
    [([3], "rank 3"), ([0, 1, 2], "ranks 0-2"), ([9, 0, 1, 7], "ranks 0-1, 7, 9")],
)
def test_rank_list(ranks, text):
    assert rank_list(ranks) == text


@pytest.fixture
def process_group(tmp_path):
    dist.init_process_group(
        "gloo",
        init_method=f"file://{tmp_path}/store",
        rank=0,
        world_size=1,
        timeout=datetime.timedelta(seconds=30),
    )
    yield
    dist.destroy_process_group()


def test_start_up_check_in_a_process_group(process_group):
    here = Domain("host", "here")
    assert gather_domains(domain=here) == [here]
    assert require_one_domain(None, here) == here


def test_a_broken_fabric_is_told_to_all_ranks(process_group, monkeypatch):
    def broken():
        raise FabricError("GPU-7 has not started")

    monkeypatch.setattr(domains_module, "local_domain", broken)
    with pytest.raises(FabricError, match=r"not ready:\n  rank 0: GPU-7 has not started"):
        gather_domains()


@pytest.mark.parametrize("cluster_name", ["gb200_nvl72", "gb300_nvl72"])
def test_ep64_takes_16_of_18_trays(cluster_name):
    cluster = load_cluster(cluster_name)
    assert usable_gpus(cluster, 64) == 64
    placement = Placement(cluster, ParallelSizes(256, ep=64, pp=2), 64)
    assert (placement.domains, placement.nodes, placement.nodes_per_domain, placement.spare_nodes) == (4, 64, 16, 2)
    assert placement.free_nodes == 0
    groups = placement.sizes.expert_groups()
    assert placement.domain_of(groups).tolist() == [[rack] * 64 for rack in range(4)]
    assert sorted(set(placement.node_of(groups[1]).tolist())) == list(range(16))
    assert placement.gpu_of(groups[2]).tolist() == [0, 1, 2, 3] * 16
    check_expert_groups(placement.described_domains(), groups)


@pytest.mark.parametrize(
    ("ep", "tp", "usable"),
    [(1, 1, 72), (2, 1, 72), (8, 4, 72), (16, 1, 64), (32, 2, 64), (48, 1, 48), (64, 4, 64), (72, 1, 72), (128, 1, 0)],
)
def test_usable_gpus_of_a_rack(ep, tp, usable):
    assert usable_gpus(load_cluster("gb300_nvl72"), ep, tp) == usable


def test_usable_gpus_of_one_node():
    cluster = load_cluster("hgx_h200_8gpu")
    assert [usable_gpus(cluster, ep) for ep in (1, 2, 4, 8, 16)] == [8, 8, 8, 8, 0]
