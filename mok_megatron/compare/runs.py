"""Runs of a command that must end: each in a process group of its own, with a deadline, its output in a file."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

from mok_megatron.errors import MokError

POLL_S = 0.2
GRACE_S = 45.0
"""torchrun gives its ranks 30 s to end before it kills them."""
CAUSES = re.compile(r"(?m)^.*?((?:[\w.]*(?:Error|Exception)\b|pretrain|Signal \d+)[: (].*)$")


class RunError(MokError):
    """A run failed or passed its deadline; the message says why and where its output is."""


class RefusedError(RunError):
    """The run did not start: its arguments or this machine do not fit."""


def run_logged(command: list[str], log: Path, deadline_s: float, show: str | None = None) -> str:
    """Run ``command`` to its end and return its output, which also goes to the file ``log``.

    Args:
        deadline_s: seconds after which it is ended with an error.
        show: a regular expression; the last new line that it matches goes to stderr as progress.

    Raises:
        RefusedError: it ended with status 2, which the scripts and Python's argparse use for a refusal.
        RunError: it failed otherwise, or the deadline passed; none of its processes is left.
    """
    deadline = time.monotonic() + deadline_s
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
    position = 0
    try:
        while process.poll() is None:
            if time.monotonic() > deadline:
                raise RunError(f"did not finish within --deadline {deadline_s:.0f} s and was ended; output: {log}")
            time.sleep(POLL_S)
            position = _progress(log, position, show)
        _progress(log, position, show)
    finally:
        end(process)
    text = log.read_text(errors="replace")
    if process.returncode == 2:
        raise RefusedError("\n".join(line for line in text.splitlines()[-20:] if line.strip()))
    if process.returncode != 0:
        raise RunError(f"failed with exit status {process.returncode}: {cause(text)}; output: {log}")
    return text


def end(process: subprocess.Popen[bytes]) -> None:
    """End a process group that `run_logged` started, ranks included: asked first, then killed."""
    if process.poll() is not None:
        return
    os.killpg(process.pid, signal.SIGTERM)  # torchrun ends its ranks, which have sessions of their own
    try:
        process.wait(GRACE_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def cause(text: str) -> str:
    """The first line of ``text`` that names an error; a killed rank first, for it explains the others' errors."""
    killed = re.search(r"Signal \d+ \(SIG\w+\) received by PID \d+", text)
    found = CAUSES.findall(text)
    return killed[0] if killed else found[0].strip() if found else "no message"


def _progress(log: Path, position: int, show: str | None) -> int:
    with log.open("rb") as file:
        file.seek(position)
        new = file.read()
    lines = new[: new.rfind(b"\n") + 1]
    if show is not None and (found := re.findall(show, lines.decode(errors="replace"))):
        print(f"  {found[-1].strip()}", file=sys.stderr, flush=True)
    return position + len(lines)
