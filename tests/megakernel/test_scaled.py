"""What the kernels get for each format: its number, and the weights; needs no GPU and no compiler."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest
import torch

from mok_megatron.config import MokConfig
from mok_megatron.formats import quantize_mxfp8
from mok_megatron.megakernel import steps
from mok_megatron.megakernel.binding import FORMATS, format_number
from mok_megatron.megakernel.scaled import mx_weights, scaled_weights, weights_in_format
from mok_megatron.resources import data_folder

NUMBERS = {
    name: int(number)
    for name, number in re.findall(r"MOK_FORMAT_(\w+) = (\d)", (data_folder("kernels") / "mok_api.h").read_text())
}


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({}, "BF16"),
        ({"format": "blockwise"}, "FP8_BLOCK"),
        ({"format": "mxfp8"}, "MXFP8"),
        ({"format": "mxfp8", "fp8_gradients": "e5m2"}, "MXFP8_E5M2"),
    ],
)
def test_a_format_has_the_number_of_the_header(settings, name):
    assert format_number(MokConfig(**settings)) == NUMBERS[name]
    assert sorted(FORMATS.values()) == sorted(NUMBERS.values())


@pytest.fixture
def weights():
    generator = torch.Generator().manual_seed(1)
    # Magnitudes that differ along both dimensions, so that the two ways of cutting blocks give other numbers.
    sizes = torch.logspace(-3, 3, 64)
    return [
        torch.nn.Parameter((torch.randn(2, *shape, generator=generator) * sizes[: shape[1]]).bfloat16())
        for shape in ((128, 64), (64, 64))
    ]


def test_weights_in_mxfp8_have_blocks_along_the_sums_of_each_product(weights):
    found = mx_weights(*weights)
    for weight, along_row, along_column in zip(weights, found[:2], found[2:], strict=True):
        for expert in range(2):
            matrix = weight[expert].detach()
            assert torch.equal(along_row[expert], quantize_mxfp8(matrix).dequantize(torch.bfloat16))
            of_transposed = quantize_mxfp8(matrix.T.contiguous()).dequantize(torch.bfloat16)
            assert torch.equal(along_column[expert], of_transposed.T)
        assert not torch.equal(along_row, along_column)


def test_each_field_gets_its_weight(weights):
    found = mx_weights(*weights)
    struct = steps._scaled(SimpleNamespace(scaled=tuple(found)))
    for name, value in found._asdict().items():
        assert getattr(struct, name) == value.data_ptr(), name
    assert struct.w1_scale is None and struct.w2_t_scale is None


def test_only_the_formats_that_need_them_have_other_weights(weights):
    assert weights_in_format("bf16", *weights) == ()
    assert weights_in_format("mxfp8", *weights)._fields == ("w1", "w2", "w1_t", "w2_t")
    blocks = [
        torch.nn.Parameter(torch.randn(2, 256, 128).bfloat16()),
        torch.nn.Parameter(torch.randn(2, 128, 128).bfloat16()),
    ]
    assert type(weights_in_format("blockwise", *blocks)) is type(scaled_weights(*blocks))
