"""The cache of built libraries: its layout, what makes an entry trustworthy, and the lock.

    $MOK_CACHE_DIR, or ~/.cache/mok_megatron, mode 0755
      <key>/libmok_megatron.so        a built library
      <key>/manifest.json             what it was built from, and its SHA-256
      objects/<key>.o                 compiled translation units, so that an edit recompiles one file
      <key>.lock  <key>.failed        one builder at a time; the message of the last failure

A library is code that runs as the user, so an entry is loaded only if the folders and files belong to the
user or to root, nobody else may write them, nobody else could put another folder in their place, and the
content has the hash that its manifest says.
"""

import fcntl
import functools
import grp
import hashlib
import json
import os
import pwd
import shutil
import socket
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mok_megatron.build.errors import BuildError

LIBRARY = "libmok_megatron.so"
MANIFEST = "manifest.json"


@dataclass(frozen=True)
class Recipe:
    """Everything that a library is built from. Two equal recipes give the same library."""

    sources: str  # SHA-256 of kernels/
    arch: str
    flags: tuple[str, ...]
    nvcc: str  # version, as are the next two
    cutlass: str
    torch: str

    @property
    def key(self) -> str:
        """Name of the cache entry: the architecture and 20 hex digits of the recipe's hash."""
        text = json.dumps(asdict(self), sort_keys=True)
        return f"sm_{self.arch}-{hashlib.sha256(text.encode()).hexdigest()[:20]}"


def folder() -> Path:
    """The cache folder, created if need be and checked. BuildError when others may write to it."""
    chosen = os.environ.get("MOK_CACHE_DIR")
    path = Path(chosen).expanduser() if chosen else _default()
    try:
        path = Path(os.path.abspath(path))
        for missing in (*reversed(path.parents), path):  # mkdir's `parents` would not give them this mode
            missing.mkdir(mode=0o755, exist_ok=True)
        check_way(path)
        check_private(path)
        return path.resolve(strict=True)
    except (OSError, ValueError) as error:  # ValueError: a null character
        raise BuildError(
            f"cannot create the cache folder {path}: {error}. Set MOK_CACHE_DIR to a folder of yours"
        ) from error


def _default() -> Path:
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "mok_megatron"


def check_way(path: Path) -> None:
    """BuildError if another user could put something else where the absolute ``path`` leads.

    Whoever owns a folder or a link on the way could, and whoever may write to a folder without the sticky bit, which
    keeps users from renaming what others own in /tmp.
    """
    waiting, seen = [path], set[Path]()
    while waiting:
        way = waiting.pop()
        for part in (*reversed(way.parents), way):
            if part in seen:
                continue
            seen.add(part)
            status = part.lstat()
            _check_owner(part, status)
            if stat.S_ISLNK(status.st_mode):
                waiting.append(part.parent / part.readlink())
            elif _writable_by_others(status) and not status.st_mode & stat.S_ISVTX and part != path:
                place = part.resolve()
                raise BuildError(
                    f"{place} can be written by others, who could put another folder in the place of {path}: "
                    f"chmod go-w {place}, or set MOK_CACHE_DIR to a folder of yours"
                )


def _writable_by_others(status: os.stat_result) -> bool:
    """Whether users besides the owner may write; a group that this user is alone in (user private groups) may."""
    if status.st_mode & stat.S_IWOTH:
        return True
    if not status.st_mode & stat.S_IWGRP:
        return False
    try:
        user, group = pwd.getpwuid(os.geteuid()), grp.getgrgid(status.st_gid)
    except KeyError:
        return True
    return group.gr_gid != user.pw_gid or group.gr_name != user.pw_name or bool(set(group.gr_mem) - {user.pw_name})


def _check_owner(path: Path, status: os.stat_result) -> None:
    if status.st_uid not in (os.geteuid(), 0, _unmapped_user()):
        raise BuildError(
            f"{path} belongs to user {status.st_uid}, who could change what this process loads: "
            "remove it, or set MOK_CACHE_DIR to a folder of yours"
        )


@functools.cache
def _unmapped_user() -> int | None:
    """What the owner of a file looks like in a container whose user namespace has no number for it: the host's root,
    most often. None outside of such a container."""
    try:
        first, _, count = map(int, Path("/proc/self/uid_map").read_text().split()[:3])
        whole = first == 0 and count >= 2**32 - 1
        return None if whole else int(Path("/proc/sys/kernel/overflowuid").read_text())
    except (OSError, ValueError):
        return None


def check_private(path: Path) -> None:
    """BuildError unless ``path`` belongs to this user or root and no one else may write to it."""
    status = path.stat()
    _check_owner(path, status)
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise BuildError(
            f"{path} can be written by others, who could change what this process loads: chmod go-w {path}"
        )


