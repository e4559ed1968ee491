"""One check's outcome, and the report of all of them."""

import dataclasses
import json
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum


class Status(IntEnum):
    """Also the exit status of the command: that of the worst check."""

    OK = 0
    WARNING = 1
    FAILURE = 2

    @property
    def label(self) -> str:
        return self.name.lower()


@dataclass(frozen=True)
class Check:
    """What was looked at, what was found, and what to do about it (None when ok)."""

    name: str
    status: Status
    found: str
    remedy: str | None = None


def ok(name: str, found: str) -> Check:
    return Check(name, Status.OK, found)


def warning(name: str, found: str, remedy: str) -> Check:
    return Check(name, Status.WARNING, found, remedy)


def failure(name: str, found: str, remedy: str) -> Check:
    return Check(name, Status.FAILURE, found, remedy)


def worst(checks: Sequence[Check]) -> Status:
    return max((check.status for check in checks), default=Status.OK)


def as_json(checks: Sequence[Check], verdict: str) -> str:
    """``{"status", "verdict", "checks": [{"name", "status", "found", "remedy"}]}``."""
    listed = [dataclasses.asdict(check) | {"status": check.status.label} for check in checks]
    return json.dumps({"status": worst(checks).label, "verdict": verdict, "checks": listed}, indent=2)


def as_text(checks: Sequence[Check], verdict: str, colour: bool = False, width: int = 110) -> str:
    """A line a check, its remedy below it, and the verdict last."""
    marks = {Status.OK: "\033[32m", Status.WARNING: "\033[33m", Status.FAILURE: "\033[31m"}
    name_width = max((len(check.name) for check in checks), default=0)
    indent = " " * (9 + name_width + 2)
    lines = []
    for check in checks:
        label = f"{check.status.label:<9}"
        if colour:
            label = f"{marks[check.status]}{label}\033[0m"
        head = f"{check.name:<{name_width}}  "
        body = textwrap.fill(check.found, width - 9, initial_indent=head, subsequent_indent=" " * len(head))
        lines.append(label + body.replace("\n", "\n" + " " * 9))
        if check.remedy:
            lines.append(
                textwrap.fill("-> " + check.remedy, width, initial_indent=indent, subsequent_indent=indent + "   ")
            )
    return "\n".join([*lines, "", verdict])
