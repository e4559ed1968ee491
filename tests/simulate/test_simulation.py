"""The model of one launch: small cases worked out by hand, its rules, and the layer times that were measured."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from mok_megatron.config import MokConfig
from mok_megatron.configs import load_cluster
from mok_megatron.errors import MokConfigError
from mok_megatron.simulate.engine import Engine, sets, waits_for
from mok_megatron.simulate.layer import LayerShape, expert_rows, make_launch, run_launch, simulate
from mok_megatron.simulate.order import KINDS, Tile, backward_tiles, forward_tiles
from mok_megatron.simulate.rates import FIRST_PULL, MEMORY_BYTES, PULL_PIECE, PULL_PIECES, TILE_BYTES, kernel_rates

DOCUMENT = Path(__file__).parents[2] / "docs" / "nvl72.md"
RECORD = DOCUMENT.parent / "results" / "layer_2xh200_ep2.json"
H200 = load_cluster("h200_x2")
SMALL = LayerShape(512, 1024, 512, 8, 4, shared=256)


def measured():
    for result in json.loads(RECORD.read_text())["results"]:
        shape = LayerShape(**result["shape"])
        times = next(entry["times"] for entry in result["implementations"] if entry["name"] == "mok")
        for direction in ("forward", "backward"):
            yield pytest.param(shape, direction, times[direction], id=f"H{shape.hidden}-K{shape.topk}-{direction}")


@pytest.mark.parametrize("shape,direction,milliseconds", list(measured()))
def test_measured_layer_times_within_a_tenth_and_as_documented(shape, direction, milliseconds):
    times = simulate(shape, H200, 2, MokConfig(), direction == "forward")
    simulated = times.total / 1e3
    assert simulated == pytest.approx(milliseconds, rel=0.1)
    name = f"{shape.tokens}, {shape.hidden}, {shape.intermediate}, {shape.experts}, {shape.topk}"
    difference = f"{100 * (simulated / milliseconds - 1):+.1f} %"
    assert f"| {name} | {direction} | {simulated:.2f} | {milliseconds:.2f} | {difference} |" in DOCUMENT.read_text()
    assert 0 < times.exposed < times.total
    assert times.limit < times.total


def one_cta(tiles, **changes):
    """Round rates: 1 us a stage, epilogues of 10, 1000 bytes a us over NVLink, 500 a CTA, everything remote."""
    rates = kernel_rates(H200, 2)
    rates = replace(
        rates, stage=dict.fromkeys(KINDS, 1.0), tile_start=0.0, epilogue=dict.fromkeys(KINDS, 10.0), memory=1e9,
        main_grad=1e9, pull=1000.0, push=TILE_BYTES / 50, remote=1.0,
    )  # fmt: skip
    rates = replace(rates, **changes)
    return Engine(tiles, [0], rates, ctas=1, pullers=1, pull_rate=500.0, pull_rows=128, row_bytes=1000)


FC1 = Tile("FC1", False, 0, 0, 0, 16)
FC2 = Tile("FC2", False, 0, 0, 0, 20)
PULLED = 256 + PULL_PIECES * PULL_PIECE / 500
"""128 rows of 1000 bytes at the CTA's 500 bytes a us, and until they are counted."""


def test_a_case_worked_out_by_hand():
    # FC1: 16 + 10; FC2 is taken early, and waits for FC1's epilogue: 20; 50 for the push.
    outcome = one_cta([FC1, FC2]).run()
    assert outcome.end == pytest.approx(PULLED + 26 + 20 + 50)
    assert outcome.products == 36
    assert outcome.epilogues == pytest.approx(60)
    assert outcome.link_busy == pytest.approx(128 + 50)
    assert outcome.first_tile == pytest.approx(PULLED)
    assert outcome.waits == pytest.approx(PULLED)


def test_rows_that_come_late_are_waited_for_between_tiles():
    late = FC1._replace(block=1)
    engine = Engine([FC1, late], [0, 1], one_cta([]).rates, 1, 1, 500.0, 128, 1000)
    # The second block's job goes to the warp that will multiply, which has no tile yet, at 20 GB/s and then the link's.
    assert engine.run().row_waits == pytest.approx(0)
    slow = replace(one_cta([]).rates, pull=200.0)  # each block 640 us on the link, one after the other
    engine = Engine([FC1, late], [0, 1], slow, 1, 1, 500.0, 128, 1000)
    delays = PULL_PIECES * PULL_PIECE * (1 / FIRST_PULL - 1 / 500.0)
    assert engine.run().row_waits == pytest.approx(640 + delays - 26)


