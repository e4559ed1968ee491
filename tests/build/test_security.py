"""Nobody else can put code into this process: who may write where a library is looked for, and what a shell runs."""

import dataclasses
import json
import os
import stat
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mok_megatron.build import BuildError, cache, library, sources

RECIPE = cache.Recipe("ab12", "90a", ("-O3",), "13.0.88", "4.2.0.0", "2.11.0")
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")


def store(recipe: cache.Recipe = RECIPE) -> Path:
    built = cache.folder().parent / "built.so"
    built.write_bytes(b"a library")
    return cache.store(recipe, built)


@pytest.fixture
def above(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that holds the cache's."""
    folder = tmp_path / "above"
    folder.mkdir(mode=0o755)
    monkeypatch.setenv("MOK_CACHE_DIR", str(folder / "cache"))
    return folder


@pytest.mark.parametrize(("mode", "refused"), [(0o777, True), (0o757, True), (0o1777, False), (0o755, False)])
def test_a_folder_above_that_others_may_write_is_refused_unless_sticky(above: Path, mode: int, refused: bool) -> None:
    store()
    above.chmod(mode)
    if refused:
        with pytest.raises(BuildError, match=f"{above} can be written by others, .* chmod go-w {above}"):
            cache.find(RECIPE)
    else:
        assert cache.find(RECIPE)


@pytest.mark.parametrize(
    ("members", "name", "refused"), [([], "me", False), (["me"], "me", False), (["you"], "me", True), ([], "us", True)]
)
def test_only_a_group_that_the_user_is_alone_in_may_write_above(
    above: Path, monkeypatch: pytest.MonkeyPatch, members: list[str], name: str, refused: bool
) -> None:
    store()
    above.chmod(0o775)
    gid = above.stat().st_gid
    user, group = cache.pwd.struct_passwd(("me", "x", 1, gid, "", "/", "/bin/sh")), (name, "x", gid, members)
    monkeypatch.setattr(cache.pwd, "getpwuid", lambda uid: user)
    monkeypatch.setattr(cache.grp, "getgrgid", lambda gid: cache.grp.struct_group(group))
    if refused:
        with pytest.raises(BuildError, match="can be written by others"):
            cache.find(RECIPE)
    else:
        assert cache.find(RECIPE)


@needs_root
def test_a_folder_above_that_belongs_to_another_user_is_refused(above: Path) -> None:
    store()
    os.chown(above, 12345, -1)
    with pytest.raises(BuildError, match=f"{above} belongs to user 12345"):
        cache.find(RECIPE)


def test_a_link_leads_to_a_checked_place(above: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    open_folder = tmp_path / "open"
    open_folder.mkdir()
    (open_folder / "cache").mkdir(mode=0o755)
    (above / "link").symlink_to("../open/cache")
    monkeypatch.setenv("MOK_CACHE_DIR", str(above / "link"))
    store()
    assert cache.find(RECIPE) == open_folder / "cache" / RECIPE.key / cache.LIBRARY
    open_folder.chmod(0o777)  # where the link stands is private, but where it leads is not
    with pytest.raises(BuildError, match=f"{open_folder} can be written by others"):
        cache.find(RECIPE)
    (above / "loop").symlink_to("loop")
    monkeypatch.setenv("MOK_CACHE_DIR", str(above / "loop"))
    with pytest.raises(BuildError, match="MOK_CACHE_DIR"):
        cache.find(RECIPE)


@needs_root
@pytest.mark.parametrize("what", ["cache", "entry", "library"])
def test_a_link_of_another_user_is_refused(above: Path, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    found = store()
    path = {"cache": cache.folder(), "entry": found.parent, "library": found}[what]
    real = path.with_name("real")
    path.rename(real)
    path.symlink_to(real)
    assert cache.find(RECIPE)
    os.chown(path, 12345, -1, follow_symlinks=False)  # its owner can make it lead elsewhere, in a sticky folder too
    with pytest.raises(BuildError, match=f"{path} belongs to user 12345"):
        cache.find(RECIPE)


@pytest.mark.parametrize("umask", [0o000, 0o002, 0o077])
def test_nothing_that_is_made_can_be_written_by_others(
    kernels: Path, fake_nvcc: Path, above: Path, monkeypatch: pytest.MonkeyPatch, umask: int
) -> None:
    monkeypatch.setenv("MOK_CACHE_DIR", str(above / "new" / "newer" / "cache"))
    for path in kernels.rglob("*.cu"):
        path.chmod(0o666)  # which the stub copies
    before = os.umask(umask)
    try:
        built = library.build(["90a"], root=kernels)["90a"]
    finally:
        os.umask(before)
    made = [path for path in above.rglob("*") if not path.name.endswith((".lock", ".failed"))]
    assert built in made and len(made) > 7
    for path in made:
        assert not path.stat().st_mode & (stat.S_IWGRP | stat.S_IWOTH), path


def test_a_library_under_another_recipes_name_is_not_loaded(above: Path) -> None:
    other = dataclasses.replace(RECIPE, sources="cd34")
    store(other).parent.rename(cache.folder() / RECIPE.key)
    assert cache.find(RECIPE) is None
    assert cache.find_for_sources("ab12", "90a") is None


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.dictionaries(st.sampled_from(["sha256", "recipe", "sources"]), inner, max_size=3)
    ),
    max_leaves=5,
)


@given(content=json_values.map(json.dumps) | st.text(max_size=20) | st.just("[" * 100_000))
@settings(max_examples=60)
def test_any_manifest_is_read_as_data(tmp_path_factory: pytest.TempPathFactory, content: str) -> None:
    entry = tmp_path_factory.getbasetemp() / "manifests" / f"sm_90a-{RECIPE.key}"
    entry.mkdir(parents=True, exist_ok=True)
    (entry / cache.LIBRARY).write_bytes(b"a library")
    (entry / cache.MANIFEST).write_text(content)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MOK_CACHE_DIR", str(entry.parent))
        assert cache._whole(entry, RECIPE) is None
        assert cache.find_for_sources("ab12", "90a") is None


def test_a_process_that_dies_while_it_stores_leaves_nothing_to_load(above: Path) -> None:
    built = above / "built.so"
    for step in ("content_hash", "asdict"):
        built.write_bytes(b"a library")
        child = os.fork()
        if child == 0:
            setattr(cache, step, lambda *_: os._exit(9))
            cache.store(RECIPE, built)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 9
        assert cache.find(RECIPE) is None
    assert store() == cache.find(RECIPE)


def test_readers_see_a_whole_library_or_none(above: Path) -> None:
    stop, seen = threading.Event(), set()

    def read() -> None:
        while not stop.is_set():
            try:
                found = cache.find(RECIPE)
                seen.add(found.read_bytes() if found else b"none")
            except FileNotFoundError:  # between the check and this read, which a real reader's dlopen reports
                seen.add(b"none")

    reader = threading.Thread(target=read)
    reader.start()
    for _ in range(30):
        store()
    stop.set()
    reader.join()
    assert b"a library" in seen and seen <= {b"a library", b"none"}


# ---- no shell

HOSTILE = "$(touch pwned);`touch pwned` 'a\" & touch pwned"


@pytest.fixture
def nothing_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fails where a word was taken for a command."""
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    yield
    assert not list(folder.iterdir())


def test_flags_and_names_are_words_and_not_commands(
    kernels: Path, fake_nvcc: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nothing_is_run: None
) -> None:
    monkeypatch.setenv("MOK_NVCC_FLAGS", "-DX='$(touch pwned)' ';' touch pwned")
    monkeypatch.setenv("MOK_CACHE_DIR", str(tmp_path / HOSTILE))
    (kernels / f"{HOSTILE}.cu").write_text("// a unit\n")
    root = kernels.rename(tmp_path / f"{HOSTILE} kernels")
    assert library.build(["90a"], root=root)["90a"].is_file()
    assert f"{HOSTILE}.cu" in fake_nvcc.read_text()


def test_flags_that_do_not_split_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOK_NVCC_FLAGS", "-DX='a")
    with pytest.raises(BuildError, match="MOK_NVCC_FLAGS=.*quote it as for a shell"):
        sources.extra_flags()


@pytest.mark.parametrize("text", ["", "soon", "-1", "nan", "inf"])
def test_a_build_timeout_that_is_none_is_named(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("MOK_BUILD_TIMEOUT_S", text)
    with pytest.raises(BuildError, match="MOK_BUILD_TIMEOUT_S"):
        library.build_timeout_s()
