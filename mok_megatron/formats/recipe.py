"""What the fused layer quantises, and how: the table of docs/formats.md as functions."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mok_megatron.config import MokConfig
from mok_megatron.formats.blockwise import BLOCKWISE_LENGTH, ScaleKind, quantize_1x128, quantize_128x128
from mok_megatron.formats.mxfp8 import MXFP8_LENGTH, quantize_mxfp8
from mok_megatron.formats.tensor import E4M3, ELEMENTS, Axis, BlockScaled, Element

BLOCK_LENGTH = {"mxfp8": MXFP8_LENGTH, "blockwise": BLOCKWISE_LENGTH}
"""Format -> the length of its blocks: H and I must be multiples of it."""


@dataclass(frozen=True)
class QuantizedWeight:
    """A weight [..., R, C] for both directions."""

    rowwise: BlockScaled
    """Blocks along C, for the forward."""
    columnwise: BlockScaled
    """Blocks along R, for the gradient of the input. With square blocks the same object as `rowwise`."""


@dataclass(frozen=True)
class Recipe:
    """How activations, gradients and weights are quantised."""

    format: str
    """'mxfp8' or 'blockwise'."""
    gradients: Element
    """The type of dy, dgate and dup; everything else is E4M3."""
    scales: ScaleKind
    """Of block scales; those of MXFP8 are powers of two."""
    wgrad: str
    """The type of the weight gradients' products: 'bf16' or 'fp8'."""

    @staticmethod
    def of(config: MokConfig) -> Recipe | None:
        """The recipe of a configuration, None for bf16."""
        if config.format == "bf16":
            return None
        scales: ScaleKind = "fp32" if config.fp8_scales == "fp32" else "power_of_two"
        return Recipe(config.format, ELEMENTS[config.fp8_gradients], scales, config.fp8_wgrad)

    @property
    def length(self) -> int:
        """Of a block."""
        return BLOCK_LENGTH[self.format]

    def activation(self, x: Tensor, axis: Axis = -1) -> BlockScaled:
        """`x` [..., R, C] of the forward, row-wise (-1) or column-wise (-2)."""
        return self._quantize(x, axis, E4M3)

    def gradient(self, dy: Tensor, axis: Axis = -1) -> BlockScaled:
        """`dy` [..., R, C] of the backward, row-wise (-1) or column-wise (-2)."""
        return self._quantize(dy, axis, self.gradients)

    @torch.no_grad()
    def weight(self, w: Tensor) -> QuantizedWeight:
        """`w` [..., R, C]: both copies of MXFP8, each from the source; one copy in square blocks."""
        if self.format == "mxfp8":
            return QuantizedWeight(quantize_mxfp8(w, axis=-1), quantize_mxfp8(w, axis=-2))
        square = quantize_128x128(w, self.scales)
        return QuantizedWeight(square, square)

    def _quantize(self, x: Tensor, axis: Axis, element: Element) -> BlockScaled:
        if self.format == "mxfp8":
            return quantize_mxfp8(x, axis, element=element)
        return quantize_1x128(x, axis, self.scales, element)
