"""What pyproject.toml, versions.py and constraints.txt say must agree."""

import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from mok_megatron import versions

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
REQUIREMENTS = {r.name: r for r in map(Requirement, PROJECT["dependencies"])}


def pinned() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pairs = (line.split("==") for line in lines if line and not line.startswith("#"))
    return {name.lower().replace("_", "-"): version for name, version in pairs}


@pytest.mark.parametrize("name", versions.REQUIRED)
def test_supported_ranges_are_the_same_in_code_and_metadata(name: str) -> None:
    assert REQUIREMENTS[name].specifier == SpecifierSet(versions.REQUIRED[name])


def test_python_range_is_the_same_in_code_and_metadata() -> None:
    assert PROJECT["requires-python"] == versions.PYTHON


def test_transformer_engine_range_is_the_same_in_code_and_metadata() -> None:
    (requirement,) = map(Requirement, PROJECT["optional-dependencies"]["te"])
    assert requirement.specifier == SpecifierSet(versions.TRANSFORMER_ENGINE)


def test_every_direct_dependency_has_a_tested_version_in_its_range() -> None:
    extras = [Requirement(r) for group in PROJECT["optional-dependencies"].values() for r in group]
    for requirement in [*REQUIREMENTS.values(), *extras]:
        version = pinned()[requirement.name.lower().replace("_", "-")]
        assert requirement.specifier.contains(version), f"{requirement} against {version}"


@pytest.mark.parametrize(
    ("version", "supported", "expected"),
    [
        ("2.11.0+cu130", ">=2.10", True),
        ("2.10.0a0+abc1234", ">=2.10", True),  # as NVIDIA's containers name theirs
        ("2.9.1", ">=2.10", False),
        ("0.20.0rc0", ">=0.19.2,<0.20", False),
        ("0.19.2", ">=0.19.2,<0.20", True),
    ],
)
def test_range_check(version: str, supported: str, expected: bool) -> None:
    assert versions.in_range(version, supported) is expected


def test_a_wrong_version_is_named_with_the_remedy() -> None:
    wrong = versions.VersionCheck("megatron-core", versions.MEGATRON_CORE, "0.16.0")
    assert wrong.problem == (
        "megatron-core 0.16.0 is installed; supported is >=0.19.2,<0.20: pip install 'megatron-core>=0.19.2,<0.20'"
    )
    missing = versions.VersionCheck("torch", versions.TORCH, None)
    assert missing.problem is not None and "is not installed" in missing.problem
