"""Predicted times, memory and traffic against measurements, hand counts and each other."""

import dataclasses
import shutil
import subprocess

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mok_megatron.config import MokConfig
from mok_megatron.configs import load_cluster, load_model
from mok_megatron.ops.schedule import worst_case_capacity
from mok_megatron.plan import parameters
from mok_megatron.plan.memory import (
    Training,
    capacity_rows,
    memory_limit,
    moe_activations,
    ring_rows,
    stage_memory,
    workspace,
)
from mok_megatron.plan.stages import Stage
from mok_megatron.plan.timing import moe_times
from mok_megatron.plan.traffic import step_traffic
from mok_megatron.resources import data_folder
from mok_megatron.topology import ParallelSizes, Placement

CONFIG = MokConfig()
DEEPSEEK_V3 = load_model("deepseek_v3")

# T, H, I, E, K, and the grouped products alone in ms (forward), measured on two H200s at EP 2, bf16.
MEASURED = [
    (4096, 7168, 2048, 8, 4, 2.10),
    (2048, 7168, 2048, 8, 8, 2.03),
    (8192, 4096, 1536, 16, 8, 3.90),
    (4096, 2048, 768, 128, 8, 0.50),
]


def shaped(tokens, hidden, inner, experts, topk, shared=0):
    model = load_model("qwen3_30b_a3b")
    moe = dataclasses.replace(
        model.moe,
        hidden_size=hidden,
        moe_ffn_hidden_size=inner,
        num_experts=experts,
        topk=topk,
        shared_expert_intermediate_size=shared,
        sequence_length=tokens,
    )
    return dataclasses.replace(model, moe=moe)


@pytest.mark.parametrize(("tokens", "hidden", "inner", "experts", "topk", "measured_ms"), MEASURED)
def test_products_agree_with_the_measured_grouped_products(tokens, hidden, inner, experts, topk, measured_ms):
    model, cluster = shaped(tokens, hidden, inner, experts, topk), load_cluster("h200_x2")
    forward, backward = moe_times(model, cluster, 2, tokens, CONFIG, comm_sms=(1, 1))
    # Rates differ by shape (571 to 728 TFLOP/s were seen); the plan has one rate for all.
    assert forward.products * 1e3 == pytest.approx(measured_ms, rel=0.20)
    assert backward.products == pytest.approx(2 * forward.products)


def test_nvlink_bytes_agree_with_the_hand_count():
    """Shape 1 of the design moves 56 GB/s each way for dispatch in 2.1 ms: 117 MB; combine moves as much."""
    model, cluster = shaped(4096, 7168, 2048, 8, 4), load_cluster("h200_x2")
    forward, _ = moe_times(model, cluster, 2, 4096, CONFIG)
    volume = 4096 * 4 * 7168 * 2 / 2
    assert volume / 2.1e-3 / 1e9 == pytest.approx(56, rel=0.01)
    assert forward.nvlink == pytest.approx(
        max(volume * (1 / 333e9 + 1 / 360e9), volume / (forward.comm_sms * 49.9e9)), rel=0.01
    )
    assert 2 <= forward.comm_sms <= 4  # the design's estimate


def test_one_rank_has_no_communication():
    model = shaped(4096, 7168, 2048, 8, 4)
    forward, _ = moe_times(model, load_cluster("h200_x2"), 1, 4096, CONFIG)
    assert forward.nvlink == 0
    assert forward.comm_sms == 1


def test_a_few_communication_sms_bound_the_time():
    model, cluster = load_model("deepseek_v3"), load_cluster("gb300_nvl72")
    totals = [moe_times(model, cluster, 64, 4096, CONFIG, comm_sms=(sms, sms))[0].total for sms in (1, 2, 4, 16, 64)]
    assert totals[0] > totals[1] > totals[2]  # bound by the pull
    assert totals[4] > totals[3]  # bound by the SMs that the products lose
    best = moe_times(model, cluster, 64, 4096, CONFIG)[0]
    assert best.total <= 1.005 * min(totals)


