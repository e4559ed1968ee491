"""What a wheel carries, and that it works from a folder that is not a checkout."""

import configparser
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """Built from a copy of the checkout, so that nothing is left behind in it."""
    copy = tmp_path_factory.mktemp("checkout")
    for name in ("pyproject.toml", "setup.py", "MANIFEST.in", "LICENSE", "README.md"):
        shutil.copy(ROOT / name, copy)
    ignore = shutil.ignore_patterns("__pycache__", "*.so", "*.o")
    for name in ("mok_megatron", "kernels", "configs"):
        shutil.copytree(ROOT / name, copy / name, ignore=ignore)
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-w", "dist", "."]
    done = subprocess.run(command, cwd=copy, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = (copy / "dist").glob("*.whl")
    return zipfile.ZipFile(path)


def test_it_is_pure_python_and_needs_no_compiler(wheel: zipfile.ZipFile) -> None:
    assert Path(str(wheel.filename)).name.endswith("-py3-none-any.whl")


def test_it_carries_every_module_kernel_and_config(wheel: zipfile.ZipFile) -> None:
    carried = set(wheel.namelist())
    for folder, kinds, inside in (
        ("mok_megatron", {".py"}, "mok_megatron"),
        ("kernels", {".cu", ".cuh"}, "mok_megatron/_data/kernels"),
        ("configs", {".yaml"}, "mok_megatron/_data/configs"),
    ):
        files = [path for path in (ROOT / folder).rglob("*") if path.suffix in kinds]
        assert files
        missing = {f"{inside}/{path.relative_to(ROOT / folder).as_posix()}" for path in files} - carried
        assert not missing
    assert not [name for name in carried if name.startswith(("tests/", "build/"))]


def test_its_entry_points(wheel: zipfile.ZipFile) -> None:
    (name,) = [name for name in wheel.namelist() if name.endswith("entry_points.txt")]
    points = configparser.ConfigParser()
    points.read_string(wheel.read(name).decode())
    assert dict(points["console_scripts"]) == {"mok-megatron": "mok_megatron.cli:main"}
    assert dict(points["torch.backends"]) == {"mok_megatron": "mok_megatron.megatron.autoload:autoload"}


def test_unpacked_it_finds_its_data(wheel: zipfile.ZipFile, tmp_path: Path) -> None:
    wheel.extractall(tmp_path / "site")
    program = (
        "from mok_megatron import resources, configs\n"
        "from mok_megatron.build.sources import find_sources\n"
        "print(resources.data_folder('kernels'))\n"
        "assert 'deepseek_v3' in configs.model_names() and find_sources().units\n"
    )
    command = [sys.executable, "-P", "-c", program]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "site")}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(tmp_path / "site" / "mok_megatron" / "_data" / "kernels")
