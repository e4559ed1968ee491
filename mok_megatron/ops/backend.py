"""What a backend provides, and which one a call gets."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from mok_megatron.config import MokConfig
from mok_megatron.errors import MokBackendError
from mok_megatron.ops.inputs import MoeGradients, MoeInputs


class Backend(Protocol):
    """Computes the operator, forward and backward."""

    name: str

    def forward(self, call: MoeInputs) -> tuple[Tensor, Any]:
        """Returns y [T, H] in x's dtype, and what `backward` needs (tensors that no caller may change)."""

    def backward(self, call: MoeInputs, saved: Any, dy: Tensor, into_main_grad: bool) -> MoeGradients:
        """Gradients for dy [T, H]. With `into_main_grad`, weights that have one get theirs added to `main_grad`."""


def megakernel_problem(device: torch.device) -> str | None:
    """Why the megakernel cannot run on `device`, or None."""
    try:
        from mok_megatron import megakernel
    except ImportError as error:
        return f"the megakernel is not part of this installation ({error})"
    return megakernel.unavailable_reason(device)


def select_backend(config: MokConfig, device: torch.device) -> Backend:
    """The backend that `config.backend` names, for operands on `device`.

    'auto' is the megakernel on CUDA devices and the reference elsewhere; it never falls back from the one to the
    other by itself.

    Raises:
        MokBackendError: the megakernel is asked for, or meant by 'auto', and cannot run here.
    """
    if config.backend == "reference" or (config.backend == "auto" and device.type == "cpu"):
        from mok_megatron.reference.backend import ReferenceBackend

        return ReferenceBackend()
    problem = megakernel_problem(device)
    if problem is not None:
        raise MokBackendError(
            f"--mok-backend {config.backend}: {problem}; to run the layer in plain torch instead, much slower, "
            "set --mok-backend reference"
        )
    from mok_megatron import megakernel

    return megakernel.MegakernelBackend()
