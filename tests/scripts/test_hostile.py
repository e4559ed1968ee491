"""What users, files and the environment give is passed on word by word: no shell ever runs a part of it."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
import yaml

from mok_megatron import cli
from mok_megatron.configs import ConfigFileError, load_cluster
from mok_megatron.resources import PACKAGE, data_folder

ROOT = PACKAGE.parent
PRETRAIN = ROOT / "scripts" / "pretrain_deepseek_v3.sh"
HOSTILE = [
    "$(touch pwned)",
    "`touch pwned`",
    "; touch pwned",
    "PATH[$(touch pwned)0]",
    "'\"; touch pwned",
    "a\nb * ~",
    "-e x",
]

# A Python that notes its arguments, and answers what the script asks it.
PYTHON = r"""#!/bin/bash
printf '%s\0' "$@" '<end>' >>"$STUB_LOG"
case "$*" in
    *compare.flags*) printf '%s\0' --model-flag 'a $(touch pwned) value' ;;
    *torch.cuda*) echo "2 NVIDIA H200" ;;
esac
"""


@pytest.fixture
def here(tmp_path: Path) -> Path:
    """An empty folder to start commands in, beside the stub."""
    (tmp_path / "python").write_text(PYTHON)
    (tmp_path / "python").chmod(0o755)
    (tmp_path / "here").mkdir()
    return tmp_path / "here"


def pretrain(here: Path, *words: str, **environment: str) -> tuple[subprocess.CompletedProcess[str], list[list[str]]]:
    """The script's end, and the arguments of each start of the stub."""
    log = here.parent / "log"
    log.unlink(missing_ok=True)
    keep = {name: os.environ[name] for name in ("PATH", "HOME")}
    stub = {"PYTHON": str(here.parent / "python"), "STUB_LOG": str(log)}
    command = ["bash", str(PRETRAIN), *words]
    done = subprocess.run(command, cwd=here, env=keep | stub | environment, capture_output=True, text=True, timeout=30)
    assert not list(here.iterdir()), "a command was run"
    starts: list[list[str]] = [[]]
    for word in log.read_text().split("\0")[:-1] if log.exists() else []:
        if word == "<end>":
            starts.append([])
        else:
            starts[-1].append(word)
    return done, starts[:-1]


@pytest.mark.parametrize("word", HOSTILE)
def test_the_recipe_passes_words_on_as_they_are(here: Path, word: str) -> None:
    done, starts = pretrain(here, "--preset", word, "--dispatcher", word, "--cluster", word, "--data-path", word, word)
    assert done.returncode == 0, done.stderr
    flags = next(start for start in starts if "mok_megatron.compare.flags" in start)
    assert flags[flags.index("--preset") + 1] == flags[flags.index("--cluster") + 1] == word
    launch = starts[-1]
    assert launch[:2] == ["-m", "torch.distributed.run"]
    assert launch[launch.index("--model-flag") + 1] == "a $(touch pwned) value"
    assert launch[-3:] == ["--data-path", word, word]


@pytest.mark.parametrize("word", [*HOSTILE, "0", "-1", "08", "1e3", "2.5", "9" * 10])
@pytest.mark.parametrize("name", ["--gpus", "NNODES", "GPUS_PER_NODE", "SLURM_JOB_NUM_NODES"])
@pytest.mark.parametrize("dry", [["--dry-run"], []])
def test_a_number_that_is_none_never_reaches_arithmetic(here: Path, name: str, word: str, dry: list[str]) -> None:
    words, environment = ([name, word], {}) if name == "--gpus" else ([], {name: word})
    done, starts = pretrain(here, *words, *dry, **environment)
    assert done.returncode == 2 and not starts
    assert done.stderr == f"pretrain: {name} is '{word}'; give a whole number from 1\n"


def test_the_dry_run_prints_a_command_that_a_shell_reads_back(here: Path) -> None:
    done, _ = pretrain(here, "--dry-run", "--tokenizer-model", *HOSTILE)
    printed = done.stdout[done.stdout.index("command\n") + 8 : done.stdout.index("\nenvironment\n")]
    words = subprocess.run(
        ["bash", "-c", f"printf '%s\\0' {printed}"], cwd=here, capture_output=True, text=True, timeout=10, check=True
    ).stdout.split("\0")[:-1]
    assert words[-len(HOSTILE) :] == HOSTILE
    assert not list(here.iterdir())


def test_a_plans_scripts_pass_a_models_flags_on_as_they_are(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    model = yaml.safe_load((data_folder("configs") / "models" / "tiny.yaml").read_text())
    hostile = [word for word in HOSTILE if word.isprintable()]
    model["megatron_flags"] |= {f"flag-{i}": word for i, word in enumerate(hostile)}
    path, folder = here.parent / "model.yaml", here.parent / "a $(touch pwned) folder"
    path.write_text(yaml.safe_dump(model))
    words = ["--model", str(path), "--cluster", "hgx_h200_8gpu", "--gpus", "8", "--output", str(folder)]
    assert cli.main(["plan", *words]) == 0, capsys.readouterr().err
    (here.parent / "torchrun").write_text("#!/bin/bash\nprintf '%s\\0' \"$@\"\n")
    (here.parent / "torchrun").chmod(0o755)
    monkeypatch.setenv("PATH", f"{here.parent}:{os.environ['PATH']}")
    done = subprocess.run(
        ["bash", folder / "node.sh", "$(touch pwned)"], cwd=here, capture_output=True, text=True, timeout=10, check=True
    )
    given = done.stdout.split("\0")
    for i, word in enumerate(hostile):
        assert given[given.index(f"--flag-{i}") + 1] == word
    assert given[-2] == "$(touch pwned)"
    assert not list(here.iterdir())


@pytest.mark.parametrize("section", ["domain", "node", "gpu"])
@pytest.mark.parametrize("name", ["rack\ntouch pwned", "$(touch pwned)", "a b", "", "rack;"])
def test_a_name_that_is_no_word_never_gets_into_a_script(tmp_path: Path, section: str, name: str) -> None:
    cluster = yaml.safe_load((data_folder("configs") / "clusters" / "gb300_nvl72.yaml").read_text())
    cluster[section]["name"] = name
    path = tmp_path / "cluster.yaml"
    path.write_text(yaml.safe_dump(cluster))
    with pytest.raises(ConfigFileError, match=f"{section}.name: is .*take one word"):
        load_cluster(path)


@pytest.mark.parametrize("variable", ["EXTRAS", "ARCH"])
def test_make_hands_its_variables_on_through_the_environment(here: Path, variable: str) -> None:
    target = {"EXTRAS": "setup", "ARCH": "kernels"}[variable]
    command = ["make", "-n", "-f", str(ROOT / "Makefile"), target, f"{variable}='; touch pwned; '"]
    printed = subprocess.run(command, cwd=here, capture_output=True, text=True, timeout=20, check=True).stdout
    assert "scripts/setup.sh" in printed and "pwned" not in printed
