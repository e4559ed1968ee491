#!/usr/bin/env bash
# Trains the same model under several token dispatchers, one after another, and reports which is faster.
#
#   scripts/compare.sh --preset proxy-2gpu --dispatchers mok,hybridep,alltoall --steps 50
#   scripts/compare.sh --preset proxy-1gpu --dispatchers mok,alltoall --steps 50
#   scripts/compare.sh --preset tiny --dispatchers mok,alltoall --steps 3      on the CPU
#   scripts/compare.sh --help
#
# Writes report.md, summary.json, compare.png and the logs to runs/compare-PRESET. Exit status: 0; 1 where a training
# failed; 2 where it cannot run as asked. Other arguments go to scripts/pretrain_deepseek_v3.sh; see there for PYTHON.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
if [[ -z ${PYTHON:-} ]]; then
    bash "$root/scripts/setup.sh"
    venv=${MOK_VENV:-$root/.venv}
    PYTHON=$(cd "$venv" && pwd)/bin/python
fi
export PYTHON
for argument in "$@"; do # the CPU preset takes no GPU, wherever it runs
    if [[ $argument == tiny || $argument == --preset=tiny ]]; then export CUDA_VISIBLE_DEVICES=''; fi
done
exec "$PYTHON" -W ignore -m mok_megatron.compare.command "$@"
