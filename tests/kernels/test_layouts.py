"""Blackwell's tile products, as far as a CPU can tell: does everyone mean the same byte?

Three parties address the same memory. The copy engine writes boxes of the tensor maps that kernels/host/tensor_maps.cu
asks for; the tensor cores read through descriptors and write tensor memory; the consumers copy that to registers. Here
each is modelled from the text of the PTX ISA (the chapter on tcgen05: matrix descriptors, tensor memory, scale factors;
and on tensor copies: swizzling), and what the kernels pass to it comes from the kernels' own types, compiled for the
host (layouts.cu).
"""

from __future__ import annotations

import ctypes
from itertools import product

import numpy as np
import pytest
import torch

from mok_megatron.formats.mxfp8 import quantize_mxfp8

BF16, MXFP8 = 0, 1
K, MN = 0, 1
MAJORS = [(K, K), (K, MN), (MN, MN)]
"""Of the forward, the data gradients and the weight gradients."""
ROWS, COLS = 128, 256
EXTENT = (ROWS, COLS)
STAGES = 4
TILE_K, BYTES, PER_INSTRUCTION = (64, 128), (2, 1), (16, 32)
"""Of bf16 and MXFP8: K of a stage, bytes of an element, K of an instruction."""


def array(shape, dtype):
    out = np.zeros(shape, dtype)
    return out, out.ctypes.data_as(ctypes.c_void_p)


def swizzled(address):
    """SWIZZLE_128B: bits 4 to 6 of the byte address are xored with bits 7 to 9."""
    return address ^ ((address >> 7 & 7) << 4)


def elements(layouts, form, b, major):
    """[extent, K, stage]: the byte where CUTLASS's layout has the element."""
    out, pointer = array((EXTENT[b], TILE_K[form], STAGES), np.int32)
    layouts.operand_elements(form, b, major, pointer)
    return out


