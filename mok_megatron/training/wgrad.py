"""Gradient accumulation fusion of Megatron's own linear layers, without Apex.

`ColumnParallelLinear` (Megatron's output layer) adds weight gradients to `main_grad` with a kernel of Apex, and refuses
to be built without it. Transformer Engine has the same product; where it is installed and Apex is not, Megatron gets
that one. Transformer Engine's own layers need no such help.
"""

from __future__ import annotations

import types

from torch import Tensor


def accumulate_with_transformer_engine() -> bool:
    """Let Megatron's linear layers accumulate with Transformer Engine. Idempotent.

    Returns:
        Whether anything was changed: Apex is missing and Transformer Engine is there.
    """
    from megatron.core import utils
    from megatron.core.tensor_parallel import layers

    if layers._grad_accum_fusion_available:
        return False
    try:
        from transformer_engine.pytorch.cpp_extensions import general_gemm
    except ImportError:
        return False

    def accumulate(total_input: Tensor, grad_output: Tensor, main_grad: Tensor) -> None:
        """main_grad [n, k] += grad_output [rows, n] ^T @ total_input [rows, k], summed in fp32."""
        general_gemm(
            total_input,
            grad_output,
            out_dtype=main_grad.dtype,
            layout="NT",
            out=main_grad,
            accumulate=True,
            grad=True,
        )

    kernel = types.SimpleNamespace(wgrad_gemm_accum_fp32=accumulate, wgrad_gemm_accum_fp16=accumulate)
    layers.fused_weight_gradient_mlp_cuda = utils.fused_weight_gradient_mlp_cuda = kernel
    layers._grad_accum_fusion_available = True
    return True
