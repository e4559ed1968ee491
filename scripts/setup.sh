#!/usr/bin/env bash
# Creates .venv with the tested versions and this checkout installed in place. Quick when nothing changed.
#
#   EXTRAS=te scripts/setup.sh      adds Transformer Engine (compiles for long; needs a CUDA toolkit)
#   MOK_PYTHON=/path/to/python      takes that interpreter instead of searching for one
#   MOK_VENV=/path                  puts the environment there instead of .venv
set -euo pipefail
cd "$(dirname "$0")/.."
venv=${MOK_VENV:-.venv}
extras=dev${EXTRAS:+,$EXTRAS}
stamp=$venv/.mok-setup

say() { echo "setup: $*" >&2; }

# A usable interpreter runs (a pyenv shim may not), is 3.12 or later, and can create environments.
usable() {
    "$1" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 12))' >/dev/null 2>&1
}

find_python() {
    local candidate
    if [[ -n ${MOK_PYTHON:-} ]]; then
        if usable "$MOK_PYTHON"; then echo "$MOK_PYTHON"; return 0; fi
        say "MOK_PYTHON=$MOK_PYTHON is not a Python 3.12 or later with the modules venv and ensurepip"
        return 1
    fi
    for candidate in python3.12 python3.13 python3.14 python3 python \
        "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.1[2-9]*/bin/python \
        "$HOME"/.local/share/uv/python/cpython-3.1[2-9]*/bin/python3; do
        if command -v "$candidate" >/dev/null 2>&1 && usable "$candidate"; then
            command -v "$candidate"
            return 0
        fi
    done
    say "no Python 3.12 or later with venv found on PATH, in pyenv or in uv. Install one, for example"
    say "    Debian, Ubuntu: apt-get install python3.12 python3.12-venv     pyenv: pyenv install 3.12"
    say "    uv: uv python install 3.12     conda: conda create -n py312 python=3.12 && conda activate py312"
    say "or name one: MOK_PYTHON=/path/to/python3.12 make setup"
    return 1
}

# What the environment was made from: reinstall when any of it changes.
fingerprint() {
    { cat pyproject.toml setup.py constraints.txt; echo "$extras"; pwd; "$venv/bin/python" --version; } | sha256sum
}

if [[ -x $venv/bin/python && -f $stamp ]] && usable "$venv/bin/python" && [[ $(fingerprint) == "$(cat "$stamp")" ]]; then
    exit 0
fi

if ! { [[ -x $venv/bin/python ]] && usable "$venv/bin/python" && "$venv/bin/python" -m pip --version >/dev/null 2>&1; }; then
    python=$(find_python)
    say "creating $venv with $("$python" --version) ($python)"
    rm -rf "$venv"
    "$python" -m venv "$venv"
fi

free_gib=$(($(df -Pk "$venv" | awk 'NR == 2 {print $4}') / 1024 / 1024))
if [[ ! -d $(echo "$venv"/lib/python3*/site-packages/torch) && $free_gib -lt 12 ]]; then
    say "warning: $free_gib GiB free on $(df -P "$venv" | awk 'NR == 2 {print $6}'); torch and its CUDA libraries need about 6, and as much while they install"
fi

say "installing mok-megatron[$extras] with the versions in constraints.txt into $venv (a few minutes the first time)"
rm -f "$stamp"
log=$venv/setup.log
rm -f "$log"
[[ -t 2 ]] && show=(--progress-bar on) || show=(-q --progress-bar off) # a log needs no progress bars
install() {
    if "$venv/bin/python" -m pip --disable-pip-version-check --log "$log" install "${show[@]}" -c constraints.txt "$@" >&2
    then return; fi
    say "pip failed; its words are above, and all it did is in $log. Often: no network or proxy (see 'pip config"
    say "list'), a full disk ($free_gib GiB were free), or a Python too new for torch (name another: MOK_PYTHON=...)."
    say "Run the same command again after that: what was downloaded is kept."
    exit 1
}
install -e ".[dev]"
if [[ -n ${EXTRAS:-} ]]; then
    # Transformer Engine compiles against the torch of this environment, not against one of its own.
    install setuptools wheel ninja pybind11
    install --no-build-isolation -e ".[$extras]"
fi
fingerprint >"$stamp"
say "ready: $venv/bin/mok-megatron --help, or 'source $venv/bin/activate'"
