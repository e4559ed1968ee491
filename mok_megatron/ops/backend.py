"""What a backend provides, and which one a call gets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from mok_megatron.config import MokConfig
from mok_megatron.errors import MokBackendError, Problems
from mok_megatron.ops.formats import check_format
from mok_megatron.ops.inputs import MoeGradients, MoeInputs


@dataclass(frozen=True)
class Routing:
    """How many rows a forward computed on this rank. Tensors on the device: reading one waits for the kernel."""

    rows: Tensor
    """[E_local] int32: rows of each expert, without padding."""
    used: Tensor
    """[] int32: rows of the schedule, padding included."""
    macrobatch_rows: int
    """Rows whose activations are kept; those of `used` beyond it are computed again in the backward."""


class Observer(Protocol):
    """Whoever wants to know what a call of the operator does. Must not wait for the device."""

    def before(self, direction: str) -> None:
        """Before the work of a direction, "forward" or "backward", is enqueued."""

    def after(self, direction: str, routing: Routing | None) -> None:
        """After it was enqueued; `routing` with the forward."""


MOST_SELECTED = 64


class Backend(Protocol):
    """Computes the operator, forward and backward."""

    name: str

    def forward(self, call: MoeInputs) -> tuple[Tensor, Any]:
        """Returns y [T, H] in x's dtype, and what `backward` needs (tensors that no caller may change)."""

    def routing(self, call: MoeInputs, saved: Any) -> Routing:
        """What a forward of this backend found, from what it saved."""

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


_selected: dict[int, tuple[MokConfig, torch.device, Backend]] = {}
"""By the identity of the settings, which an entry keeps alive: layers ask with the same object at every call."""


def select_backend(config: MokConfig, device: torch.device) -> Backend:
    """The backend that `config.backend` names, for operands on `device`.

    'auto' is the megakernel on CUDA devices and the reference elsewhere; it never falls back from the one to the
    other by itself.

    Raises:
        MokBackendError: the megakernel is asked for, or meant by 'auto', and cannot run here; or the backend has not
            the format that is asked for.
    """
    known = _selected.get(id(config))
    if known is not None and known[1] == device:
        return known[2]
    backend = _checked_backend(config, device)
    if len(_selected) >= MOST_SELECTED:
        _selected.clear()
    _selected[id(config)] = (config, device, backend)
    return backend


def _checked_backend(config: MokConfig, device: torch.device) -> Backend:
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
