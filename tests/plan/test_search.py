"""Plans at many sizes: they divide, fit and agree with Megatron; what cannot work is refused with what can."""

import json
import re
import time
import warnings

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mok_megatron.config import MokConfig
from mok_megatron.configs import cluster_names, load_cluster, load_model, model_names
from mok_megatron.plan.memory import memory_limit
from mok_megatron.plan.placed import expert_groups, group_proof
from mok_megatron.plan.report import as_dictionary, text_report
from mok_megatron.plan.request import PlanError, Request
from mok_megatron.plan.search import make_plan
from mok_megatron.topology import check_expert_groups

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from megatron.core.parallel_state import RankGenerator


MODELS = {name: load_model(name) for name in model_names()}
CLUSTERS = {name: load_cluster(name) for name in cluster_names()}


def plan_of(model, cluster, **fields):
    return make_plan(Request(MODELS[model], CLUSTERS[cluster], **fields))


def check_plan(plan):
    """What must hold of every plan."""
    sizes, placement, request = plan.sizes, plan.placement, plan.request
    assert plan.worst.total <= memory_limit(request.cluster)
    assert request.model.moe.num_experts % sizes.ep == 0
    assert plan.global_batch == plan.microbatches * sizes.dp * plan.training.micro_batch
    assert sum(stage.layers for stage in plan.stages) == request.model.moe.num_layers + request.model.model.mtp_layers
    assert placement.nodes_per_domain <= request.cluster.domain.nodes
    expert = RankGenerator(1, sizes.ep, sizes.edp, sizes.pp, 1, sizes.order)
    groups = expert.get_ranks("ep")
    check_expert_groups(placement.described_domains(), groups)
    placed = expert_groups(plan)
    assert [(group.first, group.last) for group in placed] == [(ranks[0], ranks[-1]) for ranks in groups]
    assert all(ranks == list(range(ranks[0], ranks[0] + sizes.ep)) for ranks in groups)
    stages = {rank: stage for pipe in expert.get_ranks("pp") for stage, rank in enumerate(pipe)}
    assert all(group.stage == stages[group.first] for group in placed)
    dense = RankGenerator(sizes.tp, 1, sizes.dp, sizes.pp, sizes.cp, sizes.order)
    node = request.cluster.node.gpus
    assert all(ranks[0] // node == ranks[-1] // node for ranks in dense.get_ranks("tp"))  # TP stays in a node


def test_the_headline():
    """EP 64 on 16 of the 18 trays of each rack, two racks a pipeline stage."""
    plan = plan_of("deepseek_v3", "gb300_nvl72", domains=4)
    check_plan(plan)
    assert (plan.sizes.world, plan.sizes.ep, plan.placement.per_domain) == (256, 64, 64)
    assert (plan.placement.nodes_per_domain, plan.placement.spare_nodes) == (16, 2)
    assert [group.domain for group in expert_groups(plan)] == [0, 1, 2, 3]
    assert "expert stride 1" in group_proof(plan)
    assert plan.alternatives
    assert plan.larger_ep == []


@pytest.mark.parametrize(
    ("model", "cluster", "gpus"),
    [
        ("deepseek_v3", "gb300_nvl72", 4608),
        ("deepseek_v3", "gb200_nvl72", 1024),
        ("deepseek_v3", "hgx_h200_8gpu", 2048),
        ("deepseek_v3", "hgx_b200_8gpu", 512),
        ("kimi_k2_7_code", "gb300_nvl72", 512),
        ("glm_5_2", "gb300_nvl72", 384),
        ("qwen3_5_397b_a17b", "gb200_nvl72", 96),
        ("deepseek_v4_pro", "gb300_nvl72", 1024),
        ("qwen3_30b_a3b", "hgx_h200_8gpu", 8),
        ("tiny", "h200_x2", 1),
        ("tiny", "h200_x2", 2),
        ("tiny", "gb300_nvl72", 3),
    ],
)
def test_plans_hold_together(model, cluster, gpus):
    plan = plan_of(model, cluster, gpus=gpus)
    assert plan.sizes.world == gpus
    check_plan(plan)


@settings(max_examples=25)
@given(
    model=st.sampled_from(model_names()),
    cluster=st.sampled_from(cluster_names()),
    gpus=st.integers(1, 600),
    ep=st.sampled_from([None, 1, 8, 64, 72]),
    pp=st.sampled_from([None, 1, 3, 8]),
)
def test_any_request_gives_a_plan_or_a_named_refusal(model, cluster, gpus, ep, pp):
    try:
        plan = plan_of(model, cluster, gpus=gpus, ep=ep, pp=pp)
    except PlanError as error:
        assert re.search(r"\n  1\. .+; .+", str(error))
    else:
        assert plan.sizes.world == gpus
        check_plan(plan)
        assert plan.request.model.title in text_report(plan)
        assert json.loads(json.dumps(as_dictionary(plan)))["gpus"] == gpus


def test_ten_thousand_gpus_in_seconds():
    start = time.process_time()
    plan = plan_of("deepseek_v3", "gb300_nvl72", gpus=10000)
    assert time.process_time() - start < 5
    assert plan.sizes.ep == 16  # 64 does not divide 10,000
    assert plan.larger_ep == [32, 64]
    check_expert_groups(plan.placement.described_domains(), plan.sizes.expert_groups().tolist())


def test_the_plan_is_the_fastest_within_the_tolerance():
    plan = plan_of("deepseek_v3", "gb300_nvl72", domains=4)
    fastest = min(other.seconds_per_sequence for other in plan.alternatives)
    assert plan.seconds_per_sequence <= 1.05 * fastest
    chosen = plan.sizes.tp * plan.sizes.cp
    for other in plan.alternatives:
        if other.sizes.tp * other.sizes.cp < chosen:
            assert other.seconds_per_sequence > 1.05 * fastest


def test_given_sizes_are_kept():
    plan = plan_of("deepseek_v3", "gb300_nvl72", domains=4, tp=2, cp=2, ep=32, pp=4, recompute="full", comm_sms=(7, 9))
    sizes = plan.sizes
    assert (sizes.tp, sizes.cp, sizes.ep, sizes.pp, plan.training.recompute) == (2, 2, 32, 4, "full")
    assert (plan.times.moe_forward.comm_sms, plan.times.moe_backward.comm_sms) == (7, 9)


def test_a_smaller_macrobatch_needs_less_memory():
    fields = {"domains": 4, "tp": 1, "cp": 1, "ep": 64, "pp": 4, "recompute": "none"}
    default = plan_of("deepseek_v3", "gb300_nvl72", **fields)
    small = plan_of("deepseek_v3", "gb300_nvl72", **fields, config=MokConfig(macrobatch_size=16384))
    assert small.worst.total < default.worst.total


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({}, "neither --gpus nor --racks is given; give one"),
        ({"gpus": 64, "domains": 1}, "both given"),
        ({"gpus": 0}, "--gpus is 0; give at least 1"),
        ({"gpus": 62}, "not a whole number of trays of 4 GPUs; the nearest that are: 60 or 64"),
        ({"domains": 4, "ep": 72}, "--ep 72 does not divide the 256 experts.*the nearest sizes that work: 16, 32, 64"),
        ({"domains": 4, "ep": 128}, "--ep 128 does not fit whole trays.*72 GPUs"),
        ({"gpus": 1000, "ep": 64}, "--ep 64 does not divide --gpus 1000; the nearest numbers of GPUs are 960 or 1024"),
        ({"domains": 4, "tp": 8}, "--tp 8 must divide.*sizes that work: 1, 2, 4"),
        ({"domains": 4, "cp": 3}, "--cp 3: the sequence of 4096 tokens"),
        ({"domains": 4, "pp": 62}, "--pp 62 is more than the 61 layers"),
        ({"domains": 4, "recompute": "some"}, "--recompute 'some' is unknown"),
        ({"domains": 4, "comm_sms": (148, None)}, "--mok-fwd-comm-sms 148 leaves none of the 148 SMs"),
        (
            {"domains": 4, "global_batch": 1001},
            "not a multiple of DP x micro-batch = .*the nearest that work: 960 or 1024",
        ),
        ({"gpus": 4}, r"memory: DeepSeek-V3 on 4 GPUs.*needs at least \d+ GB.*the nearest size that works: --gpus \d+"),
        ({"domains": 4, "ep": 64, "pp": 3}, "divide the number of GPUs; the nearest size that works: --racks 6"),
    ],
)
def test_refusals_name_the_constraint_and_what_works(fields, says):
    with pytest.raises(PlanError, match=f"(?s){says}"):
        plan_of("deepseek_v3", "gb300_nvl72", **fields)


def test_all_problems_are_in_one_message():
    with pytest.raises(PlanError) as caught:
        plan_of("deepseek_v3", "gb300_nvl72", domains=4, tp=3, cp=5, ep=80, pp=99)
    assert len(str(caught.value).splitlines()) == 6


def test_the_size_that_a_refusal_names_does_work():
    with pytest.raises(PlanError) as caught:
        plan_of("qwen3_30b_a3b", "hgx_h200_8gpu", gpus=1)
    nearest = re.search(r"nearest size that works: --gpus (\d+)", str(caught.value))
    assert nearest
    check_plan(plan_of("qwen3_30b_a3b", "hgx_h200_8gpu", gpus=int(nearest.group(1))))


def test_a_single_host_refuses_more_gpus_than_it_has():
    with pytest.raises(PlanError, match="3 GPUs are more than Two NVIDIA H200s over NVLink has; plan for at most 2"):
        plan_of("tiny", "h200_x2", gpus=3)