def content_hash(path: Path) -> str:
    """SHA-256 (hex) of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def find(recipe: Recipe) -> Path | None:
    """The library built from exactly ``recipe``, checked; None when there is none that is whole."""
    return _whole(folder() / recipe.key, recipe)


def find_for_sources(sources: str, arch: str) -> Path | None:
    """The newest whole library of these sources and architecture, whatever compiled it; None without one.

    For machines without a compiler, where the rest of the recipe is not known.
    """
    found = []
    for manifest in folder().glob(f"sm_{arch}-*/{MANIFEST}"):
        library = _whole(manifest.parent)
        if library and _read(manifest).get("recipe", {}).get("sources") == sources:
            found.append(library)
    return max(found, key=lambda library: library.stat().st_mtime, default=None)


def _whole(entry: Path, recipe: Recipe | None = None) -> Path | None:
    """The entry's library when it is complete, unchanged and (if given) built from `recipe`; BuildError when someone
    else could have written it.
    """
    library, manifest = entry / LIBRARY, entry / MANIFEST
    if not (library.is_file() and manifest.is_file()):
        return None
    for path in (entry, library, manifest):
        check_way(path)
        check_private(path)
    content = _read(manifest)
    if recipe is not None and content.get("recipe") != json.loads(json.dumps(asdict(recipe))):
        return None
    # A damaged entry is built again.
    return library if content_hash(library) == content.get("sha256") else None


def _read(manifest: Path) -> dict[str, Any]:
    """The manifest; empty where it is not one."""
    try:
        content = json.loads(manifest.read_text())
    except (ValueError, RecursionError):
        return {}
    well_formed = isinstance(content, dict) and isinstance(content.get("recipe"), dict)
    return content if well_formed else {}


def store(recipe: Recipe, built: Path) -> Path:
    """Moves the library ``built`` into the cache under ``recipe``; readers see all of the entry or
    nothing.
    """
    cache = folder()
    entry = cache / recipe.key
    staged = Path(tempfile.mkdtemp(prefix=f"{recipe.key}.tmp-", dir=cache))
    try:
        shutil.move(built, staged / LIBRARY)
        manifest = {"sha256": content_hash(staged / LIBRARY), "recipe": asdict(recipe)}
        (staged / MANIFEST).write_text(json.dumps(manifest, indent=1))
        for path, mode in ((staged / LIBRARY, 0o755), (staged / MANIFEST, 0o644), (staged, 0o755)):
            path.chmod(mode)
        if entry.exists():  # damaged or rebuilt on request; a process that has it open keeps its copy
            old = Path(tempfile.mkdtemp(prefix=f"{recipe.key}.tmp-", dir=cache))
            entry.rename(old / "replaced")
            shutil.rmtree(old, ignore_errors=True)
        staged.rename(entry)
    finally:
        shutil.rmtree(staged, ignore_errors=True)
    return entry / LIBRARY


def object_folder() -> Path:
    """The folder of compiled translation units, created if need be and checked."""
    path = folder() / "objects"
    path.mkdir(mode=0o755, exist_ok=True)
    check_private(path)
    return path


def prune_objects(unused_days: float = 30) -> None:
    """Removes objects that no build has used for that long, and what killed builds left behind."""
    oldest = time.time() - unused_days * 86400
    for path in (*object_folder().iterdir(), *folder().glob("*.tmp-*"), *folder().glob("link-*")):
        try:
            if path.stat().st_mtime < oldest:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        except OSError:
            continue  # another process removed it first


@contextmanager
def lock(name: str, deadline_s: float, notice: Callable[[str], None]) -> Iterator[float]:
    """Holds the cache's lock ``name`` against other processes; gives the seconds it waited.

    ``notice`` is told once when it must wait, with the holder's host and process. Raises BuildError after
    ``deadline_s`` seconds. The system releases the lock of a process that dies.
    """
    path = folder() / f"{name}.lock"
    start = time.monotonic()
    told = False
    with path.open("a+") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                file.seek(0)
                holder = file.read().strip() or "another process"
                if not told:
                    notice(f"waiting for {holder}, which builds the same library (lock {path})")
                    told = True
                if time.monotonic() - start > deadline_s:
                    raise BuildError(
                        f"waited {deadline_s:.0f} s for {holder} to build {name} and release {path}: "
                        "stop that process if it hangs, or allow more with MOK_BUILD_TIMEOUT_S"
                    ) from None
                time.sleep(0.2)
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}")
        file.flush()
        yield time.monotonic() - start
