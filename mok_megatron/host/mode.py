"""Switching CPU host mode on and off (the names it replaces are in :mod:`mok_megatron.host.replacements`)."""

import contextlib
import importlib
from collections.abc import Iterator
from typing import Any

import torch

from mok_megatron.errors import MokError
from mok_megatron.host.replacements import REPLACEMENTS, TRAINING_REPLACEMENTS

_originals: list[tuple[Any, str, Any]] = []  # (owner, attribute, original value), in the order of replacement


class HostModeError(MokError, RuntimeError):
    """CPU host mode was asked for where it must not run."""


def active() -> bool:
    """True while CPU host mode is on in this process."""
    return bool(_originals)


def enable(training: bool = False) -> None:
    """Make Megatron Core run on the CPU in this process, with gloo. Idempotent.

    Args:
        training: Megatron's training framework (``megatron.training``) too.

    Raises:
        HostModeError: this machine has a GPU; Megatron Core needs no help there, and replaced names would break it.
    """
    if torch.cuda.is_available():
        raise HostModeError(
            f"CPU host mode refused: torch finds {torch.cuda.device_count()} CUDA device(s) here. Train on them, or "
            "hide them with CUDA_VISIBLE_DEVICES='' to run on the CPU."
        )
    table = REPLACEMENTS + TRAINING_REPLACEMENTS if training else REPLACEMENTS
    done = {(owner, attribute) for owner, attribute, _ in _originals}
    # Found before any is replaced: finding imports Megatron, whose modules then bind the original names.
    places = [_place(entry.module, entry.name) for entry in table]
    for entry, (owner, attribute) in zip(table, places, strict=True):
        if (owner, attribute) in done:
            continue
        original = getattr(owner, attribute)
        inherited = isinstance(owner, type) and attribute not in vars(owner)
        _originals.append((owner, attribute, _INHERITED if inherited else original))
        setattr(owner, attribute, entry.build(original))
    # Megatron's jit_fuser is torch.compile, which would need a C++ compiler and minutes; eager gives the same values.
    torch.compiler.set_stance("force_eager")


def disable() -> None:
    """Put back every name that :func:`enable` replaced. Does nothing when host mode is off."""
    if not active():
        return
    while _originals:
        owner, attribute, original = _originals.pop()
        if original is _INHERITED:
            delattr(owner, attribute)
        else:
            setattr(owner, attribute, original)
    torch.compiler.set_stance("default")


@contextlib.contextmanager
def cpu_host_mode(training: bool = False) -> Iterator[None]:
    """CPU host mode for a ``with`` block; left on afterwards if it was on before."""
    was_active = active()
    enable(training)
    try:
        yield
    finally:
        if not was_active:
            disable()


_INHERITED = object()


def _place(module: str, name: str) -> tuple[Any, str]:
    """The object that holds ``name``, and the attribute's own name."""
    owner: Any = importlib.import_module(module)
    *parents, attribute = name.split(".")
    for parent in parents:
        owner = getattr(owner, parent)
    return owner, attribute
