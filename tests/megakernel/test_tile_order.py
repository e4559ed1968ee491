"""Why the kernel cannot deadlock, checked: tiles wait only for earlier tiles of the list.

Compiles kernels/scheduler/tile.cuh for the host, so that what is checked is what runs. Needs a C++ compiler, no GPU.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from itertools import product

import pytest

from mok_megatron.resources import data_folder

SOURCE = """
#include <algorithm>
using std::max; using std::min;
#define __device__
#define __forceinline__ inline
#include "scheduler/tile.cuh"
extern "C" void phase(int t, int blocks, int per, int n0, int n1, int lag, int rank, int ranks, int* out) {
  mok::PhaseTile p = mok::phase_tile(t, blocks, per, n0, n1, lag);
  out[0] = p.phase, out[1] = mok::rotated_block(p, rank, ranks), out[2] = mok::column_tile(p);
}
extern "C" int group(int minibatch, int ring, int n0, int ctas) { return mok::group_blocks(minibatch, ring, n0, ctas); }
extern "C" void band(int t, int m, int n, int* out) {
  mok::GridTile g = mok::banded_tile(t, m, n);
  out[0] = g.m, out[1] = g.n;
}
"""


@pytest.fixture(scope="module")
def order(tmp_path_factory):
    compiler = shutil.which("g++") or shutil.which("c++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("needs a C++ compiler (g++, c++ or clang++) on PATH")
    folder = tmp_path_factory.mktemp("order")
    (folder / "order.cpp").write_text(SOURCE)
    library = folder / "order.so"
    flags = ["-std=c++17", "-O1", "-shared", "-fPIC", f"-I{data_folder('kernels')}"]
    subprocess.run([compiler, *flags, str(folder / "order.cpp"), "-o", str(library)], check=True, timeout=120)
    return ctypes.CDLL(str(library))


def tiles(order, blocks, per, n0, n1, lag, rank, ranks):
    out = (ctypes.c_int * 3)()
    for t in range(blocks * (n0 + n1)):
        order.phase(t, blocks, per, n0, n1, lag, rank, ranks, out)
        yield tuple(out)


@pytest.mark.parametrize("minibatch,minibatches_in_ring", [(1, 1), (1, 3), (2, 2), (2, 5), (8, 1), (8, 8)])
def test_forward_tiles_wait_only_for_earlier_ones(order, minibatch, minibatches_in_ring):
    ring = minibatch * minibatches_in_ring
    for blocks, n0, n1, ctas, ranks in product((1, 2, 7, 16, 33), (1, 3), (1, 4), (1, 9), (1, 3)):
        per = order.group(minibatch, ring, n0, ctas)
        lag = ring >= 2 * minibatch
        place: dict[tuple[int, int, int], int] = {}
        pulled: dict[int, int] = {}
        for at, tile in enumerate(tiles(order, blocks, per, n0, n1, lag, ranks - 1, ranks)):
            assert tile not in place, "a tile twice"
            place[tile] = at
            phase, block, _ = tile
            if phase == 0:
                pulled.setdefault(block, len(pulled))
                if block >= ring:  # its hidden rows overwrite those that FC2 of block - ring reads
                    assert all((1, block - ring, c) in place for c in range(n1))
            else:
                assert all((0, block, c) in place for c in range(n0))
        assert set(place) == {(p, b, c) for p, n in ((0, n0), (1, n1)) for b in range(blocks) for c in range(n)}
        # A pull into the ring waits for FC1 of what it overwrites, which waits for that block's own pull.
        assert all(pulled[b - ring] < pulled[b] for b in range(ring, blocks))


def test_weight_gradient_tiles_are_all_there_once(order):
    out = (ctypes.c_int * 2)()
    for m, n in product((1, 7, 8, 9, 32), (1, 5, 28)):
        seen = set()
        for t in range(m * n):
            order.band(t, m, n, out)
            seen.add(tuple(out))
        assert seen == set(product(range(m), range(n)))
