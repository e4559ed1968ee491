"""The C interface of the kernel library (kernels/mok_api.h) in ctypes."""

from __future__ import annotations

import ctypes
import functools
import warnings
from collections.abc import Callable
from ctypes import POINTER, c_int32, c_int64, c_size_t, c_uint32, c_uint64, c_void_p

from mok_megatron.build import load_library
from mok_megatron.build.library import local_architecture
from mok_megatron.config import MokConfig
from mok_megatron.errors import MokBackendError

API_VERSION = 2

_INT32 = "ranks rank max_tokens hidden intermediate shared_intermediate experts_local topk"
_INT32 += " capacity_rows ring_rows minibatch_rows format"


class MokShape(ctypes.Structure):
    """What every rank of an expert-parallel group has agreed on."""

    _fields_ = [(name, c_int32) for name in _INT32.split()]


class MokError(ctypes.Structure):
    """The first failure of a rank, in pinned host memory."""

    _fields_ = [(name, c_int32) for name in ("code", "flag", "rank", "peer", "index")] + [
        (name, c_uint32) for name in ("expected", "seen", "epoch")
    ]


class MokTraceTile(ctypes.Structure):
    """When a CTA handled a tile; times in nanoseconds of the device's clock."""

    _fields_ = [(name, c_int32) for name in ("kind", "block", "column", "sm")] + [
        (name, c_uint64) for name in ("waiting", "started", "multiplied", "stored")
    ]


class MokWorkspace(ctypes.Structure):
    """Buffers of one rank, and how a launch uses the device."""

    _fields_ = [
        ("shape", MokShape),
        ("peers", c_void_p),
        ("scratch", c_void_p),
        ("error", c_void_p),
        ("timeout_ns", c_int64),
        ("num_ctas", c_int32),
        ("forward_comm_ctas", c_int32),
        ("backward_comm_ctas", c_int32),
        ("trace", c_void_p),
        ("trace_tiles", c_int32),
    ]


class MokSchedule(ctypes.Structure):
    """Who computes which row."""

    _fields_ = [
        (name, c_void_p)
        for name in ("row_source", "row_weight", "block_expert", "expert_offsets", "expert_rows", "info")
    ]


FORMATS = {"bf16": 0, "blockwise": 1, "mxfp8": 2, "mxfp8 e5m2": 3}
"""MokFormat, by MokConfig.format and the type of gradients where that is not E4M3."""


def format_number(config: MokConfig) -> int:
    """The MokFormat of a configuration that the megakernel has been found to support."""
    hybrid = config.format == "mxfp8" and config.fp8_gradients == "e5m2"
    return FORMATS["mxfp8 e5m2" if hybrid else config.format]


class MokScaledWeights(ctypes.Structure):
    """The routed experts' weights in E4M3 and their scales, both ways round; in MXFP8 as bf16; null in bf16."""

    _fields_ = [(name, c_void_p) for name in "w1 w1_scale w2 w2_scale w1_t w1_t_scale w2_t w2_t_scale".split()]


class MokForward(ctypes.Structure):
    """Operands and results of the forward."""

    _fields_ = (
        [("tokens", c_int32)]
        + [
            (name, c_void_p)
            for name in (
                "x topk_ids topk_weights w1 w2 shared_w1 shared_w2 shared_scale y x_rows gate_up shared_gate_up".split()
            )
        ]
        + [("scaled", MokScaledWeights)]
    )


class MokGrad(ctypes.Structure):
    """Where a weight gradient goes, and whether it is added to what is there."""

    _fields_ = [("data", c_void_p), ("dtype", c_int32), ("accumulate", c_int32)]


class MokBackward(ctypes.Structure):
    """Operands and results of the backward."""

    _fields_ = (
        [("tokens", c_int32)]
        + [
            (name, c_void_p)
            for name in (
                "dy x topk_ids w1 w2 shared_w1 shared_w2 shared_scale x_rows gate_up shared_gate_up dx "
                "dtopk_weights dshared_scale"
            ).split()
        ]
        + [(name, MokGrad) for name in ("dw1", "dw2", "dshared_w1", "dshared_w2")]
        + [("scaled", MokScaledWeights)]
    )


GRAD_BF16, GRAD_FP32 = 0, 1

_STRUCTS = (
    MokShape,
    MokError,
    MokTraceTile,
    MokWorkspace,
    MokSchedule,
    MokScaledWeights,
    MokForward,
    MokGrad,
    MokBackward,
)
_STEPS = ("mok_forward_prepare", "mok_forward", "mok_backward_prepare", "mok_backward")


@functools.cache
def library() -> ctypes.CDLL:
    """The kernel library of the current device, built at first use, with its argument types declared.

    Raises:
        MokBackendError: the library and this file describe different interfaces.
    """
    arch = local_architecture()
    if not arch.run:
        warnings.warn(
            f"the kernels for {arch.gpus} have been compiled and checked, and never run on one: see whether "
            "'mok-megatron selftest --gpu' holds, and docs/blackwell.md",
            stacklevel=2,
        )
    lib = load_library()
    lib.mok_last_error.restype = ctypes.c_char_p
    lib.mok_struct_bytes.argtypes, lib.mok_struct_bytes.restype = [ctypes.c_char_p], c_size_t
    for name in ("mok_symmetric_bytes", "mok_scratch_bytes", "mok_row_bytes"):
        getattr(lib, name).argtypes = [POINTER(MokShape)]
        getattr(lib, name).restype = c_size_t
    for name in _STEPS:
        operands = MokForward if "forward" in name else MokBackward
        getattr(lib, name).argtypes = [POINTER(MokWorkspace), POINTER(MokSchedule), POINTER(operands), c_void_p]
    different = [s.__name__ for s in _STRUCTS if lib.mok_struct_bytes(s.__name__.encode()) != ctypes.sizeof(s)]
    if lib.mok_api_version() != API_VERSION or different:
        raise MokBackendError(
            f"the kernel library has interface version {lib.mok_api_version()} and this package {API_VERSION}"
            + (f"; they differ in {', '.join(different)}" if different else "")
            + "; build it again: mok-megatron build --force"
        )
    return lib


@functools.cache
def _function(step: str) -> Callable[..., int]:
    function: Callable[..., int] = getattr(library(), step)
    return function


def enqueue(step: str, workspace: MokWorkspace, schedule: MokSchedule, operands: ctypes.Structure, stream: int) -> None:
    """Enqueue one of the library's steps on a CUDA stream.

    Raises:
        MokBackendError: the launch was refused, with CUDA's reason.
    """
    status = _function(step)(ctypes.byref(workspace), ctypes.byref(schedule), ctypes.byref(operands), stream)
    if status != 0:
        raise MokBackendError(f"{step}: {library().mok_last_error().decode()} (status {status})")
