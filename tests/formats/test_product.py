"""Products of quantised matrices: their numbers, their order of addition, and what is refused."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import Tensor

from mok_megatron.errors import MokInputError
from mok_megatron.formats import (
    E5M2,
    BlockScaled,
    quantize_1x128,
    quantize_128x128,
    quantize_mxfp8,
    scaled_product,
)

G = torch.Generator().manual_seed(5)


def random(rows: int, columns: int) -> Tensor:
    return torch.randn(rows, columns, generator=G) * torch.exp2(torch.randint(-6, 7, (rows, 1), generator=G).float())


PAIRS = {
    "mxfp8": (quantize_mxfp8(random(5, 384)), quantize_mxfp8(random(256, 384))),
    "mxfp8, e5m2": (quantize_mxfp8(random(5, 384), element=E5M2), quantize_mxfp8(random(256, 384))),
    "mxfp8, columns": (
        quantize_mxfp8(random(384, 5), axis=-2).transposed(),
        quantize_mxfp8(random(384, 7), axis=-2).transposed(),
    ),
    "rows by square": (quantize_1x128(random(5, 384)), quantize_128x128(random(256, 384))),
    "rows by square transposed": (quantize_1x128(random(5, 384)), quantize_128x128(random(384, 256)).transposed()),
    "fp32 scales": (quantize_1x128(random(5, 384), scale="fp32"), quantize_128x128(random(256, 384), scale="fp32")),
    "columns": (
        quantize_1x128(random(384, 5), axis=-2, element=E5M2).transposed(),
        quantize_1x128(random(384, 7), axis=-2).transposed(),
    ),
}


@pytest.mark.parametrize("name", PAIRS)
def test_numbers(name: str) -> None:
    a, b = PAIRS[name]
    expected = a.dequantize().double() @ b.dequantize().double().mT
    scale = a.dequantize().double().abs() @ b.dequantize().double().abs().mT
    assert ((scaled_product(a, b).double() - expected).abs() <= 2.0**-18 * scale).all()


def test_block_scales_are_applied_to_each_block_and_added_in_the_order_of_k() -> None:
    """One product a block of k, with numbers that tell apart every order and a scale applied too early or late."""
    a, b = PAIRS["rows by square"]
    total = torch.zeros(5, 256)
    for block in range(3):
        for row, column in product(range(5), range(256)):
            k = slice(128 * block, 128 * block + 128)
            # As a matrix product of the same shape, so that the library adds in the same order within the block.
            values = (a.values[:, k].float() @ b.values[:, k].float().mT)[row, column]
            total[row, column] += values * (a.scales[row, block] * b.scales[column // 128, block])
    assert torch.equal(scaled_product(a, b), total)
    other_order = sum(
        a[:, ...].dequantize()[:, k] @ b.dequantize()[:, k].mT  # type: ignore[index]
        for k in (slice(256, 384), slice(128, 256), slice(0, 128))
    )
    assert not torch.equal(total, other_order)


def test_a_spoilt_block_reaches_its_rows_and_no_others() -> None:
    x = random(5, 384)
    x[3, 200] = torch.inf
    y = scaled_product(quantize_1x128(x), PAIRS["rows by square"][1])
    assert y[3].isnan().all() and not y[[0, 1, 2, 4]].isnan().any()


def test_operands_that_do_not_fit_are_refused() -> None:
    row, column = quantize_mxfp8(torch.ones(128, 128)), quantize_mxfp8(torch.ones(128, 128), axis=-2)
    blocks = quantize_1x128(torch.ones(128, 128))
    for a, b in ((column, row), (row, column), (row, blocks), (blocks.transposed(), blocks)):
        with pytest.raises(MokInputError, match="give both blocks of one length along the columns"):
            scaled_product(a, b)


def test_what_can_be_indexed() -> None:
    rows = PAIRS["mxfp8"][0]
    assert torch.equal(rows[1:3].dequantize(), rows.dequantize()[1:3])
    batch: BlockScaled = quantize_128x128(torch.randn(2, 128, 128, generator=G))
    assert torch.equal(batch[1].dequantize(), batch.dequantize()[1])
    for bad in (lambda: rows[1], lambda: rows.transposed()[:32]):
        with pytest.raises(MokInputError, match="only a batch can be indexed"):
            bad()
