"""The kernels' MXFP8 against its definition, to the bit, without a GPU: formats/mxfp8.cuh compiled for the host."""

from __future__ import annotations

import ctypes
import shutil

import pytest
import torch

from mok_megatron.formats import E4M3, E5M2, quantize_mxfp8
from tests.kernels.conftest import HERE, nvcc

EVERY = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
"""Every bf16 number, NaNs and Infs and subnormals included."""


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    if shutil.which("g++") is None and shutil.which("c++") is None:
        pytest.skip("needs a C++ compiler for nvcc")
    library = tmp_path_factory.mktemp("mxfp8") / "mxfp8.so"
    nvcc(HERE / "mxfp8_values.cu", library, "90a", "-shared")
    return ctypes.CDLL(str(library))


def largest_of_a_block(seed):
    """[65536, 32]: every number as the largest of a block of random ones, down to 2^-20 of it; NaN and Inf alone."""
    generator = torch.Generator().manual_seed(seed)
    below = torch.rand(1 << 16, 31, generator=generator) * torch.exp2(
        -torch.randint(0, 21, (1 << 16, 31), generator=generator).float()
    )
    others = (EVERY.float()[:, None] * below).nan_to_num(posinf=1.0).bfloat16()
    others[0] = -0.0
    return torch.cat([EVERY[:, None], others], dim=1)


def anything(seed):
    """[4096, 32]: blocks of random bits."""
    bits = torch.randint(-(1 << 15), 1 << 15, (4096, 32), generator=torch.Generator().manual_seed(seed))
    return bits.to(torch.int16).view(torch.bfloat16)


@pytest.mark.parametrize("element", [E4M3, E5M2], ids=lambda element: element.name)
@pytest.mark.parametrize("blocks", [largest_of_a_block(0), anything(1)], ids=["largest", "anything"])
def test_kernels_round_as_the_definition(kernels, blocks, element):
    values = torch.empty(blocks.shape, dtype=torch.uint8)
    scales = torch.empty(len(blocks), dtype=torch.uint8)
    back = torch.empty_like(blocks)
    pointers = [ctypes.c_void_p(t.data_ptr()) for t in (blocks, values, scales, back)]
    kernels.mx_blocks(len(blocks), int(element is E5M2), *pointers)
    wanted = quantize_mxfp8(blocks, element=element)
    assert torch.equal(scales, wanted.scales.view(torch.uint8).flatten())
    assert torch.equal(values, wanted.values.view(torch.uint8))

    exact = wanted.dequantize(torch.float32)
    nan = exact.isnan()
    assert torch.equal(back.isnan(), nan)
    assert torch.equal(back[~nan].float(), exact[~nan]), "bf16 has every number that MXFP8 makes of bf16 numbers"
    assert torch.equal(back[~nan].signbit(), exact[~nan].signbit())


def test_the_blocks_are_not_all_easy():
    """What the test above must have met."""
    blocks = largest_of_a_block(0)
    quantised = quantize_mxfp8(blocks)
    scales, exact = quantised.scales.view(torch.uint8), quantised.dequantize()
    assert set(scales.flatten().tolist()) == {*range(248), 255}
    assert ((exact != 0) & (exact.abs() < 2.0**-126)).any(), "subnormal in bf16"
    assert exact[blocks.isfinite().all(1)].isinf().any(), "rounded to 2^128"
