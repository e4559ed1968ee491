"""FP8 with block scales in plain torch, on any device: the definition that kernels are held to.

`docs/formats.md` says what the layer quantises where, with every rounding. Two formats, one container:
- `mxfp8`: FP8 values, one E8M0 scale (a power of two in a byte) for 32 consecutive values (OCP MX v1.0);
- `blockwise`: FP8 values, one fp32 scale for 128 consecutive values or for a block of 128x128 (DeepSeek-V3).

Read `tensor.py` (what a quantised tensor is), then either format, `recipe.py` (what is quantised into what) and
`product.py` (how products add up); `weight_cache.py` keeps weights quantised between optimizer steps.
"""

from mok_megatron.formats.blockwise import BLOCKWISE_LENGTH, ScaleKind, quantize_1x128, quantize_128x128
from mok_megatron.formats.mxfp8 import MXFP8_LENGTH, ScaleRounding, quantize_mxfp8
from mok_megatron.formats.product import scaled_product
from mok_megatron.formats.recipe import BLOCK_LENGTH, QuantizedWeight, Recipe
from mok_megatron.formats.tensor import E4M3, E5M2, Axis, BlockScaled, Element
from mok_megatron.formats.weight_cache import CACHE, WeightCache

__all__ = [
    "BLOCKWISE_LENGTH",
    "BLOCK_LENGTH",
    "CACHE",
    "E4M3",
    "E5M2",
    "MXFP8_LENGTH",
    "Axis",
    "BlockScaled",
    "Element",
    "QuantizedWeight",
    "Recipe",
    "ScaleKind",
    "ScaleRounding",
    "WeightCache",
    "quantize_1x128",
    "quantize_128x128",
    "quantize_mxfp8",
    "scaled_product",
]
