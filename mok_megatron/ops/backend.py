"""What a backend provides, and which one a call gets."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from mok_megatron.config import MokConfig
from mok_megatron.errors import MokBackendError, Problems
from mok_megatron.ops.formats import check_format
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


def backend_name(config: MokConfig, device: torch.device) -> str:
    """The backend that `config.backend` means for operands on `device`; whether it can run is another question."""
    if config.backend == "auto":
        return "reference" if device.type == "cpu" else "megakernel"
    return config.backend


def select_backend(config: MokConfig, device: torch.device) -> Backend:
    """The backend that `config.backend` names, for operands on `device`.

    'auto' is the megakernel on CUDA devices and the reference elsewhere; it never falls back from the one to the
    other by itself.

    Raises:
        MokBackendError: the megakernel is asked for, or meant by 'auto', and cannot run here; or the backend has not
            the format that is asked for.
    """
    name = backend_name(config, device)
    problem = megakernel_problem(device) if name == "megakernel" else None
    if problem is not None:
        raise MokBackendError(
            f"--mok-backend {config.backend}: {problem}; to run the layer in plain torch instead, much slower, "
            "set --mok-backend reference"
        )
    problems = Problems()
    check_format(config, name, device, problems)
    problems.raise_if_any(MokBackendError, f"--mok-backend {config.backend} cannot run this layer:")
    if name == "reference":
        from mok_megatron.reference.backend import ReferenceBackend

        return ReferenceBackend()
    from mok_megatron import megakernel

    return megakernel.MegakernelBackend()
