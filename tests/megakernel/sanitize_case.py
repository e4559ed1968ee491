"""The kernels on small problems under compute-sanitizer; `sanitize.py` starts it. Exits with 1 if a value is wrong.

    python -m tests.megakernel.sanitize_case [--no-values] [part of the name of a case ...]

Virtual ranks on one GPU with few CTAs, so that instrumented kernels end in seconds, and deadlines of minutes.
"""

from __future__ import annotations

import sys

import torch

from mok_megatron.config import MokConfig
from mok_megatron.selftest.problem import (
    Problem,
    Result,
    VirtualRanks,
    kernel_config,
    make_problem,
    plain,
    reference,
    relative_error,
)

# Sizes that are no multiple of a tile; experts whose segments are cut by the end of a macrobatch. With block scales H
# and I are multiples of 128.
CASES = {
    "one rank, rows evicted, shared expert": (1, {"shared": 192, "scale": True}, {"macrobatch_size": 256}),
    "two ranks": (2, {}, {}),
    "two ranks, rows evicted, CTAs that only move rows": (
        2,
        {"shared": 64},
        {"macrobatch_size": 256, "fwd_comm_sms": 1, "bwd_comm_sms": 1},
    ),
    "FP8, one rank, rows evicted, shared expert": (
        1,
        {"shared": 192, "scale": True},
        {"macrobatch_size": 256, "format": "blockwise"},
    ),
    "FP8, two ranks": (2, {}, {"format": "blockwise"}),
    "FP8, two ranks, rows evicted, CTAs that only move rows": (
        2,
        {"shared": 64},
        {"macrobatch_size": 256, "fwd_comm_sms": 1, "bwd_comm_sms": 1, "format": "blockwise"},
    ),
    "MXFP8, two ranks, E5M2 gradients": (2, {}, {"format": "mxfp8", "fp8_gradients": "e5m2"}),
    "MXFP8, two ranks, rows evicted, CTAs that only move rows": (
        2,
        {"shared": 64},
        {"macrobatch_size": 256, "fwd_comm_sms": 1, "bwd_comm_sms": 1, "format": "mxfp8"},
    ),
}
FP8_BOUND = {"blockwise": 0.01, "mxfp8": 0.003}
"""Of the error relative to the reference, as in test_fp8.py."""


def expected(problem: Problem, config: MokConfig) -> tuple[Result, dict[str, float]]:
    """What is right, and by how much each of it may be off."""
    if config.format != "bf16":
        wanted = reference(problem, config)
        return wanted, dict.fromkeys(wanted, FP8_BOUND[config.format])
    exact, rounded = plain(problem, torch.float64), plain(problem, torch.bfloat16)
    return exact, {name: 1.5 * relative_error(rounded[name], value) for name, value in exact.items()}


def main(names: list[str], compare: bool) -> int:
    """Run the cases whose names contain one of `names` (all, if there are none), and compare their values."""
    wrong = 0
    for name, (ranks, problem_settings, settings) in CASES.items():
        if names and not any(part in name for part in names):
            continue
        config = kernel_config(minibatch_size=128, num_sms=4, timeout_s=100.0, **settings)
        sizes = (384, 384) if config.format == "blockwise" else (320, 192)
        problem = make_problem(200, *sizes, 4, 2, **problem_settings)
        found = VirtualRanks(problem, ranks, config).run(problem, main_grad=torch.float32)
        print(f"{name}: done", flush=True)
        if not compare:
            continue
        wanted, bounds = expected(problem, config)
        for key, value in wanted.items():
            got = found[key] - 1.0 if key.startswith(("dw1", "dw2")) else found[key]
            if key.startswith("dshared"):
                got = found[key] - ranks  # the sum of every rank's, each with ones in it
            error = relative_error(got, value)
            if not error <= bounds[key]:
                print(f"{name}: {key} is off by {error:.2e}, and {bounds[key]:.2e} is allowed")
                wrong = 1
    return wrong


if __name__ == "__main__":
    words = sys.argv[1:]
    sys.exit(main([word for word in words if word != "--no-values"], "--no-values" not in words))
