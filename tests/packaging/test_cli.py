"""The dispatcher of `mok-megatron`: what it lists, what it imports, and its exit status."""

import importlib
import subprocess
import sys

import pytest

from mok_megatron import cli


def test_help_lists_every_command_that_exists(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 2
    printed = capsys.readouterr().out
    for name in cli.available():
        assert name in printed
    assert {"build", "bench", "doctor"} <= set(cli.available())


@pytest.mark.parametrize("name", cli.available())
def test_a_command_has_what_the_dispatcher_needs(name: str) -> None:
    path, summary = cli.COMMANDS[name]
    module = importlib.import_module(path)
    assert module.HELP == summary
    assert callable(module.run)
    with pytest.raises(SystemExit) as left:
        cli.main([name, "--help"])
    assert left.value.code == 0


def test_help_imports_neither_torch_nor_a_command() -> None:
    program = (
        "import sys; from mok_megatron import cli; cli.main([]); "
        "heavy = [m for m in sys.modules if m.split('.')[0] in ('torch', 'megatron', 'numpy', "
        "'matplotlib')]; "
        "commands = [m for m in sys.modules if m.endswith('.command')]; assert not heavy + commands, heavy + "
        "commands"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_a_command_that_does_not_exist_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        cli.main(["frobnicate"])
    assert left.value.code == 2
    assert "frobnicate" in capsys.readouterr().err


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("mok-megatron ")
