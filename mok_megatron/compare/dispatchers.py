"""The token dispatchers that can be compared: Megatron's flags for each, and whether it can run here."""

from __future__ import annotations

import importlib.util

from mok_megatron.errors import Problems

DISPATCHERS = ("mok", "alltoall", "hybridep", "deepep")
FLEX = ("hybridep", "deepep")
"""Backends of Megatron's flex dispatcher, from the package deep_ep."""


def dispatcher_type(name: str) -> str:
    """The value of --moe-token-dispatcher-type."""
    return "flex" if name in FLEX else name


def dispatcher_flags(name: str, grouped: bool) -> list[str]:
    """Megatron's flags besides the type.

    Args:
        grouped: use Transformer Engine's grouped products and fused permutation; elsewhere Megatron runs one expert
            after another. The fused layer has products of its own: there the flag only makes the initial weights be
            drawn in the same order.
    """
    flags = ["--moe-grouped-gemm"] if grouped else []
    if name in FLEX:
        flags += ["--moe-flex-dispatcher-backend", name]
    if grouped and name != "mok":
        flags += ["--moe-permute-fusion"]
    return flags


def require_dispatcher(name: str, on_gpus: bool, transformer_engine: bool, problems: Problems) -> None:
    """Note what is missing to run ``name`` here.

    Args:
        on_gpus: the preset trains on GPUs.
        transformer_engine: its layers are Transformer Engine's.
    """
    if name not in DISPATCHERS:
        problems.add(f"--dispatcher {name!r} is unknown", f"choose one of {', '.join(DISPATCHERS)}")
        return
    if name in FLEX:
        if not on_gpus:
            problems.add(f"--dispatcher {name} needs GPUs", "use mok or alltoall on the CPU")
        elif not _has_deep_ep(name):
            branch = "branch hybrid-ep" if name == "hybridep" else "version 1"
            problems.add(
                f"--dispatcher {name}: the package deep_ep is not installed, or without the class that {name} needs",
                f"build it from github.com/deepseek-ai/DeepEP, {branch}",
            )
    if on_gpus and transformer_engine and importlib.util.find_spec("transformer_engine") is None:
        problems.add(
            "Transformer Engine is not installed",
            "EXTRAS=te scripts/setup.sh, or pass --transformer-impl local and the flags that Megatron asks for then",
        )


def missing(name: str, on_gpus: bool, transformer_engine: bool) -> str | None:
    """Why ``name`` cannot run here, in one line; None: it can."""
    problems = Problems()
    require_dispatcher(name, on_gpus, transformer_engine, problems)
    return "; ".join(line.split(". ", 1)[1] for line in problems.text("").splitlines()[1:]) or None


def _has_deep_ep(name: str) -> bool:
    if importlib.util.find_spec("deep_ep") is None:
        return False
    from megatron.core.transformer.moe import fused_a2a

    return bool(fused_a2a.HAVE_HYBRIDEP if name == "hybridep" else fused_a2a.HAVE_DEEP_EP)
