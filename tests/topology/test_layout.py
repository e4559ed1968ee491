"""Rank groups against Megatron's own RankGenerator, which needs no processes."""

import warnings

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mok_megatron.errors import MokConfigError
from mok_megatron.topology import ParallelSizes

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from megatron.core.parallel_state import RankGenerator

DENSE_AXES = ("tp", "cp", "dp", "pp", "tp-cp", "tp-pp", "dp-cp", "tp-dp-cp")
EXPERT_AXES = ("ep", "tp", "dp", "pp", "tp-ep", "tp-ep-pp")


def megatron_generators(sizes: ParallelSizes) -> tuple[RankGenerator, RankGenerator]:
    """The two generators that initialize_model_parallel makes."""
    dense = RankGenerator(sizes.tp, 1, sizes.dp, sizes.pp, sizes.cp, sizes.order)
    expert = RankGenerator(sizes.etp, sizes.ep, sizes.edp, sizes.pp, 1, sizes.order)
    return dense, expert


def check_against_megatron(sizes: ParallelSizes) -> None:
    dense, expert = megatron_generators(sizes)
    for axes in DENSE_AXES:
        assert sizes.groups(axes).tolist() == dense.get_ranks(axes), (sizes, axes)
    for axes in EXPERT_AXES:
        assert sizes.expert_groups(axes).tolist() == expert.get_ranks(axes), (sizes, axes)


@pytest.mark.parametrize(
    "sizes",
    [
        ParallelSizes(1),
        ParallelSizes(64, ep=64),
        ParallelSizes(256, ep=64, pp=2),
        ParallelSizes(1152, tp=2, ep=64, pp=9),
        ParallelSizes(2048, tp=2, cp=2, ep=64, pp=16),
        ParallelSizes(4608, tp=4, cp=2, ep=64, pp=4),
        ParallelSizes(4608, ep=64, pp=8),
        ParallelSizes(4608, tp=4, cp=1, ep=64, pp=2, etp=4),
        ParallelSizes(4608, tp=2, ep=8, pp=3, order="tp-cp-ep-pp-dp", etp=2, cp=8),
    ],
    ids=str,
)
def test_equal_to_megatron(sizes):
    check_against_megatron(sizes)


@given(
    tp=st.sampled_from([1, 2, 3, 4]),
    cp=st.sampled_from([1, 2, 3]),
    dp=st.integers(1, 6),
    pp=st.sampled_from([1, 2, 3]),
    data=st.data(),
)
def test_equal_to_megatron_at_random_sizes(tp, cp, dp, pp, data):
    stage = tp * cp * dp
    etp = data.draw(st.sampled_from([d for d in range(1, stage + 1) if stage % d == 0]))
    ep = data.draw(st.sampled_from([d for d in range(1, stage // etp + 1) if stage // etp % d == 0]))
    check_against_megatron(ParallelSizes(stage * pp, tp=tp, cp=cp, ep=ep, pp=pp, etp=etp))


@settings(max_examples=25)
@given(st.permutations(["tp", "cp", "ep", "dp", "pp"]))
def test_equal_to_megatron_in_any_order(tokens):
    check_against_megatron(ParallelSizes(48, tp=2, cp=2, ep=4, pp=3, etp=1, order="-".join(tokens)))


def test_stride_one_means_runs_of_ranks():
    sizes = ParallelSizes(4608, tp=4, ep=64, pp=4)
    assert sizes.expert_stride == 1
    groups = sizes.expert_groups()
    assert groups.shape == (72, 64)
    assert (np.diff(groups, axis=1) == 1).all()
    assert (groups[:, 0] == 64 * np.arange(72)).all()
    spread = ParallelSizes(4608, ep=64, pp=4, etp=2)
    assert spread.expert_stride == 2
    assert (np.diff(spread.expert_groups(), axis=1) == 2).all()


def test_stage_of_agrees_with_the_pipeline_groups():
    sizes = ParallelSizes(96, tp=2, ep=8, pp=3)
    for group in sizes.groups("pp").tolist():
        assert [sizes.stage_of(rank) for rank in group] == [0, 1, 2]


def test_sizes_that_do_not_divide_are_all_named():
    with pytest.raises(MokConfigError) as caught:
        ParallelSizes(100, tp=7, ep=64, pp=3)
    message = str(caught.value)
    assert "TP x CP x PP = 21 does not divide 100 ranks; the nearest numbers of ranks are 84 or 105" in message
    assert "expert TP x EP x PP = 192 does not divide 100 ranks; the nearest numbers of ranks are 192" in message


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"world": 0}, "world is 0"),
        ({"world": 8, "tp": -1}, "tp is -1"),
        ({"world": 8, "order": "tp-ep-dp-pp"}, "not a permutation"),
        ({"world": 8, "order": "tp-cp-ep-pp-dp", "pp": 2, "ep": 2}, "does not end in pp"),
    ],
)
def test_bad_sizes(fields, says):
    with pytest.raises(MokConfigError, match=says):
        ParallelSizes(**fields)
