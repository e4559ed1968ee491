"""Settings that `mok-megatron tune` has measured: the file, where it is looked for, and what the plugin takes of it.

Files stand in ``<folder>/<gpu>/<model>-ep<EP>.yaml``; folders: $MOK_TUNED_DIR, then ``configs/tuned`` of the package.
What a file is for stands in it (shape, EP, GPU), so a layer needs no name to find its own. Settings trade time against
memory and never change a result.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from mok_megatron.config import MokConfig, flag_name
from mok_megatron.errors import MokConfigError
from mok_megatron.resources import data_folder
from mok_megatron.typed_yaml import load_typed

FOLDER_ENV = "MOK_TUNED_DIR"
NONE = "none"
"""Value of MOK_TUNED_DIR that switches tuned files off."""


@dataclass(frozen=True)
class TunedShape:
    """The layer that was measured. Sizes in elements; `tokens` is T, tokens a rank; `experts` all of them."""

    tokens: int
    hidden: int
    intermediate: int
    experts: int
    topk: int
    shared: int = 0

    @property
    def layer(self) -> tuple[int, ...]:
        """What must agree for a file to be a layer's own: all but the tokens."""
        return (self.hidden, self.intermediate, self.experts, self.topk, self.shared)


@dataclass(frozen=True)
class TunedSettings:
    """Fields of MokConfig of the same names. `macrobatch_size` null: the default, 1.25 x the balanced rows."""

    minibatch_size: int
    fwd_comm_sms: int
    bwd_comm_sms: int
    macrobatch_size: int | None = None

    def check(self) -> Iterator[tuple[str, str]]:
        try:
            MokConfig(**dataclasses.asdict(self))
        except MokConfigError as error:
            yield "minibatch_size", " ".join(str(error).split())


@dataclass(frozen=True)
class Milliseconds:
    """One call of the layer, medians of the slowest rank."""

    forward: float
    backward: float


@dataclass(frozen=True)
class Measured:
    """Where the settings come from."""

    date: str
    command: str
    commit: str
    versions: dict[str, str]
    imbalance: float
    """As `--imbalance`."""
    points: int
    """Settings that were tried."""
    default: Milliseconds
    tuned: Milliseconds
    """Measured in turns with `default`."""


@dataclass(frozen=True)
class TunedFile:
    """One file of ``configs/tuned``."""

    gpu: str
    ep: int
    format: str
    """Of the products: `MokConfig.format`."""
    shape: TunedShape
    settings: TunedSettings
    measured: Measured

    def check(self) -> Iterator[tuple[str, str]]:
        if self.ep < 1 or self.shape.experts % self.ep:
            yield "ep", f"is {self.ep}, which does not divide the {self.shape.experts} experts"


def folders() -> list[Path]:
    """Folders in the order in which they are searched; none if MOK_TUNED_DIR is "none"."""
    own = os.environ.get(FOLDER_ENV)
    if own == NONE:
        return []
    return [*([Path(own)] if own else []), data_folder("configs") / "tuned"]


def folder_name(gpu: str) -> str:
    """``"NVIDIA H100 80GB HBM3"`` -> ``"h100-80gb-hbm3"``."""
    return re.sub(r"[^a-z0-9]+", "-", gpu.lower().removeprefix("nvidia ")).strip("-")


def gpu_name() -> str | None:
    """Name of this process's GPU; None without one."""
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else None


def load(path: Path) -> TunedFile:
    """Reads one file. ConfigFileError names the file, line and key of what is wrong."""
    return load_typed(path, TunedFile)


@functools.cache
def find(
    gpu: str, ep: int, format: str, layer: tuple[int, ...], tokens: int | None, places: tuple[Path, ...]
) -> Path | None:
    """The file for a layer, from the first folder of `places` that has one; of several, that of the nearest T.

    Raises:
        ConfigFileError: a file of this GPU and EP that cannot be read.
    """
    for place in places:
        fitting = []
        for path in sorted((place / folder_name(gpu)).glob(f"*-ep{ep}.yaml")):
            found = load(path)
            if (found.gpu, found.ep, found.format, found.shape.layer) == (gpu, ep, format, layer):
                fitting.append((abs(found.shape.tokens - (tokens or found.shape.tokens)), path))
        if fitting:
            return min(fitting)[1]
    return None


def apply(
    config: MokConfig, given: set[str], ep: int, layer: tuple[int, ...], tokens: int | None = None
) -> tuple[MokConfig, str | None]:
    """`config` with the tuned settings of its layer, and a line that says so; unchanged and None if there is no file.

    Args:
        given: fields that the user has set; they stay. Rows of minibatch and macrobatch belong together: one that is
            given keeps the other from being tuned.
        layer: (hidden, intermediate, experts, top-k, shared intermediate).
        tokens: T of the run, if known. A macrobatch, in rows, is taken only for the T that it was measured with.

    Raises:
        ConfigFileError: a file that cannot be read.
        MokConfigError: settings of the file that the given ones do not allow.
    """
    gpu = gpu_name()
    if gpu is None or config.backend == "reference":
        return config, None
    path = find(gpu, ep, config.format, layer, tokens, tuple(folders()))
    if path is None:
        return config, None
    found = load(path)
    chosen = {name: value for name, value in dataclasses.asdict(found.settings).items() if name not in given}
    if given & {"minibatch_size", "macrobatch_size"}:
        chosen = {name: value for name, value in chosen.items() if name.endswith("_sms")}
    note = ""
    if chosen.get("macrobatch_size") is None:
        chosen.pop("macrobatch_size", None)
    elif tokens != found.shape.tokens:
        rows = chosen.pop("macrobatch_size")
        note = f"; not its macrobatch of {rows} rows, which is for {found.shape.tokens} tokens a rank"
    try:
        tuned = dataclasses.replace(config, **chosen)
    except MokConfigError as error:
        raise MokConfigError(
            f"the tuned settings of {path} do not go with the flags that were given: "
            f"{' '.join(str(error).split())}; give "
            f"{', '.join(flag_name(name) for name in chosen)} too, or set {FOLDER_ENV}={NONE}"
        ) from None
    flags = " ".join(f"{flag_name(name)} {value}" for name, value in chosen.items()) or "nothing: all of it is given"
    return tuned, f"mok: tuned settings of {path} (measured {found.measured.date}): {flags}{note}"
