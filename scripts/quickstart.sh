#!/usr/bin/env bash
# Sets up .venv if need be, then trains a small DeepSeek-V3-shaped model with mok and with alltoall and compares them.
#
#   scripts/quickstart.sh                writes runs/quickstart/{summary.json,loss.png}; exits 1 if the two differ
#   scripts/quickstart.sh --help         options, for example --steps 20 --out runs/short
set -euo pipefail
cd "$(dirname "$0")/.."
bash scripts/setup.sh
exec "${MOK_VENV:-.venv}/bin/python" -m mok_megatron.training.quickstart "$@"
