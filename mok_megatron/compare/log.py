"""Megatron's log of a training run, as numbers."""

from __future__ import annotations

import re
import statistics
from dataclasses import dataclass, field
from typing import Any

STEP = re.compile(r" iteration +(\d+)/ *\d+ \|(.*)")
PEAK = re.compile(r"memory \(MB\) .*?max allocated: ([\d.]+)")
SIZES = ("seq_length", "world_size", "micro_batch_size", "data_parallel_size", "pipeline_model_parallel_size")
ARGUMENT = re.compile(rf"^ +({'|'.join(SIZES)}) \.+ (\d+)\s*$", re.MULTILINE)
KERNELS = re.compile(r" mok of the last microbatch \|.*?forward \(ms\): ([\d.]+) \| backward \(ms\): ([\d.]+)")
LAYERS = re.compile(r" MoE layers of a step \| forward \(ms\): ([\d.]+) \| backward \(ms\): ([\d.]+)")
SYMMETRIC = re.compile(r" mok of the last microbatch \|.*?symmetric memory \(MB\): ([\d.]+)")
WARM_UP = 5
"""Steps that the median leaves out, of a run with twice as many: first uses of libraries, kernels and memory."""


@dataclass
class Training:
    """What one run's log says. Lists have one entry a step, in order.

    Attributes:
        loss: language-model loss before the step.
        milliseconds: of each step.
        tflops: TFLOP/s a GPU by Megatron's count.
        samples: sequences of each step.
        peak_gb: largest allocation of a rank that reports it (the first of each data-parallel group), in 10^9 bytes,
            with the memory that the fused layers allocate beside torch's allocator; None on the CPU.
        arguments: Megatron's sizes: seq_length, world_size, micro_batch_size, ...
        kernel_ms: of the fused layers, forward and backward, all layers of one microbatch; one entry a step, none
            without --log-mok or on the CPU.
        moe_ms: of whole MoE layers, router and shared expert included, in all microbatches of a step; none without
            --log-mok.
    """

    loss: list[float] = field(default_factory=list)
    milliseconds: list[float] = field(default_factory=list)
    tflops: list[float] = field(default_factory=list)
    samples: list[int] = field(default_factory=list)
    peak_gb: float | None = None
    arguments: dict[str, int] = field(default_factory=dict)
    kernel_ms: list[float] = field(default_factory=list)
    moe_ms: list[float] = field(default_factory=list)

    @property
    def step_ms(self) -> float:
        """Median of the steps behind the warm-up."""
        return statistics.median(self.milliseconds[self._skipped :])

    @property
    def step_tflops(self) -> float:
        return statistics.median(self.tflops[self._skipped :])

    @property
    def step_kernel_ms(self) -> float | None:
        """Of the fused layers' kernels in all microbatches of a step, from the median microbatch; None: not known."""
        if not self.kernel_ms:
            return None
        return statistics.median(self.kernel_ms[self._skipped :]) * self.microbatches

    @property
    def step_moe_ms(self) -> float | None:
        """Of whole MoE layers, in the median step; what reduces or checks gradients meanwhile counts too."""
        return statistics.median(self.moe_ms[self._skipped :]) if self.moe_ms else None

    @property
    def tokens_per_s(self) -> float:
        """A GPU (or CPU process), at the median step."""
        tokens = self.samples[-1] * self.arguments["seq_length"]
        return tokens / (self.step_ms / 1e3) / self.arguments["world_size"]

    @property
    def microbatches(self) -> int:
        """Of a step and rank."""
        return self.samples[-1] // (self.arguments["micro_batch_size"] * self.arguments["data_parallel_size"])

    @property
    def _skipped(self) -> int:
        return min(WARM_UP, len(self.milliseconds) // 2)

    def as_dictionary(self) -> dict[str, Any]:
        return {
            "steps": len(self.loss),
            "ms_per_step": self.step_ms,
            "tokens_per_s_per_gpu": self.tokens_per_s,
            "tflops_per_gpu": self.step_tflops,
            "kernel_ms_per_step": self.step_kernel_ms,
            "moe_ms_per_step": self.step_moe_ms,
            "peak_gb": self.peak_gb,
            "loss": self.loss,
            "milliseconds": self.milliseconds,
            "median_leaves_out_first": self._skipped,
        }


def read_log(text: str) -> Training:
    """The run behind the log ``text``; without steps where there was none.

    Reads the lines that --log-interval 1 --log-throughput and --log-memory-interval make Megatron print.
    """
    training = Training(arguments={name: int(value) for name, value in ARGUMENT.findall(text)})
    for _, line in STEP.findall(text):
        fields = {name.strip(): value for name, _, value in (part.rpartition(":") for part in line.split("|"))}
        if "lm loss" not in fields:
            continue
        training.loss.append(float(fields["lm loss"]))
        training.milliseconds.append(float(fields["elapsed time per iteration (ms)"]))
        training.tflops.append(float(fields.get("throughput per GPU (TFLOP/s/GPU)", "nan")))
        training.samples.append(int(fields["global batch size"]))
    peaks = [float(peak) * 2**20 / 1e9 for peak in PEAK.findall(text)]
    training.kernel_ms = [float(forward) + float(backward) for forward, backward in KERNELS.findall(text)]
    training.moe_ms = [float(forward) + float(backward) for forward, backward in LAYERS.findall(text)]
    symmetric = max((float(megabytes) for megabytes in SYMMETRIC.findall(text)), default=0.0) * 2**20 / 1e9
    training.peak_gb = max(peaks) + symmetric if peaks and max(peaks) > 0 else None
    return training
