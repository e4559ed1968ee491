"""MXFP8: against the scalar definition, and the properties that the definition promises."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mok_megatron.formats import quantize_mxfp8
from tests.formats.scalar import E4M3, codes, matrices, mxfp8_block, mxfp8_scale_byte

roundings = st.sampled_from(("up", "floor"))
ALL_BF16 = torch.arange(0x7F80, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
"""Every finite bf16 number that is not negative, subnormals included."""


def test_every_bf16_number_as_a_block_maximum_gets_the_scale_of_the_definition() -> None:
    blocks = ALL_BF16[:, None].expand(-1, 32)
    for rounding in ("up", "floor"):
        expected = [mxfp8_scale_byte(amax, rounding) for amax in ALL_BF16.tolist()]
        assert codes(quantize_mxfp8(blocks, scale_rounding=rounding).scales).flatten().tolist() == expected


def test_rounding_up_is_what_transformer_engine_computes() -> None:
    """There: amax * fp32(1 / 448) in fp32, then the power of two at or above it, not below 2^-127."""
    edges = np.float32(448) * np.exp2(np.arange(-110, 119, dtype=np.float32))
    amax = np.concatenate(
        (ALL_BF16.float().numpy(), edges, np.nextafter(edges, np.float32(0)), np.nextafter(edges, np.float32(np.inf)))
    )
    product = (amax * np.float32(1 / 448)).astype(np.float64)
    fraction, exponent = np.frexp(product)
    expected = np.where(product <= 2.0**-127, 0, exponent + 127 - (fraction == 0.5))
    actual = quantize_mxfp8(torch.from_numpy(amax)[:, None].expand(-1, 32)).scales
    assert codes(actual).flatten().tolist() == expected.tolist()


def test_values_round_to_nearest_even_at_every_midpoint() -> None:
    """With 448 in the block the scale is 1; then each midpoint of two E4M3 values, and its fp32 neighbours."""
    low, high = np.array(E4M3[:-1], dtype=np.float32), np.array(E4M3[1:], dtype=np.float32)
    middle = (low + high) / 2
    sides = (np.nextafter(middle, low), middle, np.nextafter(middle, high))
    even = [code + code % 2 for code in range(126)]
    for numbers, expected in zip(sides, (list(range(126)), even, list(range(1, 127))), strict=True):
        for sign, offset in ((1, 0), (-1, 128)):
            x = torch.full((126, 32), 448.0)
            x[:, 5] = torch.from_numpy(sign * numbers)
            quantized = quantize_mxfp8(x)
            assert (codes(quantized.scales) == 127).all()
            assert codes(quantized.values)[:, 5].tolist() == [code + offset for code in expected]


@settings(max_examples=40)
@given(matrices(4, 96), roundings)
def test_rows_match_the_scalar_definition(x: torch.Tensor, rounding: str) -> None:
    quantized = quantize_mxfp8(x, scale_rounding=rounding)
    for row in range(4):
        for block in range(3):
            columns = slice(32 * block, 32 * block + 32)
            byte, expected = mxfp8_block(x[row, columns].tolist(), rounding)
            assert codes(quantized.scales)[row, block].item() == byte
            assert codes(quantized.values)[row, columns].tolist() == expected


@settings(max_examples=40)
@given(matrices(64, 96), roundings)
def test_columns_are_the_rows_of_the_transpose(x: torch.Tensor, rounding: str) -> None:
    columnwise = quantize_mxfp8(x, axis=-2, scale_rounding=rounding)
    rowwise = quantize_mxfp8(x.mT.contiguous(), axis=-1, scale_rounding=rounding)
    assert columnwise.scales.shape == (2, 96)
    assert columnwise.transposed().axis == -1
    assert torch.equal(codes(columnwise.transposed().values), codes(rowwise.values))
    assert torch.equal(codes(columnwise.transposed().scales), codes(rowwise.scales))


def test_rows_and_columns_are_different_roundings() -> None:
    """Why a column-wise copy is made from the source: one outlier in a row costs the rest of it their small bits."""
    x = torch.full((32, 32), 2.0**-12)
    x[0, 0] = 448.0
    assert quantize_mxfp8(x, axis=-1).dequantize()[0, 1] == 0
    assert quantize_mxfp8(x, axis=-2).dequantize()[0, 1] == 2.0**-12


@settings(max_examples=40)
@given(matrices(4, 64), roundings)
def test_error_of_each_element_is_bounded(x: torch.Tensor, rounding: str) -> None:
    """Half a step: 2^-4 of a normal value, 2^-10 of the scale below; what "floor" saturates loses at most 1/8."""
    quantized = quantize_mxfp8(x, scale_rounding=rounding)
    scale = quantized.scales.float().double().repeat_interleave(32, dim=1)
    source = x.double()
    error = (source - quantized.values.double() * scale).abs()
    bound = torch.maximum(source.abs() / 16, scale / 1024)
    saturated = source.abs() > 448 * scale
    if rounding == "up":
        assert not saturated.any()
    assert (error <= torch.where(saturated, source.abs() / 8, bound)).all()


@settings(max_examples=40)
@given(matrices(4, 64, (torch.bfloat16, torch.float32)), roundings)
def test_quantising_again_changes_nothing(x: torch.Tensor, rounding: str) -> None:
    once = quantize_mxfp8(x.clamp(-1e38, 1e38), scale_rounding=rounding).dequantize()
    again = quantize_mxfp8(once, scale_rounding=rounding).dequantize()
    assert torch.equal(once.view(torch.int32), again.view(torch.int32))


@settings(max_examples=40)
@given(matrices(4, 64, (torch.float16,)), st.integers(-60, 60), roundings)
def test_a_power_of_two_moves_the_scale_and_nothing_else(x: torch.Tensor, exponent: int, rounding: str) -> None:
    x = x.float().masked_fill(x.float().abs().reshape(4, 2, 32).amax(-1).repeat_interleave(32, 1) == 0, 1.0)
    before, after = (quantize_mxfp8(y, scale_rounding=rounding) for y in (x, x * 2.0**exponent))
    assert torch.equal(codes(before.values), codes(after.values))
    assert torch.equal(codes(before.scales).int() + exponent, codes(after.scales).int())


@settings(max_examples=40)
@given(matrices(2, 64, (torch.bfloat16, torch.float16)))
def test_bf16_holds_the_dequantised_numbers_exactly(x: torch.Tensor) -> None:
    """What the expansion of tiles to bf16 on Hopper rests on; for scales from 2^-110, far from bf16's subnormals."""
    quantized = quantize_mxfp8(x.float().clamp(-1e38, 1e38).masked_fill(x.float().abs() < 1e-30, 0.0))
    assert torch.equal(quantized.dequantize(torch.bfloat16).float(), quantized.dequantize())


