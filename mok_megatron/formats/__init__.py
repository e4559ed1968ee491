"""FP8 with block scales in plain torch, on any device: the definition that kernels will be held to.

Not wired in: neither `mok_moe` nor the Megatron flags use this package yet. The fused layer computes in bf16 and
`--fp8-format` is refused at start-up. `docs/formats.md` says what is planned, with every rounding.

Two formats, one container:
- `mxfp8`: E4M3 values, one E8M0 scale (a power of two in a byte) for 32 consecutive values (OCP MX v1.0);
- `blockwise`: E4M3 values, one fp32 scale for 128 consecutive values or for a block of 128x128 (DeepSeek-V3).

Read `tensor.py` (what a quantised tensor is), then either format.
"""

from mok_megatron.formats.blockwise import BLOCKWISE_LENGTH, ScaleKind, quantize_1x128, quantize_128x128
from mok_megatron.formats.mxfp8 import MXFP8_LENGTH, ScaleRounding, quantize_mxfp8
from mok_megatron.formats.tensor import E4M3_MAX, Axis, BlockScaled

__all__ = [
    "BLOCKWISE_LENGTH",
    "E4M3_MAX",
    "MXFP8_LENGTH",
    "Axis",
    "BlockScaled",
    "ScaleKind",
    "ScaleRounding",
    "quantize_1x128",
    "quantize_128x128",
    "quantize_mxfp8",
]
