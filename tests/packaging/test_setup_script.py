"""scripts/setup.sh with interpreters that are scripts: which it takes, and what it says when there is
none.
"""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# Answers `-c` as a Python of the version in its name does, makes an environment of itself, and logs pip's
# arguments.
FAKE_PYTHON = """#!/bin/bash
case "$1" in
    -c) exit {status} ;;
    --version) echo "Python 3.12.9 (fake)" ;;
    -m) case "$2" in
            venv) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
            pip) echo "$@" >>"{log}"; [[ ! -e "{log}.fail" ]] ;;
        esac ;;
esac
"""


class Checkout:
    def __init__(self, root: Path):
        self.root, self.log, self.path = root, root / "pip.log", root / "path"
        (root / "scripts").mkdir(parents=True)
        self.path.mkdir()
        shutil.copy(ROOT / "scripts" / "setup.sh", root / "scripts")
        for name in ("pyproject.toml", "setup.py", "constraints.txt"):
            shutil.copy(ROOT / name, root)

    def python(self, path: Path, works: bool = True) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(FAKE_PYTHON.format(status=0 if works else 1, log=self.log))
        path.chmod(0o755)

    def setup(self, **variables: str) -> subprocess.CompletedProcess[str]:
        environment = {"PATH": f"{self.path}:/usr/bin:/bin", "HOME": str(self.root / "home"), **variables}
        environment["PYENV_ROOT"] = variables.get("PYENV_ROOT", str(self.root / "pyenv"))
        return subprocess.run(
            ["bash", "scripts/setup.sh"], cwd=self.root, env=environment, capture_output=True, text=True, timeout=60
        )

    def installs(self) -> list[str]:
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        return [line for line in lines if " install " in line]


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    one = Checkout(tmp_path / "checkout")
    for name in ("python3.12", "python3.13", "python3.14", "python3", "python"):
        one.python(one.path / name, works=False)  # as a pyenv shim of a version that is not selected
    return one


def test_it_takes_the_first_python_that_works_and_installs_with_constraints(checkout: Checkout) -> None:
    checkout.python(checkout.path / "python3.13")
    done = checkout.setup()
    assert done.returncode == 0, done.stderr
    assert str(checkout.path / "python3.13") in done.stderr
    (install,) = checkout.installs()
    assert "-c constraints.txt -e .[dev]" in install


def test_shims_that_do_not_work_are_passed_over_for_pyenvs_versions(checkout: Checkout) -> None:
    checkout.python(checkout.root / "pyenv" / "versions" / "3.12.1" / "bin" / "python")
    done = checkout.setup()
    assert done.returncode == 0, done.stderr
    assert "versions/3.12.1/bin/python" in done.stderr


def test_without_a_python_it_says_what_to_install(checkout: Checkout) -> None:
    done = checkout.setup()
    assert done.returncode == 1
    assert "no Python 3.12 or later" in done.stderr and "apt-get install python3.12" in done.stderr
    assert not checkout.installs()


def test_a_named_python_that_does_not_work_is_refused_and_not_replaced(checkout: Checkout) -> None:
    checkout.python(checkout.path / "python3.12")
    done = checkout.setup(MOK_PYTHON="/nowhere/python")
    assert done.returncode == 1 and "MOK_PYTHON=/nowhere/python" in done.stderr


def test_it_installs_again_only_when_something_changed(checkout: Checkout) -> None:
    checkout.python(checkout.path / "python3.12")
    for _ in range(2):
        assert checkout.setup().returncode == 0
    assert len(checkout.installs()) == 1
    with (checkout.root / "constraints.txt").open("a") as file:
        file.write("# changed\n")
    assert checkout.setup().returncode == 0
    assert checkout.setup(EXTRAS="te").returncode == 0
    assert len(checkout.installs()) == 5  # with extras: ours, what compiles them, and they themselves
    assert "--no-build-isolation -e .[dev,te]" in checkout.installs()[-1]


def test_a_failed_install_says_so_and_is_tried_again(checkout: Checkout) -> None:
    checkout.python(checkout.path / "python3.12")
    failing = Path(f"{checkout.log}.fail")
    failing.touch()
    done = checkout.setup()
    assert done.returncode == 1 and "pip failed" in done.stderr and "pip config" in done.stderr
    failing.unlink()
    assert checkout.setup().returncode == 0
    assert len(checkout.installs()) == 2


def test_ci_runs_the_readmes_command() -> None:
    script = (ROOT / ".ci" / "run").read_text()
    assert script.rstrip().endswith("make test")
    assert os.access(ROOT / ".ci" / "run", os.X_OK)