def test_rows_wait_for_the_link_where_that_is_slower():
    assert one_cta([FC1], pull=100.0).run().end == pytest.approx(1280 + PULLED - 256 + 26)


def test_without_communication_nothing_waits_for_rows():
    outcome = one_cta([FC1, FC2], remote=0.0, free_communication=True).run()
    assert outcome.end == pytest.approx(26 + 20 + 10) and outcome.first_tile == 0


def test_an_epilogue_that_overlaps_runs_beside_the_next_product():
    tiles = [FC1, FC1._replace(column=1), FC1._replace(column=2)]
    assert one_cta(tiles, free_communication=True).run().end == pytest.approx(3 * 26)
    assert one_cta(tiles, free_communication=True, overlap=True).run().end == pytest.approx(3 * 16 + 10)
    # Two accumulators: a product waits for the epilogue of the one before the last.
    slow = dict.fromkeys(KINDS, 40.0)
    assert one_cta(tiles, free_communication=True, overlap=True, epilogue=slow).run().end == pytest.approx(16 + 3 * 40)


def test_epilogues_share_memory():
    tiles = [FC1, FC1._replace(column=1)]
    memory = MEMORY_BYTES["FC1"] / 100
    assert one_cta(tiles, free_communication=True, memory=memory).run().end == pytest.approx(2 * 116)


def test_a_list_that_waits_for_a_later_tile_is_found():
    with pytest.raises(RuntimeError, match=r"2 tiles never ran; waiting for .*FC1"):
        one_cta([FC2, FC1]).run()


@pytest.mark.parametrize("forward", [True, False])
@pytest.mark.parametrize("shape", [SMALL, replace(SMALL, shared=0)])
def test_every_tile_runs_once_and_after_what_it_waits_for(shape, forward):
    launch = make_launch(shape, H200, 2, MokConfig(macrobatch_size=4096), 0)
    tiles = list(forward_tiles(launch) if forward else backward_tiles(launch))
    finished = run_launch(launch, kernel_rates(H200, 2), forward, 0).finished
    assert len(set(tiles)) == len(tiles)
    assert sorted(finished) == sorted(tiles)
    last = {flag: i for i, tile in enumerate(finished) for flag in sets(tile)}
    for i, tile in enumerate(finished):
        flag = waits_for(tile)
        assert flag is None or flag[0] == "rows" or last[flag] < i


def test_faster_links_never_take_longer():
    slow = simulate(SMALL, H200, 2, MokConfig(macrobatch_size=4096), True)
    cluster = replace(H200, nvlink=replace(H200.nvlink, bandwidth=900.0))
    fast = simulate(SMALL, cluster, 2, MokConfig(macrobatch_size=4096), True)
    assert fast.total < slow.total
    assert fast.link == pytest.approx(slow.link / 2)


def test_alone_nothing_crosses_the_link():
    assert simulate(SMALL, H200, 1, MokConfig(macrobatch_size=8192), True).link == 0


def test_few_communication_ctas_are_slower_as_measured():
    # docs/kernel.md: 2.8 ms with 4 communication CTAs in the first shape, 2.0 in the last.
    first = simulate(LayerShape(4096, 7168, 2048, 8, 4), H200, 2, MokConfig(fwd_comm_sms=4), True)
    last = simulate(LayerShape(4096, 2048, 768, 128, 8), H200, 2, MokConfig(fwd_comm_sms=4), True)
    assert first.total / 1e3 == pytest.approx(2.8, rel=0.25)
    assert last.total / 1e3 == pytest.approx(2.0, rel=0.1)


def test_routing_is_balanced_up_to_chance():
    rows = expert_rows(LayerShape(4096, 7168, 2048, 256, 8), 64)
    assert rows.shape == (64, 4)
    assert rows.sum() == pytest.approx(64 * 4096 * 8, rel=1e-4)
    assert rows.std() == pytest.approx((64 * 4096 * 8 / 256) ** 0.5, rel=0.15)


def test_refusals_list_everything():
    with pytest.raises(MokConfigError) as refused:
        simulate(LayerShape(512, 1000, 512, 9, 12), H200, 4, MokConfig(), True)
    text = str(refused.value)
    for part in ("1000, no multiple of 64", "12 exceeds 9", "--ep 4; the nearest number", "exceeds the 2 GPUs"):
        assert part in text
    with pytest.raises(MokConfigError, match="give --mok-macrobatch-size 8192"):
        simulate(LayerShape(64, 1024, 512, 128, 8), H200, 2, MokConfig(), True)
