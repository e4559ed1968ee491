#!/usr/bin/env bash
# Sets up .venv if need be, then ruff, mypy and pytest; pytest's summary comes last.
#
#   scripts/test.sh                      everything
#   scripts/test.sh tests/build -k lock  a part: arguments go to pytest, ruff and mypy are left out
#   MOK_TEST_WORKERS=4                   parallel pytest processes (default 2; 0 on a machine with GPUs)
set -euo pipefail
cd "$(dirname "$0")/.."
bash scripts/setup.sh
bin=${MOK_VENV:-.venv}/bin
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

if [[ $# -eq 0 ]]; then
    bash scripts/lint.sh
fi
# Tests on one GPU must not run side by side: they measure memory and start kernels that fill the device.
workers=${MOK_TEST_WORKERS:-$(if nvidia-smi -L >/dev/null 2>&1; then echo 0; else echo 2; fi)}
exec "$bin/python" -m pytest -n "$workers" --dist loadfile "$@"
