"""The versions of other software that this package supports: one place, read by every check.

``pyproject.toml`` repeats the ranges, because package metadata must be static; a test holds the two equal.
"""

from dataclasses import dataclass
from importlib import metadata

from packaging.specifiers import SpecifierSet
from packaging.version import Version

PYTHON = ">=3.12"
TORCH = ">=2.10"
MEGATRON_CORE = ">=0.19.2,<0.20"
# For compiling the kernels; 13.0 is what was tested.
CUDA_TOOLKIT = ">=13.0"
TRANSFORMER_ENGINE = ">=2.20.2,<3"

REQUIRED = {"torch": TORCH, "megatron-core": MEGATRON_CORE}


@dataclass(frozen=True)
class VersionCheck:
    """What was found of one distribution. ``found`` is None when it is not installed."""

    name: str
    supported: str
    found: str | None

    @property
    def ok(self) -> bool:
        return self.found is not None and in_range(self.found, self.supported)

    @property
    def problem(self) -> str | None:
        """One sentence with the remedy, or None when the version is in range."""
        if self.ok:
            return None
        seen = "is not installed" if self.found is None else f"{self.found} is installed"
        return f"{self.name} {seen}; supported is {self.supported}: pip install '{self.name}{self.supported}'"


def in_range(version: str, supported: str) -> bool:
    """Whether ``version`` lies in the PEP 440 range; local parts (+cu130) and pre-release marks ignored."""
    release = Version(Version(version).base_version)
    return SpecifierSet(supported).contains(release, prereleases=True)


def installed(name: str) -> str | None:
    """Version of the installed distribution ``name``, from its metadata and without importing it."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def check(name: str, supported: str | None = None) -> VersionCheck:
    """Compares the installed ``name`` with ``supported`` (by default the range in ``REQUIRED``)."""
    return VersionCheck(name, supported or REQUIRED[name], installed(name))
