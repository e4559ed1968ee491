"""The simulation walks the kernel's list: compared with kernels/scheduler/tile.cuh, compiled for the host.

The composition of the lists in C++ below follows `tile` and `pull_job` of kernels/forward.cuh and kernels/backward.cuh.
Needs a C++ compiler, no GPU.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from itertools import product

import pytest

from mok_megatron.resources import data_folder
from mok_megatron.simulate import order

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
extern "C" void bands(int m, int n, int* out) {
  for (int t = 0; t < m * n; ++t, out += 2) {
    GridTile g = banded_tile(t, m, n);
    out[0] = g.m, out[1] = g.n;
  }
}
extern "C" void pulls(int blocks, int per, int rank, int ranks, int* out) {
  for (int n = 0; n < blocks; ++n) {
    int first = n / per * per;
    out[n] = rotated_block(PhaseTile{0, first, min(per, blocks - first), n - first}, rank, ranks);
  }
}
extern "C" int kind(int of) {
  int const kinds[] = {kFc1, kFc2, kDHidden, kDx, kDw1, kDw2};
  return kinds[of];
}
"""


@pytest.fixture(scope="module")
def kernel(tmp_path_factory):
    compiler = shutil.which("g++") or shutil.which("c++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("needs a C++ compiler (g++, c++ or clang++) on PATH")
    folder = tmp_path_factory.mktemp("order")
    (folder / "order.cpp").write_text(SOURCE)
    flags = ["-std=c++17", "-O1", "-shared", "-fPIC", f"-I{data_folder('kernels')}"]
    command = [compiler, *flags, str(folder / "order.cpp"), "-o", str(folder / "order.so")]
    subprocess.run(command, check=True, timeout=120)
    return ctypes.CDLL(str(folder / "order.so"))


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


def test_bands(kernel):
    for m, n in product((0, 1, 7, 8, 9, 56), (1, 5, 28)):
        assert list(order.banded_tiles(m, n)) == rows_of(kernel.bands, m * n, 2, m, n)


def launch(**changes):
    values = dict(
        tokens=300, hidden=1024, intermediate=640, shared=384, expert_rows=(500, 0, 1, 1300), minibatch_rows=256,
        ring_rows=2304, rank=1, ranks=3, compute_ctas=12,
    )  # fmt: skip
    return order.Launch(**{**values, **changes})


@pytest.mark.parametrize("changes", [{}, {"shared": 0}, {"minibatch_rows": 2304}, {"rank": 2, "compute_ctas": 1}])
def test_the_whole_lists(kernel, changes):
    a = launch(**changes)
    minibatch, ring, blocks, experts = a.minibatch_rows // 128, a.ring_rows // 128, 16, [0] * 4 + [2] + [3] * 11
    tokens = 3 if a.shared else 0

    def rows(first, second, n0, n1, k0, k1, shared_n0, shared_k1, lag):
        for m, n in rows_of(kernel.bands, tokens * shared_n0, 2, tokens, shared_n0):
            yield (first, True, m, n, 0, k0)
        for m, n in rows_of(kernel.bands, tokens * n1, 2, tokens, n1):
            yield (second, True, m, n, 0, shared_k1)
        per = kernel.group(minibatch, ring, n0, a.compute_ctas)
        for phase, b, n in rows_of(kernel.phases, blocks * (n0 + n1), 3, blocks, per, n0, n1, lag, a.rank, a.ranks):
            yield ((second, False, b, n, experts[b], k1) if phase else (first, False, b, n, experts[b], k0))

    def weights(dw1, dw2, expert, stages, shared):
        for kind, (m_tiles, n_tiles) in (("dW1", dw1), ("dW2", dw2)):
            for m, n in rows_of(kernel.bands, m_tiles * n_tiles, 2, m_tiles, n_tiles):
                yield (kind, shared, m, n, expert, stages)

    lag = ring >= 2 * minibatch
    forward = list(rows("FC1", "FC2", 5, 4, 16, 10, 3, 6, lag))
    assert [tuple(t) for t in order.forward_tiles(a)] == forward
    backward = list(rows("dHidden", "dX", 3, 4, 16, 20, 2, 12, True))
    for expert, stages in enumerate((8, 0, 1, 21)):
        backward += weights((10, 4), (8, 3), expert, stages, False)
    if a.shared:
        backward += weights((6, 4), (8, 2), 0, 5, True)
    assert [tuple(t) for t in order.backward_tiles(a)] == backward
    for way, n0 in ((True, 5), (False, 3)):
        per = kernel.group(minibatch, ring, n0, a.compute_ctas)
        assert list(order.pull_blocks(a, way)) == [b for (b,) in rows_of(kernel.pulls, 16, 1, 16, per, a.rank, a.ranks)]


def test_kinds_are_the_kernel_s_in_its_order(kernel):
    assert [kernel.kind(i) for i in range(6)] == list(range(1, 1 + len(order.KINDS)))


def test_pulled_rows_a_job():
    assert [order.pull_rows(h) for h in (512, 1024, 2048, 4096, 7168, 16384)] == [8, 8, 4, 2, 1, 1]
