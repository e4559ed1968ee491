"""Block scales: against the scalar definition, and the properties that the definition promises."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mok_megatron.formats import BlockScaled, quantize_1x128, quantize_128x128
from tests.formats.scalar import blockwise_block, codes, matrices

kinds = st.sampled_from(("power_of_two", "fp32"))


def same(a: BlockScaled, b: BlockScaled) -> bool:
    """Equal to the bit."""
    scales = (x.scales.contiguous().view(torch.int32) for x in (a, b))
    return a.axis == b.axis and torch.equal(codes(a.values), codes(b.values)) and torch.equal(*scales)


@settings(max_examples=40)
@given(matrices(2, 256), kinds)
def test_rows_match_the_scalar_definition(x: torch.Tensor, kind: str) -> None:
    quantized = quantize_1x128(x, scale=kind)
    for row in range(2):
        for block in range(2):
            columns = slice(128 * block, 128 * block + 128)
            scale, expected = blockwise_block(x[row, columns].tolist(), torch.finfo(x.dtype).max, kind)
            assert quantized.scales[row, block].item() == float(scale)
            assert codes(quantized.values)[row, columns].tolist() == expected


@settings(max_examples=4)
@given(matrices(128, 256), kinds)
def test_square_blocks_match_the_scalar_definition(x: torch.Tensor, kind: str) -> None:
    quantized = quantize_128x128(x, scale=kind)
    assert quantized.scales.shape == (1, 2)
    for block in range(2):
        columns = slice(128 * block, 128 * block + 128)
        scale, expected = blockwise_block(x[:, columns].flatten().tolist(), torch.finfo(x.dtype).max, kind)
        assert quantized.scales[0, block].item() == float(scale)
        assert codes(quantized.values)[:, columns].flatten().tolist() == expected


@settings(max_examples=30)
@given(matrices(128, 256), kinds)
def test_transposition(x: torch.Tensor, kind: str) -> None:
    """Columns are the rows of the transpose; a square block serves both orientations."""
    flipped = x.mT.contiguous()
    assert same(quantize_1x128(x, axis=-2, scale=kind).transposed(), quantize_1x128(flipped, scale=kind))
    assert same(quantize_128x128(x, scale=kind).transposed(), quantize_128x128(flipped, scale=kind))


@settings(max_examples=40)
@given(matrices(4, 128))
def test_powers_of_two_are_powers_of_two_and_nothing_saturates(x: torch.Tensor) -> None:
    quantized = quantize_1x128(x, scale="power_of_two")
    mantissas = torch.frexp(quantized.scales.double()).mantissa
    assert (mantissas == 0.5).all()
    assert (x.double().abs() <= 448 * quantized.scales.double()).all()
    amax = x.double().abs().amax(-1, keepdim=True)
    # Not more than one octave is given away, unless the multiplier is at the end of its range.
    assert ((amax > 224 * quantized.scales.double()) | (amax < 448 * 2.0**-127) | (amax == 0)).all()


@settings(max_examples=40)
@given(matrices(4, 128), kinds)
def test_error_of_each_element_is_bounded(x: torch.Tensor, kind: str) -> None:
    """Half an E4M3 step as for MXFP8; fp32 scales add three roundings of 2^-24, and that of a subnormal scale."""
    quantized = quantize_1x128(x, scale=kind)
    scale = quantized.scales.double()
    error = (x.double() - quantized.values.double() * scale).abs()
    slack = x.double().abs() * 2.0**-21 + 448 * 2.0**-149 if kind == "fp32" else 0
    assert (error <= torch.maximum(x.double().abs() / 16, scale / 1024) + slack).all()


@settings(max_examples=40)
@given(matrices(4, 128, (torch.bfloat16, torch.float32)))
def test_quantising_again_changes_nothing_with_powers_of_two(x: torch.Tensor) -> None:
    once = quantize_1x128(x.clamp(-1e38, 1e38)).dequantize()
    assert torch.equal(once, quantize_1x128(once).dequantize())


@settings(max_examples=40)
@given(matrices(4, 128, (torch.float16,)))
def test_quantising_again_keeps_the_values_with_fp32_scales(x: torch.Tensor) -> None:
    """The scale may move by a few units in the last place; the E4M3 values may not."""
    once = quantize_1x128(x, scale="fp32")
    again = quantize_1x128(once.dequantize(), scale="fp32")
    assert torch.equal(codes(once.values), codes(again.values))
    torch.testing.assert_close(once.scales, again.scales, rtol=2.0**-21, atol=0)


@settings(max_examples=40)
@given(matrices(2, 256), st.sampled_from((torch.nan, torch.inf, -torch.inf)), st.integers(0, 127), kinds)
def test_inf_or_nan_makes_its_block_nan_and_no_other(x: torch.Tensor, bad: float, column: int, kind: str) -> None:
    spoilt = x.clone()
    spoilt[1, column] = bad
    quantized, clean = (quantize_1x128(y, scale=kind) for y in (spoilt, x))
    block = torch.zeros(2, 256, dtype=torch.bool)
    block[1, :128] = True
    assert (codes(quantized.values)[block] == 0x7F).all()
    assert torch.equal(codes(quantized.values)[~block], codes(clean.values)[~block])
    assert quantized.scales.isnan().tolist() == [[False, False], [True, False]]
    assert torch.equal(quantized.dequantize().isnan(), block | clean.dequantize().isnan())


def test_every_nan_scale_has_the_same_bits() -> None:
    x = torch.zeros(2, 128)
    x[0, 0], x[1, 0] = torch.inf, -torch.nan
    assert quantize_1x128(x).scales.view(torch.int32).tolist() == [[0x7FC00000]] * 2


def test_zeros_keep_their_sign_and_scale_one() -> None:
    quantized = quantize_1x128(torch.tensor([[0.0, -0.0] * 64]))
    assert quantized.scales.item() == 1.0
    assert codes(quantized.values).tolist() == [[0x00, 0x80] * 64]


def test_known_scales() -> None:
    """amax 448 and its neighbours; amax 1: 448 is cut to 256 as a multiplier."""
    for amax, power_of_two, fp32 in (
        (448.0, 1.0, 1.0),
        (449.0, 2.0, 449 / 448),
        (1.0, 2.0**-8, 1 / 448),
        (0.875, 2.0**-9, 1 / 512),
    ):
        x = torch.full((1, 128), amax)
        assert quantize_1x128(x).scales.item() == power_of_two
        assert math.isclose(quantize_1x128(x, scale="fp32").scales.item(), fp32, rel_tol=2.0**-22)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_blocks_too_small_for_their_multiplier(dtype: torch.dtype) -> None:
    """448 / amax beyond fp32: the multiplier is the largest number of the source's dtype, or the power below it."""
    x = torch.full((1, 128), 2.0**-126, dtype=dtype)
    powers = quantize_1x128(x)
    assert powers.scales.item() == 2.0**-127
    assert (powers.dequantize() == 2.0**-126).all()
    limit = torch.finfo(dtype).max
    assert quantize_1x128(x, scale="fp32").scales.item() == pytest.approx(1 / limit, rel=1e-6, abs=0)
    assert (quantize_1x128(torch.full_like(x, 2.0**-133)).values.float() == 2.0**-6).all()
