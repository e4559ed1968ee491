"""On a GPU: the same bits as on the CPU, and as Transformer Engine's own quantisers."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from mok_megatron.formats import E4M3, E5M2, BlockScaled, Element, quantize_1x128, quantize_128x128, quantize_mxfp8
from tests.formats.scalar import codes
from tests.ops.problem import REFERENCE, make_problem, operator

pytestmark = pytest.mark.gpu
R, C = 384, 512


def numbers(dtype: torch.dtype) -> Tensor:
    """[R, C] on the CPU: blocks of all magnitudes from 2^-60 to 2^60, some with zeros, one with nothing else."""
    g = torch.Generator().manual_seed(3)
    x = torch.randn(R, C, generator=g)
    x *= torch.exp2(torch.randint(-12, 13, (R, C), generator=g).float())
    exponents = torch.randint(-48, 49, (R // 128, C // 128), generator=g).float()
    x *= torch.exp2(exponents).repeat_interleave(128, 0).repeat_interleave(128, 1)
    x[torch.rand(R, C, generator=g) < 0.1] = 0
    x[:128, :128] = 0
    x[5, 128:256] = 0
    return x.to(dtype)


def same_bits(a: BlockScaled, b: BlockScaled) -> None:
    for part in ("values", "scales"):
        mine, other = (codes(getattr(x, part)).cpu() for x in (a, b))
        different = int((mine != other).sum())
        assert different == 0, f"{different} of {mine.numel()} bytes of the {part} differ"


QUANTISERS = {
    f"{name}-{element.name}": partial(quantise, element=element)
    for element in (E4M3, E5M2)
    for name, quantise in {
        "mxfp8-row": partial(quantize_mxfp8, axis=-1),
        "mxfp8-column": partial(quantize_mxfp8, axis=-2),
        "row": partial(quantize_1x128, axis=-1),
        "row-fp32": partial(quantize_1x128, axis=-1, scale="fp32"),
        "column": partial(quantize_1x128, axis=-2),
        "square": quantize_128x128,
        "square-fp32": partial(quantize_128x128, scale="fp32"),
    }.items()
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_gpu_gives_the_bits_of_the_cpu(dtype: torch.dtype) -> None:
    x = numbers(dtype)
    x[200, 300], x[300, 200] = torch.nan, torch.inf
    for quantise in QUANTISERS.values():
        same_bits(quantise(x.cuda()), quantise(x))


def engine() -> Any:
    return pytest.importorskip("transformer_engine.pytorch", reason="Transformer Engine is not installed")


def engine_dtype(element: Element) -> Any:
    import transformer_engine_torch as tex

    return tex.DType.kFloat8E4M3 if element is E4M3 else tex.DType.kFloat8E5M2


def from_engine(values: Tensor, scales: Tensor, ours: BlockScaled) -> BlockScaled:
    """Theirs, cut and turned to the layout of ours."""
    rows, columns = ours.scales.shape
    return BlockScaled(
        values.view(ours.values.dtype), scales[:rows, :columns].view(ours.scales.dtype), ours.axis, ours.length
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kind", ["power_of_two", "fp32"])
@pytest.mark.parametrize("element", [E4M3, E5M2], ids=["e4m3", "e5m2"])
def test_block_scales_are_those_of_transformer_engine(dtype: torch.dtype, kind: Any, element: Element) -> None:
    engine()
    from transformer_engine.pytorch.tensor.float8_blockwise_tensor import Float8BlockQuantizer

    x = numbers(dtype).cuda()
    for dimensions in (1, 2):
        theirs = Float8BlockQuantizer(
            engine_dtype(element),
            rowwise=True,
            columnwise=True,
            force_pow_2_scales=kind == "power_of_two",
            block_scaling_dim=dimensions,
        )(x)
        row, row_scales = theirs._rowwise_data, theirs._rowwise_scale_inv
        column, column_scales = theirs._columnwise_data, theirs._columnwise_scale_inv
        if dimensions == 1:  # rowwise scales stand transposed there, column-wise values do
            rowwise, columnwise = (quantize_1x128(x, axis, kind, element) for axis in (-1, -2))
            row_scales = row_scales.t()
        else:
            rowwise = columnwise = quantize_128x128(x, kind, element)
            column_scales = column_scales.t()
        same_bits(from_engine(row, row_scales, rowwise), rowwise)
        same_bits(from_engine(column.t(), column_scales, columnwise), columnwise)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("element", [E4M3, E5M2], ids=["e4m3", "e5m2"])
def test_mxfp8_is_that_of_transformer_engine(dtype: torch.dtype, element: Element) -> None:
    engine()
    from transformer_engine.pytorch.tensor.mxfp8_tensor import MXFP8Quantizer

    if torch.cuda.get_device_capability() < (10, 0):
        pytest.skip("Transformer Engine quantises to MXFP8 from compute capability 10.0 on; below it writes nothing")
    x = numbers(dtype).cuda()
    theirs = MXFP8Quantizer(engine_dtype(element), rowwise=True, columnwise=True)(x)
    rowwise, columnwise = (quantize_mxfp8(x, axis, element=element) for axis in (-1, -2))
    same_bits(from_engine(theirs._rowwise_data, theirs._rowwise_scale_inv, rowwise), rowwise)
    same_bits(from_engine(theirs._columnwise_data, theirs._columnwise_scale_inv, columnwise), columnwise)


@pytest.mark.parametrize("form", ["mxfp8", "blockwise"])
def test_the_reference_on_a_gpu_is_that_on_the_cpu_but_for_the_order_of_sums(form: str) -> None:
    """A sum that falls on the other side of a tie moves one FP8 value by a step: rare, and small in the norm."""
    config = replace(REFERENCE, format=form, fp8_wgrad="fp8")
    p = make_problem(300, hidden=256, inner=128, topk=2, dtype=torch.bfloat16, shared_inner=64)
    assert p.shared is not None
    shared = replace(p.shared, w1=p.shared.w1.cuda(), w2=p.shared.w2.cuda())
    names = ("x", "topk_ids", "topk_weights", "w1", "w2", "dy")
    found = operator(replace(p, shared=shared, **{n: getattr(p, n).cuda() for n in names}), config=config)
    for name, expected in operator(p, config=config).items():
        error = (found[name].cpu().double() - expected.double()).norm() / expected.double().norm()
        assert error < 4e-3, f"{name}: {error}"