def test_counts_of_deepseek_v3_by_hand():
    model = load_model("deepseek_v3")
    mla = 7168 * (1536 + 512 + 64) + 1536 + 512 + 1536 * 128 * 192 + 512 * 128 * 256 + 128 * 128 * 7168
    assert parameters.attention_parameters(model) == mla
    layer = parameters.moe_layer(model)
    assert layer.experts == 256 * 3 * 7168 * 2048
    assert layer.dense == mla + 3 * 7168 * 2048 + 7168 * 256 + 2 * 7168
    assert parameters.attention_core_flops(model) == 2 * 2048 * 128 * (192 + 128)


def test_states_follow_the_distributed_optimizer():
    """6 bytes a parameter and 12 over the replicas; per GPU, dense over TP and experts over EP."""
    model = load_model("deepseek_v3")
    sizes = ParallelSizes(256, tp=2, ep=64, pp=2)
    stage = stage_memory(model, sizes, 0, Stage(dense=3, moe=29, first=True), Training(recompute="full"), 2)
    counts = parameters.moe_layer(model)
    experts = 29 * counts.experts / 64
    dense = (29 * counts.dense + 3 * parameters.dense_layer(model).dense + parameters.embedding_parameters(model)) / 2
    assert stage.items["expert weights (bf16)"] == pytest.approx(2 * experts)
    assert stage.items["expert gradients (fp32)"] == pytest.approx(4 * experts)
    assert stage.items["expert optimizer state / 2"] == pytest.approx(12 * experts / 2)
    assert stage.items["dense weights (bf16)"] == pytest.approx(2 * dense)
    assert stage.items["dense optimizer state / 64"] == pytest.approx(12 * dense / 64)
    # Full recomputation keeps a layer's input: T x H in bf16.
    assert stage.items["activations of 32 layers x 2 microbatches"] == 32 * 2 * 2048 * 7168 * 2
    fewer = stage_memory(
        model, sizes, 0, Stage(dense=3, moe=29, first=True), Training(recompute="full", bf16_moments=True), 2
    )
    assert stage.total - fewer.total == pytest.approx(4 * experts / 2 + 4 * dense / 64)


def test_recomputation_saves_memory():
    model, sizes = load_model("deepseek_v3"), ParallelSizes(256, ep=64, pp=2)
    totals = [
        stage_memory(model, sizes, 0, Stage(dense=3, moe=29, first=True), Training(recompute=recompute), 2).total
        for recompute in ("none", "moe", "full")
    ]
    assert totals[0] > totals[1] > totals[2]


@pytest.mark.parametrize("macrobatch", [None, 8192])
@pytest.mark.parametrize("ep", [1, 8, 64])
@pytest.mark.parametrize("name", ["deepseek_v3", "qwen3_30b_a3b"])
def test_workspace_is_what_the_kernel_lays_out(name, ep, macrobatch, layout_bytes):
    model, config, tokens = load_model(name), MokConfig(macrobatch_size=macrobatch), 4096
    moe = model.moe
    heap, scratch = layout_bytes(
        ranks=ep,
        max_tokens=tokens,
        hidden=moe.hidden_size,
        intermediate=moe.moe_ffn_hidden_size,
        shared_intermediate=moe.shared_expert_intermediate_size,
        experts_local=moe.num_experts // ep,
        topk=moe.topk,
        capacity_rows=capacity_rows(model, ep, tokens, config),
        ring_rows=ring_rows(model, ep, tokens, config),
        minibatch_rows=config.minibatch_size,
    )
    items = workspace(model, ep, tokens, config)
    symmetric = sum(size for item, size in items.items() if item.startswith("symmetric"))
    assert symmetric == pytest.approx(heap, rel=0.02)
    assert sum(items.values()) - symmetric == pytest.approx(scratch, rel=0.02)