@settings(max_examples=40)
@given(matrices(2, 96), st.sampled_from((torch.nan, -torch.nan, torch.inf, -torch.inf)), st.integers(0, 31), roundings)
def test_inf_or_nan_makes_its_block_nan_and_no_other(x: torch.Tensor, bad: float, column: int, rounding: str) -> None:
    spoilt = x.clone()
    spoilt[1, 32 + column] = bad
    quantized, clean = (quantize_mxfp8(y, scale_rounding=rounding) for y in (spoilt, x))
    block = torch.zeros(2, 96, dtype=torch.bool)
    block[1, 32:64] = True
    assert (codes(quantized.values)[block] == 0x7F).all()
    assert torch.equal(codes(quantized.values)[~block], codes(clean.values)[~block])
    assert codes(quantized.scales)[1, 1] == 255
    assert (codes(quantized.scales) == 255).sum() == 1
    assert torch.equal(quantized.dequantize().isnan(), block)


def test_a_block_of_zeros_keeps_its_signs() -> None:
    quantized = quantize_mxfp8(torch.tensor([[0.0, -0.0] * 16]))
    assert codes(quantized.scales).tolist() == [[0]]
    assert codes(quantized.values).tolist() == [[0x00, 0x80] * 16]
    assert torch.equal(quantized.dequantize().signbit(), torch.tensor([[False, True] * 16]))


@pytest.mark.parametrize(
    ("number", "expected"),
    [
        (2.0**-126, 2.0**-126),  # the smallest normal fp32 number
        (2.0**-130, 2.0**-130),  # subnormal in fp32
        (2.0**-136, 2.0**-136),  # the smallest number of the format
        (2.0**-137, 0.0),  # a tie, to even
        (3 * 2.0**-138, 2.0**-136),
        (2.0**-149, 0.0),  # the smallest fp32 number
    ],
)
def test_blocks_of_subnormals(number: float, expected: float) -> None:
    quantized = quantize_mxfp8(torch.full((1, 32), number))
    assert (codes(quantized.scales) == 0).all()
    assert (quantized.dequantize() == expected).all()


def test_the_end_of_the_range() -> None:
    """bf16's largest number rounds up to 2^128 under "up", which fp32 cannot hold; under "floor" it saturates."""
    x = torch.full((1, 32), torch.finfo(torch.bfloat16).max, dtype=torch.bfloat16)
    assert (quantize_mxfp8(x).dequantize() == torch.inf).all()
    assert (quantize_mxfp8(x, scale_rounding="floor").dequantize() == 448 * 2.0**119).all()
    assert (quantize_mxfp8(torch.full((1, 32), 247 * 2.0**120)).dequantize() == 240 * 2.0**120).all()


def test_floor_saturates_where_up_does_not() -> None:
    x = torch.tensor([[511.0] + [1.0] * 31])
    assert quantize_mxfp8(x, scale_rounding="floor").dequantize()[0, 0] == 448
    assert quantize_mxfp8(x, scale_rounding="up").dequantize()[0, 0] == 512


@settings(max_examples=20)
@given(matrices(6, 64))
def test_a_batch_is_quantised_matrix_by_matrix(x: torch.Tensor) -> None:
    batch = quantize_mxfp8(x.reshape(3, 2, 64))
    assert batch.scales.shape == (3, 2, 2)
    assert torch.equal(codes(batch.values).reshape(6, 64), codes(quantize_mxfp8(x).values))
