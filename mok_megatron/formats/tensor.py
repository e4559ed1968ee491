"""A tensor of FP8 values that share scales block by block, and the steps that both formats have in common."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from mok_megatron.errors import MokInputError, Problems


@dataclass(frozen=True)
class Element:
    """An 8-bit floating-point type of OCP 8-bit floating point (OFP8) v1.0."""

    name: str
    dtype: torch.dtype
    max_exponent: int
    """The exponent of its largest power of two. In both types the largest finite number is 1.75 times that power."""

    @property
    def max(self) -> float:
        """The largest finite number."""
        return 1.75 * 2.0**self.max_exponent


E4M3 = Element("e4m3", torch.float8_e4m3fn, 8)
"""3 fraction bits, up to 448: activations, weights, and gradients unless `hybrid` is asked for."""

E5M2 = Element("e5m2", torch.float8_e5m2, 15)
"""2 fraction bits, up to 57344: gradients of --fp8-format hybrid."""

ELEMENTS = {element.name: element for element in (E4M3, E5M2)}

SOURCE_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
"""What can be quantised. Each converts to fp32 exactly."""

SCALE_DTYPES = (torch.float8_e8m0fnu, torch.float32)

type Axis = Literal[-1, -2, "both"]
"""Which dimension a block runs along: -1 row-wise (along a row), -2 column-wise, or "both" for a square block."""


@dataclass(frozen=True)
class BlockScaled:
    """Values and the scales they are multiplied by: `dequantize` is all there is to know of their meaning.

    The logical matrix is the last two dimensions; any before them are a batch (experts). Both tensors keep the
    orientation of the source, also column-wise: `transposed` gives the other one as a view.
    """

    values: Tensor
    """[..., R, C] float8_e4m3fn or float8_e5m2."""
    scales: Tensor
    """[..., R / rows, C / columns] of `block_shape`; float8_e8m0fnu or float32. NaN: the block held Inf or NaN."""
    axis: Axis
    """The dimension that a block runs along."""
    length: int
    """Consecutive values that share a scale along `axis`: 32 or 128."""

    def __post_init__(self) -> None:
        problems = Problems()
        for name, dtype, allowed in (
            ("values", self.values.dtype, tuple(element.dtype for element in ELEMENTS.values())),
            ("scales", self.scales.dtype, SCALE_DTYPES),
        ):
            problems.require(dtype in allowed, f"{name} are {dtype}", f"pass {' or '.join(map(str, allowed))}")
        if check_layout(self.values, self.axis, self.length, problems):
            rows, columns = self.block_shape
            *batch, height, width = self.values.shape
            expected = (*batch, height // rows, width // columns)
            problems.require(
                tuple(self.scales.shape) == expected,
                f"scales are {tuple(self.scales.shape)} for values {tuple(self.values.shape)}",
                f"pass one for each {rows}x{columns} block: {expected}",
            )
        problems.raise_if_any(MokInputError, "These values and scales do not belong together:")

    @property
    def block_shape(self) -> tuple[int, int]:
        """(rows, columns) of the values that share a scale."""
        return block_shape(self.axis, self.length)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """value * scale in fp32, then rounded to `dtype` [..., R, C], to nearest even.

        With scales that are powers of two the product has the value's significant bits, at most four, so it is exact
        in fp32 and in bf16 unless it leaves their range. Above the range of fp32 it is Inf (OCP MX v1.0 section 5.1
        leaves this to the implementation).
        """
        blocks = split(self.values.float(), self.block_shape)
        return merge(blocks * self.scales.float()[..., :, None, :, None]).to(dtype)

    def transposed(self) -> BlockScaled:
        """The same numbers with rows and columns exchanged, as views: row-wise becomes column-wise, no rounding."""
        swapped: dict[Axis, Axis] = {-1: -2, -2: -1, "both": "both"}
        return BlockScaled(self.values.mT, self.scales.mT, swapped[self.axis], self.length)

    def __getitem__(self, index: int | slice) -> BlockScaled:
        """A matrix of a batch, or some rows of a row-wise quantised matrix: views of both tensors."""
        is_batch = self.values.dim() > 2
        if not is_batch and (isinstance(index, int) or self.axis != -1):
            raise MokInputError("only a batch can be indexed, or a row-wise quantised matrix by a slice of rows")
        return BlockScaled(self.values[index], self.scales[index], self.axis, self.length)


def block_shape(axis: Axis, length: int) -> tuple[int, int]:
    """(rows, columns) of a block of `length` along `axis`."""
    return (1 if axis == -1 else length, 1 if axis == -2 else length)


def split(x: Tensor, block: tuple[int, int]) -> Tensor:
    """[..., R, C] as blocks [..., R / rows, rows, C / columns, columns]: a view."""
    rows, columns = block
    height, width = x.shape[-2:]
    return x.unflatten(-1, (width // columns, columns)).unflatten(-3, (height // rows, rows))


def merge(blocks: Tensor) -> Tensor:
    """The inverse of `split`."""
    return blocks.flatten(-4, -3).flatten(-2, -1)


def source_blocks(x: Tensor, axis: Axis, length: int) -> tuple[Tensor, Tensor]:
    """What a quantiser starts from: `x` in fp32 as blocks, and the largest magnitude of each.

    Args:
        x: [..., R, C] bf16, fp16 or fp32. Gradients do not flow: quantisers work on its data.

    Returns:
        blocks [..., R / rows, rows, C / columns, columns] fp32; amax [..., R / rows, C / columns] fp32, NaN or Inf if
        and only if the block holds one (torch's maximum propagates NaN).

    Raises:
        MokInputError: another dtype, fewer than two dimensions, or a size that is not a multiple of the block.
    """
    problems = Problems()
    problems.require(
        x.dtype in SOURCE_DTYPES, f"the tensor is {x.dtype}", f"convert it to {', '.join(map(str, SOURCE_DTYPES))}"
    )
    check_layout(x, axis, length, problems)
    problems.raise_if_any(MokInputError, f"A tensor of shape {tuple(x.shape)} cannot be quantised:")
    blocks = split(x.detach().float(), block_shape(axis, length))
    return blocks, blocks.abs().amax(dim=(-3, -1))


def check_layout(x: Tensor, axis: Axis, length: int, problems: Problems) -> bool:
    """Notes what stops `x` from being cut into blocks; True if nothing does."""
    if x.dim() < 2:
        problems.add(f"it has {x.dim()} dimensions", "pass a matrix, or a batch of them: [..., rows, columns]")
        return False
    if axis not in (-1, -2, "both"):
        problems.add(f"axis is {axis!r}", "pass -1 for row-wise or -2 for column-wise")
        return False
    fits = True
    for name, size, step in zip(("rows", "columns"), x.shape[-2:], block_shape(axis, length), strict=True):
        if size % step:
            fits = False
            problems.add(
                f"its {size} {name} are not a multiple of the block's {step}",
                f"pad it with zeros to {-(-size // step) * step} (they never change a scale), or quantise another axis",
            )
    return fits


def to_fp8(blocks: Tensor, multiplier: Tensor, element: Element) -> Tensor:
    """FP8 values [..., R, C] of `blocks * multiplier`, rounded to nearest even, saturated at +-max, NaN kept.

    The clamp is what saturates: torch's conversion makes NaN or Inf of anything that rounds beyond the largest number.
    One code, 0x7F, for every NaN, so that results are the same bits on every device.
    """
    scaled = blocks * multiplier[..., :, None, :, None]
    scaled = scaled.masked_fill(scaled.isnan(), torch.nan).clamp(-element.max, element.max)
    return merge(scaled).to(element.dtype)