@pytest.fixture(scope="module")
def layout_bytes(tmp_path_factory):
    """Bytes of (symmetric heap, scratch) by kernels/layout.h itself, compiled for the host."""
    compiler = shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        pytest.skip("needs a C++ compiler to read kernels/layout.h")
    fields = (
        "ranks max_tokens hidden intermediate shared_intermediate experts_local topk capacity_rows ring_rows "
        "minibatch_rows"
    )
    folder = tmp_path_factory.mktemp("layout")
    reads = " ".join(f"s.{field} = atoi(argv[{i}]);" for i, field in enumerate(fields.split(), 1))
    (folder / "sizes.cpp").write_text(
        '#include <cstdio>\n#include <cstdlib>\n#include "layout.h"\n'
        "int main(int, char** argv) { MokShape s{}; " + reads + " "
        'printf("%zu %zu", mok::SymmetricLayout(s).bytes, mok::ScratchLayout(s).bytes); }'
    )
    command = [compiler, "-std=c++17", "-I", str(data_folder("kernels")), "sizes.cpp", "-o", "sizes"]
    subprocess.run(command, cwd=folder, check=True, timeout=120)

    def sizes(**values):
        words = [str(values[field]) for field in fields.split()]
        run = subprocess.run([folder / "sizes", *words], capture_output=True, text=True, check=True, timeout=30)
        return tuple(map(int, run.stdout.split()))

    return sizes


@given(ep=st.sampled_from([1, 2, 8, 64]), tokens=st.integers(1, 5000))
def test_capacity_is_what_no_routing_can_exceed(ep, tokens):
    expected = worst_case_capacity(ep, tokens, 8, 256 // ep)
    assert capacity_rows(DEEPSEEK_V3, ep, tokens, CONFIG) == expected


def test_a_layer_keeps_a_macrobatch_and_no_more():
    model, config = load_model("deepseek_v3"), MokConfig(macrobatch_size=8192)
    kept = list(moe_activations(model, 64, 4096, config).values())
    assert kept[:3] == [8192 * 7168 * 2, 8192 * 4096 * 2, 4096 * 4096 * 2]


def placed(sizes, per_domain=64):
    return Placement(load_cluster("gb300_nvl72"), sizes, per_domain)


def traffic_of(sizes, content, recompute="none", microbatches=4):
    items = step_traffic(
        load_model("deepseek_v3"), sizes, placed(sizes), content, Training(recompute=recompute), microbatches
    )
    return {item.name: item for item in items}


def test_expert_traffic_stays_on_nvlink():
    items = traffic_of(ParallelSizes(256, ep=64, pp=2), Stage(moe=10, first=True))
    experts = items["experts: dispatch and combine"]
    crossing = 4096 * 8 * 7168 * 2 * 63 / 64
    assert experts.nvlink == pytest.approx(4 * crossing * 10 * 4)  # 4 a layer: pull and push, forward and backward
    assert experts.network == 0
    again = traffic_of(ParallelSizes(256, ep=64, pp=2), Stage(moe=10, first=True), recompute="full")
    assert again["experts: dispatch and combine"].nvlink == pytest.approx(6 * crossing * 10 * 4)


def test_gradients_cross_the_network_only_between_racks():
    model = load_model("deepseek_v3")
    one = traffic_of(ParallelSizes(64, ep=64), Stage(moe=10))
    assert all(item.network == 0 for item in one.values())
    four = traffic_of(ParallelSizes(256, ep=64), Stage(moe=10))
    experts = 10 * parameters.moe_layer(model).experts / 64
    gradients = four["expert gradients (fp32)"]
    assert gradients.nvlink == 0  # one replica a rack
    assert gradients.network == pytest.approx(4 * experts * 3 / 4)
    dense = 10 * parameters.moe_layer(model).dense
    assert four["dense gradients (fp32)"].nvlink == pytest.approx(4 * dense * 63 / 64)
    assert four["dense gradients (fp32)"].network == pytest.approx(4 * dense / 64 * 3 / 4)


def test_pipeline_traffic_uses_the_link_between_its_stages():
    volume = 4 * 4096 * 7168 * 2
    across = traffic_of(ParallelSizes(128, ep=64, pp=2), Stage(moe=10, first=True))
    assert across["pipeline: hidden states and gradients"].network == volume
    inside = traffic_of(ParallelSizes(64, ep=32, pp=2), Stage(moe=10, first=True))
    assert inside["pipeline: hidden states and gradients"].nvlink == volume
    middle = traffic_of(ParallelSizes(192, ep=64, pp=3), Stage(moe=10))
    assert middle["pipeline: hidden states and gradients"].network == 2 * volume


def test_memory_limit_is_below_the_gpu():
    assert 0.9 * 279e9 < memory_limit(load_cluster("gb300_nvl72")) < 279e9