def descriptors(layouts, form, majors, b):
    out, pointer = array((TILE_K[form] // PER_INSTRUCTION[form], STAGES), np.uint64)
    layouts.operand_descriptors(form, *majors, b, pointer)
    return out


def read_by_tensor_cores(descriptor, form, b, major):
    """[extent, K of an instruction]: the byte that the tensor cores read for an element of an operand."""
    d, size = int(descriptor), BYTES[form]
    start, leading, stride = ((d >> at & 0x3FFF) << 4 for at in (0, 16, 32))
    assert d >> 46 & 3 == 1, "the version of the descriptor that Blackwell wants"
    assert d >> 61 == 2, "SWIZZLE_128B"
    assert d >> 49 & 7 == 0, "base offset: stages start at multiples of 1024 bytes"
    mn = np.arange(EXTENT[b])[:, None]
    k = np.arange(PER_INSTRUCTION[form])[None, :]
    if major == K:
        at = mn // 8 * stride + mn % 8 * 128 + k * size
    else:
        line = 128 // size
        at = mn // line * leading + k // 8 * stride + k % 8 * 128 + mn % line * size
    return swizzled(start + at)


class TensorMap:
    """What tensor_maps.cu has encoded."""

    def __init__(self, layouts, kind, rows, k, box_rows, stacks):
        out, pointer = array(16, np.uint64)
        assert layouts.tensor_map(kind, rows, k, box_rows, stacks, pointer) == 0
        values = [int(v) for v in out]
        self.dims, self.strides, self.box = values[:4], [2, *values[4:7]], values[7:11]
        self.steps, (self.bits, self.swizzle) = values[11:12], values[12:14]

    def load(self, at):
        """Element of the matrix (its number; -1 beyond the edge) in each element of the stage that a box fills."""
        inner = np.indices(self.box[::-1])[::-1]  # the first dimension runs fastest
        where = [c + i for c, i in zip(at, inner, strict=True)]
        inside = np.logical_and.reduce([(0 <= w) & (w < d) for w, d in zip(where, self.dims, strict=True)])
        number = sum(w * (s // 2) for w, s in zip(where, self.strides, strict=True))
        stage = np.full(inner[0].size, -2)
        stage[swizzled(np.arange(inner[0].size) * 2) // 2] = np.where(inside, number, -1).ravel()
        return stage


def in_stage(layouts, b, major):
    """[extent, K]: the element of a stage of bf16, from its start."""
    at = elements(layouts, BF16, b, major)
    assert (at == at[..., :1] + np.arange(STAGES) * EXTENT[b] * 128).all(), "stages behind one another"
    return at[..., 0] // 2


@pytest.mark.parametrize("form,majors", list(product((BF16, MXFP8), MAJORS)))
def test_tensor_cores_read_where_the_layout_says(layouts, form, majors):
    for b in (0, 1):
        layout = elements(layouts, form, b, majors[b])
        per = PER_INSTRUCTION[form]
        for (i, stage), d in np.ndenumerate(descriptors(layouts, form, majors, b)):
            read = read_by_tensor_cores(d, form, b, majors[b])
            assert (read == layout[:, i * per : (i + 1) * per, stage]).all(), (b, i, stage)


@pytest.mark.parametrize("form,majors", list(product((BF16, MXFP8), MAJORS)))
def test_instructions_are_what_they_should_be(layouts, form, majors):
    mnk, pointer = array(3, np.int32)
    d = layouts.instruction(form, *majors, pointer)
    assert mnk.tolist() == [ROWS, COLS, PER_INSTRUCTION[form]]
    assert (d >> 15 & 1, d >> 16 & 1) == majors
    assert (d >> 17 & 63) << 3 == COLS and (d >> 24 & 31) << 4 == ROWS
    if form == BF16:
        assert (d >> 4 & 3, d >> 7 & 7, d >> 10 & 7) == (1, 1, 1), "fp32 += bf16 * bf16"
    else:
        assert (d >> 7 & 7, d >> 10 & 7, d >> 23 & 1) == (0, 0, 1), "E4M3 * E4M3, scales UE8M0"
    assert d >> 13 & 3 == 0, "nothing is negated"


def test_boxes_of_row_major_operands(layouts):
    """K-major: coordinates (k, row, 0, stack), for A and B, with rows beyond the edge."""
    rows, k, stacks = 300, 192, 3
    for b in (0, 1):
        tensor_map = TensorMap(layouts, 0, rows, k, EXTENT[b], stacks)
        assert tensor_map.swizzle == 3 and tensor_map.bits == 9, "SWIZZLE_128B of bf16"
        place = in_stage(layouts, b, K)
        for k0, row0, stack in ((0, 0, 0), (128, 128, 2), (64, 200, 1)):
            stage = tensor_map.load((k0, row0, 0, stack))
            assert stage.size == EXTENT[b] * 64
            row = row0 + np.arange(EXTENT[b])[:, None]
            wanted = np.where(row < rows, (stack * rows + row) * k + k0 + np.arange(64), -1)
            assert (stage[place] == wanted).all()


def test_boxes_of_gate_and_up(layouts):
    """FC1's weight [stacks, 2, width, K]: 128 gate rows and the up rows of the same hidden columns."""
    width, k, stacks = 320, 128, 2
    tensor_map = TensorMap(layouts, 1, width, k, 0, stacks)
    place = in_stage(layouts, 1, K)
    for k0, col0, stack in ((0, 0, 0), (64, 128, 1), (64, 256, 1)):
        stage = tensor_map.load((k0, col0, 0, stack))
        n = np.arange(COLS)[:, None]
        hidden, half = col0 + n % 128, n // 128
        wanted = np.where(hidden < width, ((stack * 2 + half) * width + hidden) * k + k0 + np.arange(64), -1)
        assert (stage[place] == wanted).all()


def test_boxes_of_operands_that_run_along_rows(layouts):
    """M- or N-major: coordinates (0, k, column / 64, stack); K of a weight gradient runs along rows of a ring."""
    k, cols, stacks = 200, 448, 2
    for b in (0, 1):
        tensor_map = TensorMap(layouts, 2, k, cols, EXTENT[b], stacks)
        place = in_stage(layouts, b, MN)
        for k0, col0, stack in ((0, 0, 0), (128, 192, 1), (64, 320, 0)):
            stage = tensor_map.load((0, k0, col0 // 64, stack))
            col, row = col0 + np.arange(EXTENT[b])[:, None], k0 + np.arange(64)
            wanted = np.where((col < cols) & (row < k), (stack * k + row) * cols + col, -1)
            assert (stage[place] == wanted).all()


def test_accumulators_come_from_where_the_products_write(layouts):
    written, pointer = array((ROWS, COLS), np.uint32)
    got = [array((256, 128), t) for t in (np.uint32, np.uint32, np.int32, np.int32)]
    layouts.accumulator_elements(*(p for _, p in got))
    loaded, stored, row, col = (a for a, _ in got)
    for form in (BF16, MXFP8):
        layouts.accumulator_addresses(form, pointer)
        assert (written == (np.arange(ROWS)[:, None] << 16 | np.arange(COLS))).all(), "a row a lane, a column a word"
        assert (loaded == written[row, col]).all()
    assert (loaded == stored).all(), "what is put back is found where it was"
    assert len(np.unique(loaded)) == ROWS * COLS, "every element once"
    # A warp reaches the 32 lanes of its number modulo 4; the consumers are warps 4 to 11.
    warp = 4 + np.arange(256)[:, None] // 32
    assert ((loaded >> 16) // 32 == warp % 4).all()
    # Epilogues take the four threads of a quad for one row, and elements 4j .. 4j + 3 for two rows and eight columns.
    thread, i = np.indices((256, 128))
    assert (row == row[:, :1] + i // 2 % 2 * 8).all() and (row[:, 0] == row[::4, 0].repeat(4)).all()
    assert (col == i // 4 * 8 + thread % 4 * 2 + i % 2).all()


def test_memory_fits(layouts):
    constant = {
        n: layouts.constant(n.encode()) for n in ("stages", "accumulators", "mx_accumulators", "tile_k", "mx_tile_k")
    }
    assert constant == {"stages": STAGES, "accumulators": 2, "mx_accumulators": 1, "tile_k": 64, "mx_tile_k": 128}
    assert 2 * COLS == 512, "columns of tensor memory"
    assert COLS + layouts.constant(b"mx_scale_columns") <= 512
    assert layouts.constant(b"offset_b") % 1024 == layouts.constant(b"mx_offset_b") % 1024 == 0, "for the swizzle"
    ring = 8 * 4096  # of the warp that pulls rows
    assert layouts.constant(b"shared_bytes") + ring <= 227 * 1024
    assert layouts.constant(b"mx_stage_bytes") == 48 * 1024 + 512 + 1024
    assert layouts.constant(b"mx_shared_bytes") == STAGES * layouts.constant(b"mx_stage_bytes")


# ---- MXFP8


def stage_scales(layouts, b):
    """[extent, K]: byte of a value's scale in a stage's shared memory, and in tensor memory where products read it."""
    shared, shared_pointer = array((EXTENT[b], 128), np.int32)
    read, read_pointer = array((EXTENT[b], 128), np.int64)
    layouts.stage_scales(b, shared_pointer, read_pointer)
    return shared, read


def copied_to_tensor_memory(stage):
    """Byte of tensor memory -> byte, as tcgen05.cp.32x128b.warpx4 copies blocks of 32 x 16 bytes, four columns each."""
    at = np.arange(stage.size)
    lane, column, byte = at % 512 // 16, at // 512 * 4 + at % 16 // 4, at % 4
    memory = {}
    for quarter in range(4):  # the copy repeats the 32 lanes for every warp
        memory |= dict(zip((4 * ((lane + 32 * quarter) << 16 | column) + byte).tolist(), stage.tolist(), strict=True))
    return memory


def stored_scales(layouts, rows, k):
    """[rows, K]: byte of a value's scale in global memory, by CUTLASS and by us."""
    theirs, theirs_pointer = array((rows, k), np.int32)
    ours, ours_pointer = array((rows, k), np.int32)
    layouts.scale_bytes(rows, k, theirs_pointer, ours_pointer)
    return theirs, ours


def test_scales_lie_where_cutlass_has_them(layouts):
    for rows, k in ((128, 128), (256, 512), (384, 256)):
        theirs, ours = stored_scales(layouts, rows, k)
        assert (theirs == ours).all()
        assert len(np.unique(ours)) == rows * k // 32 and ours.max() == rows * k // 32 - 1


@pytest.mark.parametrize("axis", [-1, -2])
@pytest.mark.parametrize("b", [0, 1])
def test_quantised_operands_come_back(layouts, b, axis):
    """From the reference's quantiser through our layouts to what the tensor cores see of one stage, and back."""
    rows, k, k_tile = 2 * EXTENT[b], 384, 1
    shape = (rows, k) if axis == -1 else (k, rows)
    x = torch.randn(shape, generator=torch.Generator().manual_seed(b)) * torch.logspace(-6, 6, shape[1])
    quantised = quantize_mxfp8(x.bfloat16(), axis)
    turn = (lambda t: t) if axis == -1 else (lambda t: t.T)
    values = turn(quantised.values.view(torch.uint8).numpy())  # [rows, k]
    scales = turn(quantised.scales.view(torch.uint8).numpy())  # [rows, k / 32]
    row0 = EXTENT[b]

    # Stored once: scales in blocks of 512 bytes.
    theirs, ours = stored_scales(layouts, rows, k)
    stored = np.zeros(rows * k // 32, np.uint8)
    stored[ours[:, ::32]] = scales
    assert (stored[theirs] == scales.repeat(32, axis=1)).all()

    # Loaded: values by a box of 128 bytes a line, scales a block of 128 rows at a time.
    major = K if axis == -1 else MN
    tile = values[row0 : row0 + EXTENT[b], 128 * k_tile : 128 * (k_tile + 1)]
    lines = tile if major == K else np.concatenate([tile[i : i + 128].T for i in range(0, EXTENT[b], 128)])
    memory = np.zeros(STAGES * EXTENT[b] * 128, np.uint8)
    stage = 2
    memory[stage * EXTENT[b] * 128 + swizzled(np.arange(EXTENT[b] * 128))] = np.ascontiguousarray(lines).ravel()
    blocks = [(row0 // 128 + i) * (k // 128) + k_tile for i in range(EXTENT[b] // 128)]
    shared = np.concatenate([stored[512 * block : 512 * (block + 1)] for block in blocks])

    # Read: values through descriptors, scales through tensor memory.
    majors = (K, major) if b else (major, MN if major == MN else K)
    parts = [
        memory[read_by_tensor_cores(descriptor, MXFP8, b, major)]
        for descriptor in descriptors(layouts, MXFP8, majors if majors in MAJORS else (MN, MN), b)[:, stage]
    ]
    seen = np.concatenate(parts, axis=1)
    in_shared, read = stage_scales(layouts, b)
    tensor_memory = copied_to_tensor_memory(shared)
    scale = np.vectorize(tensor_memory.__getitem__)(read)
    assert (scale == shared[in_shared]).all()

    bits = torch.from_numpy(np.ascontiguousarray(seen)).view(torch.float8_e4m3fn).float()
    found = bits * torch.from_numpy(scale.astype(np.uint8)).view(torch.float8_e8m0fnu).float()
    wanted = turn(quantised.dequantize())[row0 : row0 + EXTENT[b], 128 * k_tile : 128 * (k_tile + 1)]
    assert torch.equal(found, wanted)
