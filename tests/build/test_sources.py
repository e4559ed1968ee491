"""Which files make the library, what changes their hash, and the names of architectures."""

from pathlib import Path

import pytest

from mok_megatron.build import BuildError, sources


def test_every_cu_file_is_a_unit_and_notes_are_not(kernels: Path) -> None:
    found = sources.find_sources(kernels)
    assert [path.relative_to(kernels).as_posix() for path in found.units] == ["comm/pull.cu", "forward.cu"]
    assert [path.name for path in found.headers] == ["tile.cuh"]


def test_hash_follows_contents_and_names_but_not_notes(kernels: Path) -> None:
    def digest() -> str:
        return sources.find_sources(kernels).hash()

    first = digest()
    (kernels / "notes.md").write_text("changed")
    assert digest() == first
    (kernels / "tile.cuh").write_text("#define TILE 64\n")
    second = digest()
    (kernels / "comm" / "pull.cu").rename(kernels / "comm" / "push.cu")
    assert len({first, second, digest()}) == 3


def test_a_unit_depends_on_the_headers_it_includes_and_on_no_others(kernels: Path) -> None:
    (kernels / "comm" / "wait.cuh").write_text('#include "../tile.cuh"\n#include <cute/tensor.hpp>\n')
    (kernels / "comm" / "pull.cu").write_text('#if X\n#  include "comm/wait.cuh"\n#endif\n')
    (kernels / "other.cuh").write_text("")
    found = sources.find_sources(kernels)
    pull, forward = found.units
    assert {path.name for path in found.included(pull)} == {"wait.cuh", "tile.cuh"}
    assert {path.name for path in found.included(forward)} == {"tile.cuh"}
    before = found.unit_hash(pull), found.unit_hash(forward)
    (kernels / "comm" / "wait.cuh").write_text("// edited\n")
    assert found.unit_hash(pull) != before[0] and found.unit_hash(forward) == before[1]
    (kernels / "comm" / "pull.cu").write_text("#include CONFIGURED\n")
    assert found.included(pull) == found.headers


def test_an_empty_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BuildError, match="no CUDA sources"):
        sources.find_sources(tmp_path)


@pytest.mark.parametrize("name", ["90a", "sm_90a", "9.0a", " SM_90A "])
def test_spellings_of_an_architecture(name: str) -> None:
    assert sources.architecture(name).capability == (9, 0)


def test_unknown_architectures_are_refused_with_the_known_ones() -> None:
    with pytest.raises(BuildError, match="'80'.*90a .H100.*103a"):
        sources.architecture("80")
    with pytest.raises(BuildError, match=r"8\.9; there are kernels for 9\.0 .*--mok-backend reference"):
        sources.architecture_of((8, 9))
