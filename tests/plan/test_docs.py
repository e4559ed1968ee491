"""docs/nvl72.md shows what the command prints today."""

import re
from pathlib import Path

import pytest

from mok_megatron.config import MokConfig
from mok_megatron.configs import load_cluster, load_model
from mok_megatron.plan.launch import job_script, topology_conf
from mok_megatron.plan.report import text_report
from mok_megatron.plan.request import Request
from mok_megatron.plan.search import make_plan
from mok_megatron.plan.timing import moe_times

DOCUMENT = Path(__file__).parents[2] / "docs" / "nvl72.md"
MODELS = ("deepseek_v3", "kimi_k2_7_code", "glm_5_2", "qwen3_5_397b_a17b", "deepseek_v4_pro")


@pytest.fixture(scope="module")
def text():
    return DOCUMENT.read_text()


def test_the_plan_in_the_document_is_the_command_s(text):
    plan = make_plan(Request(load_model("deepseek_v3"), load_cluster("gb300_nvl72"), domains=4))
    shown = re.search(r"<!-- plan -->\n```\n(.*?)\n```\n", text, re.DOTALL)
    assert shown
    assert text_report(plan).startswith(shown.group(1))
    assert job_script(plan) in text
    assert topology_conf(plan) in text


def test_the_layer_times_in_the_document_are_the_model_s(text):
    cluster = load_cluster("gb300_nvl72")
    for name in MODELS:
        model = load_model(name)
        forward, backward = moe_times(model, cluster, 64, 4096, MokConfig())
        milliseconds = [forward.total, forward.products, forward.nvlink, forward.exposed]
        cells = [f"{value * 1e3:.2f}" for value in milliseconds] + [str(forward.comm_sms)]
        cells += [f"{value * 1e3:.2f}" for value in (backward.total, backward.products, backward.exposed)]
        row = [model.title, str(model.moe.num_experts // 64), *cells, str(backward.comm_sms)]
        assert "| " + " | ".join(row) + " |" in text
