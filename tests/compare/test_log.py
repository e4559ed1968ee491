"""Megatron's log lines as numbers."""

import pytest

from mok_megatron.compare.log import read_log

ARGUMENTS = """
  data_parallel_size .............................. 2
  micro_batch_size ................................ 1
  pipeline_model_parallel_size .................... 1
  seq_length ...................................... 128
  world_size ...................................... 2
"""
# Another rank's words follow on the same line, as they do where ranks share an output.
LINE = (
    " [2026-01-01 00:00:00.000000] iteration {step:8d}/      12 | consumed samples: {samples:12d} | elapsed time per "
    "iteration (ms): {ms:.1f} | throughput per GPU (TFLOP/s/GPU): {tflops:.1f} | learning rate: 7.4E-04 | global batch "
    "size:     8 | lm loss: {loss:.6E} | seq_load_balancing_loss: 1.0E+00 | loss scale: 1.0 | grad norm: 1.273 | "
    "number of skipped iterations:   0 | number of nan iterations:   0 |Number of parameters in billions: 0.0007\n"
)
MEMORY = (
    "[Rank {rank}] (after {step} iterations) memory (MB) | allocated: 10.00 | max allocated: {peak:.2f} | reserved: 1\n"
)


def log(steps: int) -> str:
    lines = [
        LINE.format(step=i, samples=8 * i, ms=1000.0 if i == 1 else 100.0 + i, tflops=50.0 + i, loss=6 - i / 10)
        for i in range(1, steps + 1)
    ]
    memory = MEMORY.format(rank=0, step=2, peak=1000) + MEMORY.format(rank=1, step=steps, peak=2000)
    return ARGUMENTS + "".join(lines) + memory


def test_every_step_is_read():
    training = read_log(log(12))
    assert training.loss == pytest.approx([6 - i / 10 for i in range(1, 13)])
    assert training.milliseconds[:2] == [1000.0, 102.0]
    assert training.samples == [8] * 12 and training.microbatches == 4


def test_figures_leave_the_warm_up_out():
    training = read_log(log(12))
    assert training.step_ms == pytest.approx(109.0)  # steps 6 to 12
    assert training.step_tflops == pytest.approx(59.0)
    assert training.tokens_per_s == pytest.approx(8 * 128 / 0.109 / 2)
    assert read_log(log(1)).step_ms == 1000.0


def test_peak_is_the_largest_of_all_ranks_in_decimal_gigabytes():
    assert read_log(log(3)).peak_gb == pytest.approx(2000 * 2**20 / 1e9)
    assert read_log(log(3).replace("2000.00", "0.00").replace("1000.00", "0.00")).peak_gb is None


def test_a_log_without_steps_has_none():
    assert read_log("Traceback (most recent call last):\n").loss == []


LAYERS = (
    " mok of the last microbatch | largest imbalance: 1.044 | evicted rows: 0 | forward (ms): {forward:.2f} | "
    "backward (ms): {backward:.2f} | symmetric memory (MB): {megabytes:.0f} |\n"
)


def test_lines_of_whole_layers_are_read_beside_those_of_kernels():
    line = " MoE layers of a step | forward (ms): {:.2f} | backward (ms): 30.00 |\n"
    lines = "".join(LAYERS.format(forward=8, backward=20, megabytes=500) + line.format(10 + i) for i in range(12))
    training = read_log(log(12) + lines)
    assert training.step_moe_ms == pytest.approx(30 + 18)  # the median of steps 6 to 12
    assert training.step_kernel_ms == pytest.approx(28 * 4)
    assert read_log(log(12)).step_moe_ms is None


def test_lines_of_log_mok_give_kernel_times_and_memory_beside_torchs():
    lines = "".join(LAYERS.format(forward=8 + i, backward=20, megabytes=500) for i in range(12))
    training = read_log(log(12) + lines)
    assert training.kernel_ms[0] == 28.0
    assert training.step_kernel_ms == pytest.approx((28 + 8) * 4)  # the median of steps 6 to 12, four microbatches
    assert training.peak_gb == pytest.approx(2500 * 2**20 / 1e9)
    assert read_log(log(12)).step_kernel_ms is None
