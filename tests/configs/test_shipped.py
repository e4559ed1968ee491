"""Every shipped model and cluster description: it loads, its figures agree, and Megatron knows its flags."""

import argparse
import dataclasses
import warnings

import pytest

from mok_megatron.configs import ClusterConfig, ModelConfig, cluster_names, load_cluster, load_model, model_names
from mok_megatron.plan.parameters import moe_layer, total_parameters

# (experts, hidden, intermediate, top-k): what the project's issue and report state.
STATED = {
    "deepseek_v3": (256, 7168, 2048, 8),
    "kimi_k2_7_code": (384, 7168, 2048, 8),
    "glm_5_2": (256, 6144, 2048, 8),
    "qwen3_5_397b_a17b": (512, 4096, 1024, 10),
    "deepseek_v4_pro": (384, 7168, 3072, 6),
    "qwen3_30b_a3b": (128, 2048, 768, 8),
}
ACTIVE_BILLION = {
    "deepseek_v3": 37,
    "kimi_k2_7_code": 32,
    "glm_5_2": 40,
    "qwen3_5_397b_a17b": 17,
    "deepseek_v4_pro": 49,
}


def test_what_ships():
    assert set(model_names()) == {*STATED, "tiny"}
    assert set(cluster_names()) == {"gb200_nvl72", "gb300_nvl72", "hgx_h200_8gpu", "hgx_b200_8gpu", "h200_x2"}


@pytest.mark.parametrize("name", sorted(STATED))
def test_stated_shapes(name):
    moe = load_model(name).moe
    assert (moe.num_experts, moe.hidden_size, moe.moe_ffn_hidden_size, moe.topk) == STATED[name]


@pytest.mark.parametrize("name", sorted(STATED))
def test_counted_parameters_agree_with_the_published_number(name):
    model = load_model(name)
    published = model.model.published_parameters_billion
    assert published is not None
    counted = total_parameters(model) / 1e9
    assert counted == pytest.approx(published, rel=0.02)


@pytest.mark.parametrize("name", sorted(ACTIVE_BILLION))
def test_counted_active_parameters_agree_with_the_published_number(name):
    model = load_model(name)
    active = model.moe.num_moe_layers * moe_layer(model).active / 1e9
    assert active == pytest.approx(ACTIVE_BILLION[name], rel=0.1)


@pytest.mark.parametrize("name", model_names())
def test_megatron_flags_say_the_same_as_the_shape(name):
    model = load_model(name)
    moe, flags = model.moe, model.megatron_flags
    pattern = flags["moe-layer-freq"]
    layers = eval(pattern, {}) if isinstance(pattern, str) else [1] * moe.num_layers  # Megatron evaluates it too
    assert layers == [0] * moe.first_dense_layers + [1] * moe.num_moe_layers
    said = {
        "num-layers": moe.num_layers,
        "hidden-size": moe.hidden_size,
        "num-experts": moe.num_experts,
        "moe-ffn-hidden-size": moe.moe_ffn_hidden_size,
        "moe-router-topk": moe.topk,
        "seq-length": moe.sequence_length,
        "num-attention-heads": model.attention.num_heads,
        "moe-token-dispatcher-type": "mok",
    }
    assert {flag: flags[flag] for flag in said} == said
    assert flags.get("moe-shared-expert-intermediate-size", 0) == moe.shared_expert_intermediate_size
    assert flags.get("moe-shared-expert-gate", False) == moe.shared_expert_gate
    assert flags.get("mtp-num-layers", 0) == model.model.mtp_layers
    if model.attention.kind == "mla":
        a = model.attention
        latent = ("q-lora-rank", "kv-lora-rank", "qk-head-dim", "qk-pos-emb-head-dim", "v-head-dim")
        sizes = (a.q_lora_rank, a.kv_lora_rank, a.qk_nope_head_dim, a.qk_rope_head_dim, a.v_head_dim)
        assert tuple(flags[flag] for flag in latent) == sizes


@pytest.fixture(scope="module")
def megatron_parser():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from megatron.training.arguments import add_megatron_arguments
    parser = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False, exit_on_error=False))
    for action in parser._actions:
        if "--moe-token-dispatcher-type" in action.option_strings:
            action.choices = [*action.choices, "mok"]  # what the plugin's registration adds
    return parser


@pytest.mark.parametrize("name", model_names())
def test_megatron_accepts_every_flag(name, megatron_parser):
    model = load_model(name)
    args = megatron_parser.parse_args(model.megatron_arguments())
    name_of = {option: action.dest for action in megatron_parser._actions for option in action.option_strings}
    for flag, value in model.megatron_flags.items():
        if isinstance(value, int | float) and not isinstance(value, bool):
            assert getattr(args, name_of[f"--{flag}"]) in (value, [value])


@pytest.mark.parametrize("name", model_names())
def test_every_model_figure_has_a_source(name):
    check_sources(load_model(name))


@pytest.mark.parametrize("name", cluster_names())
def test_every_cluster_figure_has_a_source(name):
    check_sources(load_cluster(name))


def check_sources(config: ModelConfig | ClusterConfig) -> None:
    sections = {f.name for f in dataclasses.fields(config)} - {"title", "name", "notes", "sources"}
    assert sections <= set(config.sources)
    assert all(len(text) >= 8 for text in config.sources.values())


def test_nvl72_is_one_domain_of_18_trays_of_4():
    for name in ("gb200_nvl72", "gb300_nvl72"):
        cluster = load_cluster(name)
        assert (cluster.domain.nodes, cluster.node.gpus, cluster.domain_gpus) == (18, 4, 72)


def test_measured_rates_are_those_of_the_two_h200s():
    cluster = load_cluster("h200_x2")
    assert cluster.rates.measured
    assert cluster.nvlink.bandwidth * cluster.rates.nvlink_pull == pytest.approx(335, rel=0.01)
    assert cluster.nvlink.bandwidth * cluster.rates.nvlink_push == pytest.approx(363, rel=0.01)
    assert cluster.gpu.bf16_tflops * cluster.rates.bf16_product == pytest.approx(687, rel=0.01)
    assert cluster.gpu.memory_bandwidth * cluster.rates.memory == pytest.approx(4200, rel=0.01)
    for row, measured in ((14336, 50.0), (4096, 21.5)):  # GB/s of one CTA with 4 streams
        seconds = cluster.rates.pull_sm_latency_ns * 1e-9 + row / (cluster.rates.pull_sm_bandwidth * 1e9)
        assert row / seconds / 1e9 == pytest.approx(measured, rel=0.03)
