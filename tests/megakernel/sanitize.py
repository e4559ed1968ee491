"""`make sanitize`: compute-sanitizer's four tools over the cases of sanitize_case.py, and a table of what they found.

    python -m tests.megakernel.sanitize [--tools memcheck,synccheck] [case ...]

What the tools cannot see. They know one process, so memory of a peer is that of another virtual rank on the same GPU.
racecheck knows shared memory only (tests/protocol has the order of flags and rows in global memory), and is given the
prepare kernel alone: in the megakernel roles hand shared memory to one another by mbarriers at which one lane arrives
for its warp, which it takes for races.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

# The kernels that each looks into. initcheck must see who writes memory, so torch's too.
TOOLS = {"memcheck": "kns=mok", "initcheck": "", "synccheck": "kns=mok", "racecheck": "kns=prepare_kernel"}
# Values are compared with products of cuBLAS. initcheck takes what those write with the copy engine for not written,
# and racecheck (2025.3) ends in an internal error at them, also where it is told to look into no kernel at all.
NO_VALUES = {"initcheck", "racecheck"}
PACKAGE = "nvidia-cuda-sanitizer-api>=13.0,<14"


def find_sanitizer() -> str | None:
    """compute-sanitizer: on PATH, in a CUDA toolkit, or from the package in this environment."""
    toolkits = [os.environ.get("CUDA_HOME"), "/usr/local/cuda"]
    folders = [f"{toolkit}/bin" for toolkit in toolkits if toolkit]
    folders.append(f"{sysconfig.get_path('purelib')}/nvidia/cu13/bin")
    return shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path=os.pathsep.join(folders))


def install() -> str | None:
    """compute-sanitizer from PyPI, into this environment."""
    print(f"sanitize: no compute-sanitizer on PATH, in CUDA_HOME or beside torch: installing {PACKAGE}", flush=True)
    subprocess.run([sys.executable, "-m", "pip", "install", "-q", PACKAGE], check=False, timeout=300)
    return find_sanitizer()


def run_tool(sanitizer: str, tool: str, cases: list[str], timeout_s: float) -> tuple[bool, str, float, str]:
    """Whether it found nothing, its summary, seconds, and all it printed."""
    command = [sanitizer, "--tool", tool, "--error-exitcode", "9", "--print-limit", "20"]
    command += ["--kernel-name", TOOLS[tool]] if TOOLS[tool] else []
    options = ["--no-values"] if tool in NO_VALUES else []
    # One allocation a tensor: a write past the end of one would land in another unnoticed.
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    begin = time.monotonic()
    try:
        done = subprocess.run(
            [*command, sys.executable, "-m", "tests.megakernel.sanitize_case", *options, *cases],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment, timeout=timeout_s,
            cwd=Path(__file__).resolve().parents[2],
        )  # fmt: skip
        ok, text = done.returncode == 0, done.stdout
    except subprocess.TimeoutExpired as error:
        ok, text = False, f"{(error.stdout or b'').decode()}\nnot done within {timeout_s:g} s"
    summary = re.findall(r"=+ (.*(?:ERROR SUMMARY|RACECHECK SUMMARY).*)", text)
    return ok and bool(summary), summary[-1] if summary else "no summary", time.monotonic() - begin, text


def main() -> int:
    """0 if every tool found nothing and every value was right."""
    parser = argparse.ArgumentParser(prog="sanitize", description="compute-sanitizer over small launches")
    parser.add_argument("cases", nargs="*", help="parts of the names of cases; default: all")
    parser.add_argument("--tools", default=",".join(TOOLS), help="default: %(default)s")
    parser.add_argument("--timeout-s", type=float, default=600.0, help="for each tool; default: %(default)s")
    arguments = parser.parse_args()
    unknown = set(arguments.tools.split(",")) - set(TOOLS)
    if unknown:
        parser.error(f"--tools {','.join(sorted(unknown))}: choose from {', '.join(TOOLS)}")
    sanitizer = find_sanitizer() or install()
    if sanitizer is None:
        print(f"sanitize: pip could not install {PACKAGE}; a CUDA toolkit has compute-sanitizer too (set CUDA_HOME)")
        return 2
    rows, all_ok = [], True
    for tool in arguments.tools.split(","):
        ok, summary, seconds, text = run_tool(sanitizer, tool, arguments.cases, arguments.timeout_s)
        if not ok:
            print(text)
        rows.append(f"{tool:10} {'ok' if ok else 'FAILED':7} {seconds:6.1f} s  {summary}")
        all_ok &= ok
    print("\n".join(rows))
    return 0 if all_ok else 1


if __name__ == "__main__":
    sys.exit(main())
