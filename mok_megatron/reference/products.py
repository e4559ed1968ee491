"""The matrix products of the experts in each precision; everything around them is the same for all.

Products accumulate in fp32 (fp64 for fp64 inputs) and come back unrounded. In FP8 their operands are quantised as
`formats/recipe.py` says; docs/formats.md lists every rounding.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from mok_megatron.config import TILE_ROWS
from mok_megatron.formats import CACHE, BlockScaled, QuantizedWeight, Recipe, scaled_product
from mok_megatron.ops.inputs import MoeInputs, SharedExpert

type Rows = Tensor | BlockScaled
"""Rows of tokens as they travel to the experts: [n, H] in x's dtype, or quantised row-wise."""


def wide(tensor: Tensor) -> Tensor:
    """`tensor` in the dtype that products accumulate in: fp32, or fp64 if it is fp64."""
    return tensor if tensor.dtype == torch.float64 else tensor.float()


class Products[R: Rows](Protocol):
    """The six products of a layer's experts. All but `of_x` and `of_dy` take one tile's rows and a local expert."""

    def of_x(self, x: Tensor) -> R:
        """x [T, H] as its rank sends it: rounded once a token."""

    def of_dy(self, dy: Tensor) -> R:
        """dy [T, H] likewise, before any router weight."""

    def gate_up(self, x: R, expert: int) -> Tensor:
        """FC1, before the activation: x [n, H] and w1 [2I, H] to [n, 2I]."""

    def down(self, hidden: Tensor, expert: int) -> Tensor:
        """FC2: hidden [n, I] in x's dtype and w2 [H, I] to [n, H]."""

    def dhidden(self, dy: R, expert: int) -> Tensor:
        """dy [n, H] and w2 [H, I] to [n, I]."""

    def dx(self, dgate_up: Tensor, expert: int) -> Tensor:
        """dgate_up [n, 2I] in x's dtype and w1 [2I, H] to [n, H]."""

    def dw1(self, dgate_up: Tensor, x: R) -> Tensor:
        """A tile's share of the gradient of w1 [2I, H]."""

    def dw2(self, dy: R, weighted_hidden: Tensor) -> Tensor:
        """A tile's share of the gradient of w2 [H, I]; weighted_hidden [n, I] in x's dtype."""


class PlainProducts:
    """In the dtype of x.

    Args:
        w1, w2: [E, 2I, H] and [E, H, I].
    """

    def __init__(self, w1: Tensor, w2: Tensor) -> None:
        self.w1, self.w2 = w1, w2

    def of_x(self, x: Tensor) -> Tensor:
        """As it is."""
        return x

    of_dy = of_x

    def gate_up(self, x: Tensor, expert: int) -> Tensor:
        """See `Products`, also for the others."""
        return wide(x) @ wide(self.w1[expert]).t()

    def down(self, hidden: Tensor, expert: int) -> Tensor:
        return wide(hidden) @ wide(self.w2[expert]).t()

    def dhidden(self, dy: Tensor, expert: int) -> Tensor:
        return wide(dy) @ wide(self.w2[expert])

    def dx(self, dgate_up: Tensor, expert: int) -> Tensor:
        return wide(dgate_up) @ wide(self.w1[expert])

    def dw1(self, dgate_up: Tensor, x: Tensor) -> Tensor:
        return wide(dgate_up).t() @ wide(x)

    def dw2(self, dy: Tensor, weighted_hidden: Tensor) -> Tensor:
        return wide(dy).t() @ wide(weighted_hidden)


class Fp8Products:
    """In FP8, by a recipe.

    Args:
        recipe: what is quantised into what.
        w1, w2: [E, 2I, H] and [E, H, I].
        dtype: of x.
    """

    def __init__(self, recipe: Recipe, w1: QuantizedWeight, w2: QuantizedWeight, dtype: torch.dtype) -> None:
        self.recipe, self.w1, self.w2, self.dtype = recipe, w1, w2, dtype

    def of_x(self, x: Tensor) -> BlockScaled:
        """Blocks along H."""
        return self.recipe.activation(x)

    def of_dy(self, dy: Tensor) -> BlockScaled:
        """Blocks along H."""
        return self.recipe.gradient(dy)

    def gate_up(self, x: BlockScaled, expert: int) -> Tensor:
        """Blocks along H."""
        return scaled_product(x, self.w1.rowwise[expert])

    def down(self, hidden: Tensor, expert: int) -> Tensor:
        """Blocks along I."""
        return scaled_product(self.recipe.activation(hidden), self.w2.rowwise[expert])

    def dhidden(self, dy: BlockScaled, expert: int) -> Tensor:
        """Blocks along H."""
        return scaled_product(dy, self.w2.columnwise[expert].transposed())

    def dx(self, dgate_up: Tensor, expert: int) -> Tensor:
        """Blocks along 2I."""
        return scaled_product(self.recipe.gradient(dgate_up), self.w1.columnwise[expert].transposed())

    def dw1(self, dgate_up: Tensor, x: BlockScaled) -> Tensor:
        """Blocks along the rows, or none."""
        if self.recipe.wgrad == "bf16":
            return wide(dgate_up).t() @ wide(x.dequantize(self.dtype))
        return self._wgrad(self._gradient_columns(dgate_up), self._activation_columns(x.dequantize()))

    def dw2(self, dy: BlockScaled, weighted_hidden: Tensor) -> Tensor:
        """Blocks along the rows, or none."""
        if self.recipe.wgrad == "bf16":
            return wide(dy.dequantize(self.dtype)).t() @ wide(weighted_hidden)
        return self._wgrad(self._gradient_columns(dy.dequantize()), self._activation_columns(weighted_hidden))

    def _gradient_columns(self, rows: Tensor) -> BlockScaled:
        return self.recipe.gradient(_whole_tile(rows), axis=-2)

    def _activation_columns(self, rows: Tensor) -> BlockScaled:
        return self.recipe.activation(_whole_tile(rows), axis=-2)

    @staticmethod
    def _wgrad(gradient: BlockScaled, activation: BlockScaled) -> Tensor:
        return scaled_product(gradient.transposed(), activation.transposed())


def products_of(call: MoeInputs) -> Products[Any]:
    """Those that the call's configuration asks for, with the routed experts' weights quantised if need be."""
    recipe = Recipe.of(call.config)
    if recipe is None:
        return PlainProducts(call.w1, call.w2)
    w1, w2 = (CACHE.get(weight, recipe, recipe.weight) for weight in (call.w1, call.w2))
    return Fp8Products(recipe, w1, w2, call.x.dtype)


def products_of_shared(call: MoeInputs, shared: SharedExpert) -> Products[Any]:
    """Those of the shared expert, as its expert 0: in x's dtype unless --mok-fp8-shared fp8 asks for the format."""
    recipe = Recipe.of(call.config)
    if recipe is None or call.config.fp8_shared == "bf16":
        return PlainProducts(shared.w1.unsqueeze(0), shared.w2.unsqueeze(0))
    w1, w2 = (CACHE.get(weight, recipe, lambda w: recipe.weight(w.unsqueeze(0))) for weight in (shared.w1, shared.w2))
    return Fp8Products(recipe, w1, w2, call.x.dtype)


def _whole_tile(rows: Tensor) -> Tensor:
    """[TILE_ROWS, n]: a segment's padding rows are zero, as the kernel stores them, so that blocks are whole."""
    return torch.nn.functional.pad(rows, (0, 0, 0, TILE_ROWS - rows.shape[0]))
