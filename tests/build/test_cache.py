"""What the cache gives back, what it refuses to, and the lock."""

import dataclasses
import os
import threading
from pathlib import Path

import pytest

from mok_megatron.build import BuildError, cache

RECIPE = cache.Recipe("ab12", "90a", ("-O3",), "13.0.88", "4.2.0.0", "2.11.0")


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    built = tmp_path / "built.so"
    built.write_bytes(b"a library")
    return cache.store(RECIPE, built)


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(cache.Recipe)])
def test_every_part_of_the_recipe_changes_the_key(field: str) -> None:
    other = ("-O2",) if field == "flags" else "other"
    assert dataclasses.replace(RECIPE, **{field: other}).key != RECIPE.key


def test_a_stored_library_is_found_by_its_recipe_alone(stored: Path) -> None:
    assert cache.find(RECIPE) == stored
    assert stored.read_bytes() == b"a library"
    assert cache.find(dataclasses.replace(RECIPE, nvcc="12.9.1")) is None


def test_without_a_compiler_the_sources_decide(stored: Path) -> None:
    assert cache.find_for_sources("ab12", "90a") == stored
    assert cache.find_for_sources("ab12", "100a") is None
    assert cache.find_for_sources("ffff", "90a") is None


@pytest.mark.parametrize("damage", [b"a librarx", b"a libr", b""])
def test_a_damaged_library_counts_as_missing_and_is_replaced(stored: Path, damage: bytes, tmp_path: Path) -> None:
    stored.write_bytes(damage)
    assert cache.find(RECIPE) is None
    again = tmp_path / "again.so"
    again.write_bytes(b"a library")
    cache.store(RECIPE, again)
    assert cache.find(RECIPE) == stored
    assert not list(cache.folder().glob("*.tmp-*"))


def test_a_damaged_manifest_counts_as_missing(stored: Path) -> None:
    (stored.parent / cache.MANIFEST).write_text('{"sha2')
    assert cache.find(RECIPE) is None


@pytest.mark.parametrize("target", ["cache", "entry", "library", "manifest"])
def test_nothing_that_others_may_write_is_loaded(stored: Path, target: str) -> None:
    manifest = stored.parent / cache.MANIFEST
    path = {"cache": cache.folder(), "entry": stored.parent, "library": stored, "manifest": manifest}[target]
    path.chmod(path.stat().st_mode | 0o020)
    with pytest.raises(BuildError, match=f"written by others.*chmod go-w {path}"):
        cache.find(RECIPE)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
def test_nothing_of_another_user_is_loaded(stored: Path) -> None:
    os.chown(stored, 12345, -1)
    with pytest.raises(BuildError, match="belongs to user 12345.*MOK_CACHE_DIR"):
        cache.find(RECIPE)


def test_a_folder_that_cannot_be_created_names_the_variable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MOK_CACHE_DIR", str(tmp_path / "file" / "cache"))
    with pytest.raises(BuildError, match="cannot create .* Set MOK_CACHE_DIR"):
        cache.folder()


def test_the_lock_waits_says_for_whom_and_gives_up_at_its_deadline() -> None:
    notices: list[str] = []
    with cache.lock("key", 10, notices.append) as waited:
        assert waited < 1
        holder = f"process {os.getpid()} on "
        with pytest.raises(BuildError, match=f"waited 0 s for {holder}.*MOK_BUILD_TIMEOUT_S"):
            with cache.lock("key", 0.1, notices.append):
                pass
    assert len(notices) == 1 and holder in notices[0]


def test_the_lock_passes_on_when_it_is_released() -> None:
    order: list[str] = []
    entered, release = threading.Event(), threading.Event()

    def first() -> None:
        with cache.lock("key", 10, order.append):
            entered.set()
            release.wait(10)
            order.append("first leaves")

    thread = threading.Thread(target=first)
    thread.start()
    assert entered.wait(10)
    threading.Timer(0.3, release.set).start()
    with cache.lock("key", 10, lambda notice: None) as waited:
        order.append("second enters")
    thread.join()
    assert order == ["first leaves", "second enters"] and waited > 0.2


def test_pruning_removes_only_what_is_old() -> None:
    old, new = (cache.object_folder() / name for name in ("old.o", "new.o"))
    for path in (old, new):
        path.write_text("object")
    os.utime(old, (1, 1))
    leftover = cache.folder() / "link-killed"
    leftover.mkdir()
    os.utime(leftover, (1, 1))
    cache.prune_objects()
    assert new.exists() and not old.exists() and not leftover.exists()
