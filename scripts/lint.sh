#!/usr/bin/env bash
# Style and types: ruff and mypy, as configured in pyproject.toml.
set -euo pipefail
cd "$(dirname "$0")/.."
bash scripts/setup.sh
bin=${MOK_VENV:-.venv}/bin
"$bin/ruff" check .
"$bin/mypy"
