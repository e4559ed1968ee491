"""What the megakernel is handed as addresses and 32-bit numbers: nothing wraps, everything lies where it can read."""

from __future__ import annotations

import torch
from hypothesis import strategies as st

from mok_megatron import MokConfig
from mok_megatron.errors import MokCapacityError, MokConfigError, MokInputError
from mok_megatron.megakernel.backend import ALIGNMENT, _aligned, _check_main_grads, expert_numbers, kernel_shape
from mok_megatron.megakernel.workspace import number_of_ctas
from mok_megatron.ops.inputs import MoeInputs
from tests.properties.cases import cases, error_of


@cases(150, number=st.integers(-(2**63), 2**63 - 1) | st.integers(-3, 9), experts=st.integers(1, 8))
def test_a_number_that_is_no_expert_stays_none(number: int, experts: int) -> None:
    kept = expert_numbers(torch.tensor([[number]]))
    assert kept.dtype == torch.int32
    assert kept.item() == number or (not -1 <= number < experts and not -1 <= kept.item() < experts)


@cases(60, offset=st.integers(0, 40), rows=st.integers(0, 3), transposed=st.booleans())
def test_operands_are_copied_to_where_the_kernel_can_read_them(offset: int, rows: int, transposed: bool) -> None:
    buffer = torch.arange(1000, dtype=torch.bfloat16)
    x = buffer[offset : offset + 64 * rows].view(rows, 64)
    x = x.t() if transposed else x
    ready = _aligned(x)
    assert torch.equal(ready, x) and ready.is_contiguous()
    assert (ready.data_ptr() - ready.untyped_storage().data_ptr()) % ALIGNMENT == 0
    good_already = x.is_contiguous() and offset % 8 == 0
    assert not good_already or ready.data_ptr() == x.data_ptr()


@cases(
    100,
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int32]),
    shape=st.sampled_from([(2, 6, 4), (2, 4, 6), (2, 6), (2, 6, 4, 1), (2, 6, 5)]),
    offset=st.integers(0, 16),
    device=st.sampled_from(["cpu", "meta"]),
    stepped=st.booleans(),
)
def test_a_main_grad_that_cannot_be_added_to_is_named(
    dtype: torch.dtype, shape: tuple, offset: int, device: str, stepped: bool
) -> None:
    weight = torch.zeros(2, 6, 4, dtype=torch.bfloat16)
    size = torch.Size(shape).numel()
    buffer = torch.zeros(2 * size + offset, dtype=dtype, device=device)
    target = buffer[offset:][::2][:size].view(shape) if stepped else buffer[offset : offset + size].view(shape)
    fits = dtype in (torch.float32, torch.bfloat16) and shape == (2, 6, 4) and device == "cpu" and not stepped
    fits = fits and offset * dtype.itemsize % ALIGNMENT == 0
    error = error_of(lambda: _check_main_grads([None, weight, None, None], [None, target, None, None]))
    assert isinstance(error, MokInputError) != fits, error
    assert fits or "main_grad of w2" in str(error)


@cases(
    100,
    tokens=st.integers(0, 2**24),
    topk=st.integers(1, 32),
    experts=st.integers(1, 64),
    capacity=st.none() | st.integers(1, 2**24).map(lambda n: 128 * n),
    macrobatch=st.none() | st.integers(1, 2**21).map(lambda n: 1024 * n),
)
def test_row_numbers_never_wrap(
    tokens: int, topk: int, experts: int, capacity: int | None, macrobatch: int | None
) -> None:
    with torch.device("meta"):
        x, ids, weights = torch.empty(0, 64), torch.empty(0, topk, dtype=torch.int32), torch.empty(0, topk)
        w1, w2 = torch.empty(experts, 128, 64), torch.empty(experts, 64, 64)
    config = error_of(lambda: MokConfig(capacity_rows=capacity, macrobatch_size=macrobatch)) or MokConfig(
        capacity_rows=capacity, macrobatch_size=macrobatch
    )
    if not isinstance(config, MokConfig):
        return
    call = MoeInputs(x, ids, weights, w1, w2, None, None, config)
    try:
        shape = kernel_shape(call, tokens)
    except MokCapacityError as error:
        assert "--mok-capacity-rows" in str(error) and "--micro-batch-size" in str(error)
        assert max(tokens * topk * 5 // 4 + 127 * experts, capacity or 0, macrobatch or 0) + 2048 > 2**31 - 128
        return
    assert shape.capacity_rows >= (capacity or tokens * topk) and shape.capacity_rows % 128 == 0
    assert 0 < shape.ring_rows or shape.capacity_rows == 0
    assert all(getattr(shape, name) >= 0 for name, _ in shape._fields_)


few = st.integers(0, 200)


@cases(100, sms=st.integers(1, 160), num=st.none() | few, reserved=st.none() | few, forward=few, backward=few)
def test_ctas_are_all_resident_and_some_of_them_multiply(
    sms: int, num: int | None, reserved: int | None, forward: int, backward: int
) -> None:
    settings = {"num_sms": num, "reserved_sms": reserved, "fwd_comm_sms": forward, "bwd_comm_sms": backward}
    if error_of(lambda: MokConfig(**settings)) is not None:
        return
    config = MokConfig(**settings)
    fits = max(forward, backward) < (sms - (reserved or 0) if num is None else num) and (num or 0) <= sms
    error = error_of(lambda: number_of_ctas(config, sms))
    assert (error is None) == fits, error
    if fits:
        assert max(forward, backward) < number_of_ctas(config, sms) <= sms
    else:
        assert isinstance(error, MokConfigError) and f"{sms} SMs" in str(error) and "--mok-" in str(error)
