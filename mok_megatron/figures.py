"""What the figures and names of configuration files may be.

Each check yields (key, what is wrong), as a dataclass's `check` does for `typed_yaml.load_typed`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

Check = Iterator[tuple[str, str]]

# Far beyond any machine or model, and small enough for a plan to be searched: a slip of the keyboard is named, and not
# waited for.
MOST = {
    "num_experts": 1 << 16,
    "num_layers": 10_000,
    "mtp_layers": 100,
    "num_heads": 1 << 16,
    "vocab_size": 1 << 30,
    "global_batch_size": 1 << 30,
    "sms": 1 << 16,
    "gpus": 1024,
    "nodes": 1 << 16,
}
MOST_OTHERS = 1 << 24
SMALLEST, LARGEST = 1e-6, 1e9
"""Of figures that are no whole numbers, in the units of the files."""

WORD = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
"""What may be part of a script, a host name or a Slurm file."""


def in_range(instance: object, least: int, names: Iterable[str]) -> Check:
    """Whole numbers from `least` to what MOST says; None is left alone."""
    for name in names:
        value, most = getattr(instance, name), MOST.get(name, MOST_OTHERS)
        if value is not None and value < least:
            yield name, f"is {value}; it must be at least {least}"
        if value is not None and value > most:
            yield name, f"is beyond {most}"


def is_word(instance: object, names: Iterable[str]) -> Check:
    """Names that may stand in scripts."""
    for name in names:
        value = getattr(instance, name)
        if not WORD.fullmatch(value):
            yield name, f"is {value!r}; take one word of letters, digits, '_', '.' and '-'"


def positive(instance: object, names: Iterable[str]) -> Check:
    """Figures above 0, and neither so small nor so large that arithmetic with them overflows."""
    for name in names:
        value = getattr(instance, name)
        if value <= 0:
            yield name, f"is {value}; it must be above 0"
        elif not SMALLEST <= value <= LARGEST:
            yield name, f"is {value}; figures lie between {SMALLEST:g} and {LARGEST:g}"
