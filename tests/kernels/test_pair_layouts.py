"""Tiles of two CTAs on Blackwell: does everyone mean the same byte? As test_layouts.py does for one CTA.

The leader's descriptors address both CTAs' shared memory, each of which has 128 rows of A and 128 columns of B.
"""

from __future__ import annotations

import numpy as np
import pytest

from tests.kernels.test_layouts import BF16, COLS, MAJORS, MN, ROWS, K, TensorMap, array, read_by_tensor_cores

STAGES = 6


def pair_operand(layouts, majors, b):
    element, element_pointer = array((ROWS, 64, STAGES), np.int32)
    ours, ours_pointer = array((4, STAGES), np.uint64)
    theirs, theirs_pointer = array((4, STAGES), np.uint64)
    layouts.pair_operand(*majors, b, element_pointer, ours_pointer, theirs_pointer)
    return element, ours, theirs


@pytest.mark.parametrize("majors", MAJORS)
@pytest.mark.parametrize("b", [0, 1])
def test_descriptors_are_those_of_cute_and_read_where_the_layout_says(layouts, majors, b):
    element, ours, theirs = pair_operand(layouts, majors, b)
    assert (ours == theirs).all() and len(np.unique(ours)) == ours.size
    for (i, stage), d in np.ndenumerate(ours):
        read = read_by_tensor_cores(d, BF16, 0, majors[b])  # a half of either operand has the extent of a whole A
        assert (read == element[:, i * 16 : (i + 1) * 16, stage]).all(), (i, stage)


@pytest.mark.parametrize("majors", MAJORS)
def test_each_cta_has_its_rows_where_one_cta_has_them(layouts, majors):
    addresses, pointer = array((ROWS, COLS), np.uint32)
    d = layouts.pair_instruction(*majors, pointer)
    assert (addresses == (np.arange(ROWS)[:, None] << 16 | np.arange(COLS))).all(), "a row a lane, a column a word"
    assert (d >> 15 & 1, d >> 16 & 1) == majors
    assert (d >> 17 & 63) << 3 == COLS and (d >> 24 & 31) << 4 == 2 * ROWS
    assert (d >> 4 & 3, d >> 7 & 7, d >> 10 & 7, d >> 13 & 3) == (1, 1, 1, 0), "fp32 += bf16 * bf16"


@pytest.mark.parametrize("b", [0, 1])
@pytest.mark.parametrize("major", [K, MN])
def test_boxes_of_half_an_operand(layouts, b, major):
    """The maps that host/tensor_maps.cu makes when asked for boxes of 128, with what lies beyond the edge."""
    element, _, _ = pair_operand(layouts, (MN, MN) if major == MN else (K, K), b)
    assert (element == element[..., :1] + np.arange(STAGES) * ROWS * 128).all(), "stages behind one another"
    place = element[..., 0] // 2
    extent, k, stacks, stack, k0 = 448, 192, 2, 1, 64
    tensor_map = TensorMap(layouts, 0 if major == K else 2, *((extent, k) if major == K else (k, extent)), ROWS, stacks)
    for first in (0, 128, 384):
        at = (k0, first, 0, stack) if major == K else (0, k0, first // 64, stack)
        stage = tensor_map.load(at)
        assert stage.size == ROWS * 64
        mn, along = first + np.arange(ROWS)[:, None], k0 + np.arange(64)
        number = (stack * extent + mn) * k + along if major == K else (stack * k + along) * extent + mn
        inside = mn < extent if major == K else (mn < extent) & (along < k)
        assert (stage[place] == np.where(inside, number, -1)).all()


def test_memory_fits(layouts):
    assert layouts.constant(b"pair_stages") == STAGES
    assert layouts.constant(b"pair_stage_bytes") == 2 * (ROWS + COLS // 2) * 64 * 2, "of both CTAs"
    assert layouts.constant(b"pair_shared_bytes") == layouts.constant(b"shared_bytes"), "as much as a CTA alone has"
    assert layouts.constant(b"pair_offset_b") % 1024 == 0, "for the swizzle"
