"""The container, and what is refused: every problem in one message, each with a remedy."""

from collections.abc import Callable

import pytest
import torch

from mok_megatron.errors import MokInputError
from mok_megatron.formats import BlockScaled, quantize_1x128, quantize_128x128, quantize_mxfp8
from mok_megatron.formats.tensor import E4M3, E5M2, to_fp8
from tests.formats.scalar import codes


def test_all_problems_and_remedies_in_one_message() -> None:
    with pytest.raises(MokInputError) as refused:
        quantize_128x128(torch.zeros(100, 200, dtype=torch.float64))
    message = str(refused.value)
    for part in ("float64", "100 rows", "pad it with zeros to 128", "200 columns", "pad it with zeros to 256"):
        assert part in message


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (lambda: quantize_mxfp8(torch.zeros(4, 48)), r"48 columns .* block's 32; pad it with zeros to 64"),
        (lambda: quantize_mxfp8(torch.zeros(48, 64), axis=-2), r"48 rows .* block's 32; pad it with zeros to 64"),
        (lambda: quantize_1x128(torch.zeros(4, 64)), r"64 columns .* block's 128; pad it with zeros to 128"),
        (lambda: quantize_mxfp8(torch.zeros(32)), r"1 dimensions; pass a matrix"),
        (lambda: quantize_mxfp8(torch.zeros(32, 32, dtype=torch.int32)), r"torch.int32; convert it"),
        (lambda: quantize_mxfp8(torch.zeros(32, 32), axis=0), r"axis is 0; pass -1 .* -2"),
        (lambda: quantize_mxfp8(torch.zeros(32, 32), axis="both"), r"no square blocks, pass -1"),
        (lambda: quantize_1x128(torch.zeros(128, 128), axis="both"), r"call quantize_128x128"),
        (lambda: quantize_mxfp8(torch.zeros(32, 32), scale_rounding="even"), r"'even'; pass 'up' or 'floor'"),
        (lambda: quantize_1x128(torch.zeros(1, 128), scale="e8m0"), r"'e8m0'; pass 'power_of_two' or 'fp32'"),
    ],
)
def test_refusals(call: Callable[[], BlockScaled], expected: str) -> None:
    with pytest.raises(MokInputError, match=expected):
        call()


def test_values_and_scales_must_belong_together() -> None:
    good = quantize_mxfp8(torch.ones(4, 64))
    with pytest.raises(MokInputError, match=r"scales are \(4, 1\) .* one for each 1x32 block: \(4, 2\)"):
        BlockScaled(good.values, good.scales[:, :1], -1, 32)
    with pytest.raises(MokInputError, match=r"(?s)values are torch.float32.*scales are torch.bfloat16"):
        BlockScaled(good.values.float(), good.scales.to(torch.bfloat16), -1, 32)
    with pytest.raises(MokInputError, match=r"4 rows .* block's 32") as refused:
        BlockScaled(good.values, good.scales, -2, 32)
    assert len(str(refused.value).splitlines()) == 2  # no shape of scales follows from such values


def test_shapes_and_dtypes() -> None:
    x = torch.ones(2, 128, 256, dtype=torch.bfloat16)
    for quantized, scales, dtype in (
        (quantize_mxfp8(x), (2, 128, 8), torch.float8_e8m0fnu),
        (quantize_mxfp8(x, axis=-2), (2, 4, 256), torch.float8_e8m0fnu),
        (quantize_1x128(x), (2, 128, 2), torch.float32),
        (quantize_1x128(x, axis=-2), (2, 1, 256), torch.float32),
        (quantize_128x128(x), (2, 1, 2), torch.float32),
    ):
        assert quantized.values.shape == x.shape and quantized.values.dtype == torch.float8_e4m3fn
        assert quantized.scales.shape == scales and quantized.scales.dtype == dtype
        for restored in (quantized.dequantize(torch.bfloat16), quantized.transposed().dequantize(torch.bfloat16).mT):
            assert restored.dtype == torch.bfloat16 and torch.equal(restored, x)


def test_every_nan_has_the_same_code() -> None:
    """Devices differ in the sign of the NaN that a product gives; the stored byte may not."""
    negative = torch.tensor([-(1 << 22)], dtype=torch.int32).view(torch.float32)
    assert negative.isnan().all() and negative.signbit().all()
    for blocks, multiplier in ((torch.ones(1), negative), (negative, torch.ones(1)), (negative, negative)):
        for element in (E4M3, E5M2):
            values = to_fp8(blocks.reshape(1, 1, 1, 1), multiplier.reshape(1, 1), element)
            assert codes(values).tolist() == [[0x7F]]


def test_no_tokens() -> None:
    assert quantize_mxfp8(torch.zeros(0, 64)).scales.shape == (0, 2)
    assert quantize_mxfp8(torch.zeros(0, 64), axis=-2).dequantize().shape == (0, 64)
    assert quantize_128x128(torch.zeros(0, 128)).scales.shape == (0, 1)


def test_the_source_is_left_alone_and_its_layout_does_not_matter() -> None:
    source = torch.randn(64, 32, generator=torch.Generator().manual_seed(0))
    before = source.clone()
    strided = quantize_mxfp8(source.mT.requires_grad_())
    assert torch.equal(source, before) and not strided.values.requires_grad
    assert torch.equal(strided.dequantize(), quantize_mxfp8(before.mT.contiguous()).dequantize())
