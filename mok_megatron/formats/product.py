"""The product of two quantised matrices: what each format's tensor cores compute, in the order in which they add."""

from __future__ import annotations

from torch import Tensor

from mok_megatron.errors import MokInputError
from mok_megatron.formats.blockwise import BLOCKWISE_LENGTH
from mok_megatron.formats.tensor import BlockScaled


def scaled_product(a: BlockScaled, b: BlockScaled) -> Tensor:
    """`a @ b^T` for a [n, k] and b [m, k], both with blocks along k: [n, m] fp32.

    MXFP8 (blocks of 32): every value times its scale, exactly, then one product that accumulates in fp32.

    Block scales (blocks of 128): for each block of k in ascending order, the values' product in fp32, times
    fp32(scale of a * scale of b), added to the sum so far, each rounded to fp32. With powers of two only the sums
    round.

    Raises:
        MokInputError: blocks that do not run along k, or of different lengths.
    """
    if a.axis != -1 or b.axis not in (-1, "both") or a.length != b.length:
        raise MokInputError(
            f"operands have blocks of {a.length} along {a.axis!r} and of {b.length} along {b.axis!r}; give both blocks "
            "of one length along the columns (quantise row-wise, or transpose a column-wise copy)"
        )
    if a.length != BLOCKWISE_LENGTH:
        return a.dequantize() @ b.dequantize().mT
    total = a.values.new_zeros((a.values.shape[0], b.values.shape[0]), dtype=a.scales.dtype)
    b_scales = b.scales if b.axis == -1 else b.scales.repeat_interleave(b.length, dim=0)
    for block in range(a.scales.shape[1]):
        columns = slice(block * a.length, (block + 1) * a.length)
        values = a.values[:, columns].float() @ b.values[:, columns].float().mT
        total += values * (a.scales[:, block, None] * b_scales[None, :, block])
    return total
