"""Runs nvcc: the translation units in parallel, each with a deadline, then the link."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from mok_megatron.build.errors import BuildError

# A translation unit that instantiates CUTLASS templates takes this much memory in cicc and ptxas.
GIB_A_JOB = 3
OUTPUT_LINES = 60


@dataclass
class Command:
    """One run of nvcc that writes ``output``. ``label`` is what the progress line calls it."""

    label: str
    arguments: list[str]
    output: Path
    seconds: float = 0.0
    text: str = ""  # what it printed


@dataclass
class _Running:
    command: Command
    process: subprocess.Popen[bytes]
    printed: IO[bytes]
    start: float = field(default_factory=time.monotonic)

    def text(self) -> str:
        self.printed.seek(0)
        return self.printed.read().decode(errors="replace")


def default_jobs() -> int:
    """How many compilations run at once: the cores this process may use, fewer where memory is short."""
    cores = len(os.sched_getaffinity(0))
    memory = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    return max(1, min(cores, int(memory / GIB_A_JOB)))


def run_all(commands: Sequence[Command], jobs: int, deadline_s: float, progress: "Progress") -> None:
    """Runs ``commands``, at most ``jobs`` at once. The first failure stops the others and raises BuildError.

    Each command's output appears whole or not at all: nvcc writes to a temporary name that is renamed on
    success. ``deadline_s`` limits all commands together.
    """
    waiting, running = list(commands), list[_Running]()
    start = time.monotonic()
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                running.append(_begin(waiting.pop(0)))
            for one in [one for one in running if one.process.poll() is not None]:
                running.remove(one)
                _finish(one, progress)
            if time.monotonic() - start > deadline_s:
                names = ", ".join(one.command.label for one in running)
                raise BuildError(
                    f"nvcc has not finished {names} after {deadline_s:.0f} s: allow more with "
                    "MOK_BUILD_TIMEOUT_S, "
                    "or fewer compilations at once with 'mok-megatron build --jobs 1'"
                )
            progress.tick([one.command.label for one in running])
            time.sleep(0.05)
    finally:
        for one in running:
            os.killpg(one.process.pid, signal.SIGKILL)  # nvcc's own children too
            one.process.wait()
            one.printed.close()
            _partial(one.command).unlink(missing_ok=True)


def _partial(command: Command) -> Path:
    return command.output.with_name(f"{command.output.stem}.{os.getpid()}.partial{command.output.suffix}")


def _begin(command: Command) -> _Running:
    printed = tempfile.TemporaryFile()
    arguments = [*command.arguments, "-o", str(_partial(command))]
    try:
        process = subprocess.Popen(
            arguments,
            stdin=subprocess.DEVNULL,
            stdout=printed,
            stderr=subprocess.STDOUT,
            process_group=0,
            umask=0o022,  # objects that others may write would not be linked
        )
    except OSError as error:
        printed.close()
        raise BuildError(f"cannot run {arguments[0]}: {error}") from error
    return _Running(command, process, printed)


def _finish(one: _Running, progress: "Progress") -> None:
    command = one.command
    command.seconds = time.monotonic() - one.start
    command.text = one.text()
    one.printed.close()
    partial = _partial(command)
    if one.process.returncode != 0 or not partial.exists():
        partial.unlink(missing_ok=True)
        raise BuildError(failure_message(command, one.process.returncode))
    partial.replace(command.output)
    progress.done(command)


def failure_message(command: Command, returncode: int) -> str:
    """What nvcc printed, errors first when it is long, and the command to repeat by hand."""
    lines = command.text.splitlines()
    if len(lines) > OUTPUT_LINES:
        errors = [line for line in lines if "error" in line.lower() or "fatal" in line.lower()]
        left_out = len(lines) - OUTPUT_LINES
        lines = [*errors[:20], f"[... {left_out} lines left out ...]", *lines[-(OUTPUT_LINES - 20) :]]
    body = "\n".join("  " + line for line in lines) or "  (it printed nothing)"
    if returncode < 0 or "signal 9" in command.text:
        body += "\n  (killed: often the system running out of memory; use 'mok-megatron build --jobs 1')"
    return f"nvcc failed on {command.label}:\n{body}\nCommand: {' '.join(command.arguments)}"


class Progress:
    """Says on standard error what is being compiled: a line a file, and on a terminal one that changes."""

    def __init__(self, shown: bool = True, stream: IO[str] | None = None):
        self.shown, self.total, self.finished = shown, 0, 0
        self.stream = stream or sys.stderr
        self.live = shown and self.stream.isatty()
        self.start = self.last = time.monotonic()

    def say(self, line: str) -> None:
        """One line that stays."""
        if self.shown:
            clear = "\r\033[K" if self.live else ""
            print(f"{clear}mok_megatron: {line}", file=self.stream, flush=True)

    def done(self, command: Command) -> None:
        self.finished += 1
        self.say(f"[{self.finished}/{self.total}] {command.label}, {command.seconds:.0f} s")
        if command.text.strip():
            self.say("nvcc says:\n" + command.text.rstrip())  # warnings, or what -Xptxas -v asks for

    def tick(self, running: list[str]) -> None:
        now = time.monotonic()
        if self.live and now - self.last > 1:
            self.last = now
            state = f"{self.finished} of {self.total} done, {now - self.start:.0f} s"
            text = f"compiling, {state}: {', '.join(running)}"
            print(f"\r\033[K{text[:100]}", end="", file=self.stream, flush=True)
