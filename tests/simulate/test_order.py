"""The simulation walks the kernel's list: compared with the kernel's own sources, compiled for the host.

kernels/scheduler/tile.cuh compiles as it is; kernels/forward.cuh and backward.cuh without what multiplies and stores,
among stand-ins for the few CUDA names that are left. Needs a C++ compiler, no GPU.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections import Counter
from itertools import product

import pytest

from mok_megatron.resources import data_folder
from mok_megatron.simulate import order
from mok_megatron.simulate.engine import sets, waits_for

SOURCE = """
#include <algorithm>
using std::max; using std::min;
#define __device__
#define __forceinline__ inline
#include "scheduler/tile.cuh"
using namespace mok;
extern "C" int group(int minibatch, int ring, int n0, int ctas) { return group_blocks(minibatch, ring, n0, ctas); }
extern "C" void phases(int blocks, int per, int n0, int n1, int lag, int rank, int ranks, int* out) {
  for (int t = 0; t < blocks * (n0 + n1); ++t, out += 3) {
    PhaseTile p = phase_tile(t, blocks, per, n0, n1, lag);
    out[0] = p.phase, out[1] = rotated_block(p, rank, ranks), out[2] = column_tile(p);
  }
}
extern "C" int first(int expert_blocks, int rank, int ranks) { return first_block(expert_blocks, rank, ranks); }
extern "C" void bands(int m, int n, int* out) {
  for (int t = 0; t < m * n; ++t, out += 2) {
    GridTile g = banded_tile(t, m, n);
    out[0] = g.m, out[1] = g.n;
  }
}
"""


def compiled(folder, source):
    compiler = shutil.which("g++") or shutil.which("c++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("needs a C++ compiler (g++, c++ or clang++) on PATH")
    (folder / "order.cpp").write_text(source)
    flags = ["-std=c++17", "-O1", "-shared", "-fPIC", f"-I{folder}", f"-I{data_folder('kernels')}"]
    command = [compiler, *flags, str(folder / "order.cpp"), "-o", str(folder / "order.so")]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    return ctypes.CDLL(str(folder / "order.so"))


@pytest.fixture(scope="module")
def kernel(tmp_path_factory):
    return compiled(tmp_path_factory.mktemp("order"), SOURCE)


def rows_of(function, count, width, *arguments):
    out = (ctypes.c_int * (count * width))()
    function(*arguments, out)
    return [tuple(out[i * width : (i + 1) * width]) for i in range(count)]


def test_groups_of_minibatches(kernel):
    for minibatch, ring, n0, ctas in product((1, 2, 8), (8, 16, 40, 160, 320), (1, 3, 8, 16), (2, 8, 132, 148)):
        assert order.group_blocks(minibatch, ring, n0, ctas) == kernel.group(minibatch, ring, n0, ctas)


def test_phases(kernel):
    for blocks, per, (n0, n1), ranks in product((0, 1, 7, 16, 33), (1, 4, 16, 40), ((1, 0), (3, 4), (16, 28)), (1, 3)):
        for lag, rank in product((False, True), {0, ranks - 1}):
            expected = rows_of(kernel.phases, blocks * (n0 + n1), 3, blocks, per, n0, n1, lag, rank, ranks)
            assert list(order.phase_tiles(blocks, per, n0, n1, lag, rank, ranks)) == expected


def test_the_first_block(kernel):
    for blocks, ranks in product((0, 1, 7, 33), (1, 3, 64)):
        for rank in range(ranks):
            assert order.first_block(blocks, rank, ranks) == kernel.first(blocks, rank, ranks)


def test_a_list_that_begins_elsewhere_has_the_same_groups():
    tiles = list(order.phase_tiles(10, 4, 2, 1, True, 0, 1))
    moved = list(order.phase_tiles(10, 4, 2, 1, True, 0, 1, start=7))
    assert moved == [(phase, (block + 7) % 10, column) for phase, block, column in tiles]


def test_bands(kernel):
    for m, n in product((0, 1, 7, 8, 9, 56), (1, 5, 28)):
        assert list(order.banded_tiles(m, n)) == rows_of(kernel.bands, m * n, 2, m, n)


# What is left of megakernel.cuh and of the CUDA names below the lists.
FRAME = """
#include <algorithm>
#include <cstdint>
using std::max; using std::min;
#define __device__
#define __forceinline__ inline
#include "params.cuh"
#include "scheduler/tile.cuh"
static struct { unsigned x; } gridDim;
struct CUtensorMap {};
struct __nv_bfloat16 {};
using cudaStream_t = void*;
namespace mok {
namespace ptx { inline void add_release_gpu(uint32_t*, uint32_t) {} }
constexpr int kTileRows = 128, kTileCols = 256, kTileK = 64, kProducerRegisters = 0, kConsumerRegisters = 0;
enum class Major { K, MN };
struct ProductCursor {};
struct TileTimes {};
struct Accumulator {};
struct DHiddenOutput {};
struct PullJob {
  char* dst; uint32_t* arrived; int row; uint32_t const* after; uint32_t after_value; int after_flag, after_index;
  char const* own_input; size_t peer_input; __nv_bfloat16* wide;
};
inline int waited[4];  // how often, and the last time: flag, index, value
struct Waiter {
  bool counter(uint32_t const*, uint32_t value, int flag, int index) const {
    ++waited[0], waited[1] = flag, waited[2] = index, waited[3] = int(value);
    return true;
  }
};
inline void tile_pushed(Common const&, Waiter const&, int, bool) {}
struct SharedMemory { int stages, pipeline; Waiter waiter; };
template <Major A, Major B, bool C> bool multiply(Accumulator&, int, int, ProductCursor&, int, int, Waiter const&);
}
"""
LISTS = """
#include "forward.cuh"
#include "backward.cuh"
using namespace mok;
static char scratch[1 << 20];
template <class P> void walk(P const& program, int* tiles, int* pulls) {
  Tile t;
  for (int n = 0; program.tile(n, t); ++n, tiles += 10) {
    for (int& w : waited) w = 0;
    program.ready(t, Waiter());
    bool weight = t.kind == kDw1 || t.kind == kDw2;
    int const out[] = {t.kind, t.shared, weight ? t.row / 128 : t.block, t.col / (t.kind == kFc1 ? 128 : 256), t.expert,
                       t.k_tiles, waited[0], waited[1], waited[2], waited[3]};
    std::copy(out, out + 10, tiles);
  }
  PullJob job;
  for (int n = 0; program.pull_job(n, job); ++n) pulls[n] = job.row / kTileRows;
}
extern "C" void lists(MokShape const* s, int tokens, int ctas, int pull_rows, int* info, int* block_expert,
                      int* offsets, int* rows, int forward, int* tiles, int* pulls) {
  MokSchedule schedule = {};
  schedule.info = info, schedule.block_expert = block_expert;
  schedule.expert_offsets = offsets, schedule.expert_rows = rows;
  Common c{*s, schedule, SymmetricLayout(*s), ScratchLayout(*s), nullptr, scratch, nullptr, 0, 0, nullptr, 0, tokens,
           pull_rows, 0, 0};
  gridDim.x = ctas;
  if (forward) { ForwardParams p{{}, c, {}}; walk(ForwardProgram(p), tiles, pulls); }
  else { BackwardParams p{{}, c, {}}; walk(BackwardProgram(p), tiles, pulls); }
}
"""


def between(text, start, end):
    """`text` without what lies from `start` to before `end`; both must be there once."""
    assert text.count(start) == 1 and end in text.split(start)[1], f"the kernel's source has changed at {start!r}"
    before, after = text.split(start)
    return before + after[after.index(end) :]


@pytest.fixture(scope="module")
def kernel_lists(tmp_path_factory):
    folder, kernels = tmp_path_factory.mktemp("lists"), data_folder("kernels")
    (folder / "epilogue").mkdir()
    for name in ("cuda.h", "epilogue/forward.cuh", "epilogue/backward.cuh"):
        (folder / name).write_text("#pragma once\n")
    (folder / "megakernel.cuh").write_text("#pragma once\n" + FRAME)
    forward = between((kernels / "forward.cuh").read_text(), "  // Multiplies a tile and stores it", " protected:")
    backward = between((kernels / "backward.cuh").read_text(), "// ---- arithmetic", "}  // namespace mok")
    (folder / "backward_pulls.cuh").write_text((kernels / "backward_pulls.cuh").read_text())
    (folder / "forward.cuh").write_text(forward)
    (folder / "backward.cuh").write_text(backward)
    return compiled(folder, LISTS)


def launch(**changes):
    values = dict(
        tokens=300, hidden=1024, intermediate=640, shared=384, expert_rows=(500, 0, 1, 1300), minibatch_rows=256,
        ring_rows=2304, rank=1, ranks=3, compute_ctas=12,
    )  # fmt: skip
    return order.Launch(**{**values, **changes})


@pytest.mark.parametrize("forward", [True, False])
@pytest.mark.parametrize("changes", [{}, {"shared": 0}, {"minibatch_rows": 2304}, {"rank": 2, "compute_ctas": 1}])
def test_the_kernel_s_lists_waits_and_pulls(kernel_lists, changes, forward):
    a = launch(**changes)
    tiles = list(order.forward_tiles(a) if forward else order.backward_tiles(a))
    experts, each = a.expert_blocks, order.pull_rows(a.hidden)
    offsets = [128 * experts.index(e) if e in experts else 0 for e in range(4)]
    offsets[1] = offsets[2]  # without rows
    shape = (
        a.ranks,
        a.rank,
        a.tokens,
        a.hidden,
        a.intermediate,
        a.shared,
        4,
        4,
        4096,
        a.ring_rows,
        a.minibatch_rows,
        0,
    )

    def array(values):
        return (ctypes.c_int * len(values))(*values)

    found, pulls = array([0] * 10 * (len(tiles) + 1)), array([-1] * (len(experts) * 128 // each + 1))
    kernel_lists.lists(
        array(shape), a.tokens, a.compute_ctas, each, array([128 * len(experts), a.tokens, 0]), array(experts),
        array([*offsets, 128 * len(experts)]), array(a.expert_rows), forward, found, pulls,
    )  # fmt: skip
    counts = Counter(flag for tile in tiles for flag in sets(tile))
    expected = []
    for tile in tiles:
        line = [1 + order.KINDS.index(tile.kind), *tile[1:]]
        if flag := waits_for(tile):
            needed = 128 if flag[0] == "rows" else counts[flag]
            line += [1, {"rows": 4, "FC1": 5, "dHidden": 7}[flag[0]], flag[2], needed]
        else:
            line += [0, 0, 0, 0]
        expected.append(line)
    assert [list(found[i * 10 : i * 10 + 10]) for i in range(len(tiles) + 1)] == [*expected, [0] * 10]
    assert list(pulls) == [block for block in order.pull_blocks(a, forward) for _ in range(128 // each)] + [-1]


def test_pulled_rows_a_job():
    assert [order.pull_rows(h) for h in (512, 1024, 2048, 4096, 7168, 16384)] == [8, 8, 4, 2, 1, 1]
