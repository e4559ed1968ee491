"""Layers on pipeline stages: complete, in order, balanced, and readable for Megatron."""

import itertools
import warnings

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mok_megatron.configs import load_model
from mok_megatron.plan.stages import layer_kinds, layout_string, split_layers

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

COSTS = {"dense": 0.7, "moe": 1.0, "mtp": 1.1}


def best_limit(times: list[float], stages: int, last_cost: float) -> float:
    """Least possible load of the fullest stage, by trying every split."""
    best = float("inf")
    for cuts in itertools.combinations(range(1, len(times)), stages - 1):
        bounds = [0, *cuts, len(times)]
        loads = [sum(times[a:b]) for a, b in itertools.pairwise(bounds)]
        loads[-1] += last_cost
        best = min(best, max(loads))
    return best


@given(
    kinds=st.lists(st.sampled_from(["dense", "moe"]), min_size=1, max_size=9),
    mtp=st.integers(0, 1),
    last_cost=st.sampled_from([0.0, 0.4, 2.5]),
    data=st.data(),
)
def test_the_fullest_stage_is_as_light_as_can_be(kinds, mtp, last_cost, data):
    stages = data.draw(st.integers(1, len(kinds)))
    layers = kinds + ["mtp"] * mtp
    split = split_layers(layers, COSTS, stages, 0.0, last_cost)
    assert [sum(getattr(stage, kind) for stage in split) for kind in ("dense", "moe", "mtp")] == [
        layers.count(kind) for kind in ("dense", "moe", "mtp")
    ]
    loads = [sum(COSTS[kind] * getattr(stage, kind) for kind in COSTS) for stage in split]
    loads[-1] += last_cost
    assert max(loads) == pytest.approx(best_limit([COSTS[kind] for kind in layers], stages, last_cost))
    assert [stage.first for stage in split] == [True] + [False] * (stages - 1)
    assert [stage.last for stage in split] == [False] * (stages - 1) + [True]
    assert all(stage.layers for stage in split)


@pytest.mark.parametrize("name", ["deepseek_v3", "kimi_k2_7_code", "glm_5_2", "qwen3_5_397b_a17b", "tiny"])
@pytest.mark.parametrize("most_stages", [1, 2, 4, 13, 61])
def test_megatron_reads_the_layout(name, most_stages):
    model = load_model(name)
    stages = min(most_stages, model.moe.num_layers)
    split = split_layers(layer_kinds(model), COSTS, stages, 0.0, 2.0)
    text = layout_string(split)
    parsed = PipelineParallelLayerLayout.parse_str_to_list(text)
    assert len(parsed) == stages
    names = [[layer.name for layer in stage] for stage in parsed]
    assert sum(stage.count("decoder") for stage in names) == model.moe.num_layers
    assert sum(stage.count("mtp") for stage in names) == model.model.mtp_layers
    assert names[0][0] == "embedding"
    assert names[-1][-1] == "loss"
    layout = PipelineParallelLayerLayout(text, stages)
    layout.validate_layer_layout(model.moe.num_layers, model.model.mtp_layers)
