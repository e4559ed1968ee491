"""Every error that this package raises on purpose, and the list that a refusal is made from."""

from __future__ import annotations


class MokError(Exception):
    """Base of the errors that mok_megatron raises."""


class MokConfigError(MokError, ValueError):
    """A configuration that cannot work. The message lists every problem and its remedy."""


class MokInputError(MokError, ValueError):
    """Arguments of the operator that do not fit, on this rank or on a peer."""


class MokBackendError(MokError, RuntimeError):
    """The backend that was asked for cannot run here."""


class MokTimeoutError(MokError, RuntimeError):
    """A wait on a peer passed its deadline; the message names the peer and the flag."""


class MokCapacityError(MokError, RuntimeError):
    """More routed rows arrived than the schedule can hold."""


class Problems:
    """Collects problems, each with its remedy, so that one message can list them all."""

    def __init__(self) -> None:
        self._lines: list[str] = []

    def add(self, problem: str, remedy: str) -> None:
        """Note one problem (what is wrong, with its value) and what to do about it."""
        self._lines.append(f"{problem}; {remedy}")

    def require(self, condition: bool, problem: str, remedy: str) -> None:
        """Note the problem unless `condition` holds."""
        if not condition:
            self.add(problem, remedy)

    def __bool__(self) -> bool:
        return bool(self._lines)

    def text(self, title: str) -> str:
        """The title, then one line a problem."""
        return title + "".join(f"\n  {i}. {line}" for i, line in enumerate(self._lines, 1))

    def raise_if_any(self, error: type[MokError], title: str) -> None:
        """Raise `error` with every problem, if there is one."""
        if self._lines:
            raise error(self.text(title))
