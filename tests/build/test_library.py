"""From sources to a loaded library: what is compiled when, and what a user sees when it fails."""

import ctypes
import io
import os
import shutil
import threading
import time
from pathlib import Path

import pytest

from mok_megatron import build as build_package
from mok_megatron.build import ARCHITECTURES, BuildError, cached_library, compiler, library, toolkit
from mok_megatron.cli import main


def lines(log: Path) -> list[str]:
    return sorted(log.read_text().split())


def test_first_use_compiles_and_the_second_does_not(kernels: Path, fake_nvcc: Path) -> None:
    first = library.build(["90a"], root=kernels)["90a"]
    assert lines(fake_nvcc) == ["forward.cu", "link", "pull.cu"]
    assert library.build(["90a"], root=kernels)["90a"] == first
    assert len(lines(fake_nvcc)) == 3


def test_an_edit_compiles_what_it_touches(kernels: Path, fake_nvcc: Path) -> None:
    library.build(["90a"], root=kernels)
    fake_nvcc.write_text("")
    (kernels / "comm" / "pull.cu").write_text("// edited\n")
    library.build(["90a"], root=kernels)
    assert lines(fake_nvcc) == ["link", "pull.cu"]
    fake_nvcc.write_text("")
    (kernels / "tile.cuh").write_text("#define TILE 64\n")
    library.build(["90a"], root=kernels)
    assert lines(fake_nvcc) == ["forward.cu", "link"]


def test_architectures_flags_and_force_compile_anew(
    kernels: Path, fake_nvcc: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = library.build(list(ARCHITECTURES), root=kernels)
    assert len(set(paths.values())) == 3 and len(lines(fake_nvcc)) == 9
    library.build(["90a"], root=kernels, force=True)
    assert len(lines(fake_nvcc)) == 12
    monkeypatch.setenv("MOK_NVCC_FLAGS", "-lineinfo")
    assert library.build(["90a"], root=kernels)["90a"] not in paths.values()


def test_ranks_that_build_at_once_compile_once(kernels: Path, fake_nvcc: Path) -> None:
    (kernels / "forward.cu").write_text("// SLEEP 0.5\n")
    found: list[Path] = []
    ranks = [
        threading.Thread(target=lambda: found.append(library.build(["90a"], root=kernels)["90a"])) for _ in range(4)
    ]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    assert len(found) == 4 and len(set(found)) == 1
    assert lines(fake_nvcc) == ["forward.cu", "link", "pull.cu"]


def test_a_failure_shows_the_compilers_words_and_the_command(kernels: Path, fake_nvcc: Path) -> None:
    (kernels / "forward.cu").write_text("// FAIL\n")
    with pytest.raises(BuildError) as failed:
        library.build(["90a"], root=kernels)
    message = str(failed.value)
    assert "nvcc failed on forward.cu for sm_90a" in message
    assert 'error: identifier "frob" is undefined' in message
    assert "-gencode=arch=compute_90a,code=sm_90a" in message
    assert "link" not in lines(fake_nvcc)


def test_waiting_ranks_fail_with_the_builders_message_without_compiling(kernels: Path, fake_nvcc: Path) -> None:
    (kernels / "forward.cu").write_text("// SLEEP 0.6 FAIL\n")
    messages: list[str] = []

    def rank() -> None:
        try:
            library.build(["90a"], root=kernels)
        except BuildError as error:
            messages.append(str(error))

    ranks = [threading.Thread(target=rank) for _ in range(3)]
    for one in ranks:
        one.start()
    for one in ranks:
        one.join()
    assert len(messages) == 3 and len(set(messages)) == 1
    assert lines(fake_nvcc).count("forward.cu") == 1


def test_a_failure_is_not_remembered(kernels: Path, fake_nvcc: Path) -> None:
    flag = kernels / "forward.cu"
    good = flag.read_text()
    flag.write_text("// FAIL\n")
    for _ in range(2):
        with pytest.raises(BuildError):
            library.build(["90a"], root=kernels)
    assert lines(fake_nvcc).count("forward.cu") == 2
    flag.write_text(good)
    library.build(["90a"], root=kernels)


def test_a_compiler_that_hangs_is_stopped(kernels: Path, fake_nvcc: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (kernels / "forward.cu").write_text("// SLEEP 60\n")
    monkeypatch.setenv("MOK_BUILD_TIMEOUT_S", "0.5")
    start = time.monotonic()
    with pytest.raises(BuildError, match=r"forward\.cu.*after 0 s.*MOK_BUILD_TIMEOUT_S"):
        library.build(["90a"], root=kernels)
    assert time.monotonic() - start < 10


def test_compilations_run_side_by_side_within_the_limit(tmp_path: Path) -> None:
    commands = [
        compiler.Command(str(i), ["bash", "-c", 'sleep 0.4; touch "$2"', "x"], tmp_path / f"{i}.o") for i in range(4)
    ]

    def seconds(jobs: int) -> float:
        start = time.monotonic()
        compiler.run_all(commands, jobs, 30, compiler.Progress(shown=False))
        return time.monotonic() - start

    assert seconds(1) > 1.6 > seconds(4)


def test_a_long_output_is_cut_but_keeps_the_errors() -> None:
    text = "\n".join(["a.cu(1): error: the cause"] + ["note: instantiated here"] * 500)
    message = compiler.failure_message(compiler.Command("a.cu", ["nvcc"], Path("a.o"), text=text), 2)
    assert "error: the cause" in message and "lines left out" in message and len(message.splitlines()) < 70


def test_progress_without_a_terminal_is_a_line_a_file() -> None:
    stream = io.StringIO()
    progress = compiler.Progress(stream=stream)
    progress.total = 2
    progress.tick(["a.cu"])
    progress.done(compiler.Command("a.cu", [], Path("a.o"), seconds=41))
    assert stream.getvalue() == "mok_megatron: [1/2] a.cu, 41 s\n"


def test_a_toolkit_too_old_is_named(kernels: Path, fake_nvcc: Path) -> None:
    nvcc = fake_nvcc.parent / "nvcc"
    nvcc.write_text(nvcc.read_text().replace("13.0.88", "12.8.93"))
    with pytest.raises(BuildError, match=r"nvcc 12\.8\.93 .* is too old.*>=13\.0.*CUDA_HOME"):
        library.build(["90a"], root=kernels)
    assert not lines(fake_nvcc)


def test_the_toolkit_is_asked_where_it_is(fake_nvcc: Path) -> None:
    found = toolkit.find_toolkit()
    assert (found.version, found.root) == ("13.0.88", fake_nvcc.parents[1])


def test_a_wrong_cuda_home_is_an_error_and_not_ignored(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    with pytest.raises(BuildError, match=f"CUDA_HOME={tmp_path} has no bin/nvcc"):
        toolkit.find_toolkit()


def test_no_compiler_at_all_lists_what_was_tried_and_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toolkit, "_candidates", lambda: iter([Path("/nowhere/nvcc")]))
    with pytest.raises(BuildError, match=r"pip install 'mok-megatron\[nvcc\]'(.|\n)*/nowhere/nvcc"):
        toolkit.find_toolkit()


def test_a_machine_without_compiler_uses_the_library_built_elsewhere(
    kernels: Path, fake_nvcc: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(library.sources, "data_folder", lambda name: kernels)
    assert cached_library("90a") is None
    built = library.build(["90a"])["90a"]
    monkeypatch.delenv("CUDA_HOME")
    monkeypatch.setattr(toolkit, "_candidates", lambda: iter([]))
    assert cached_library("90a") == built


def test_cutlass_headers_are_found_without_importing_it() -> None:
    found = toolkit.find_cutlass()
    assert (found.include / "cute" / "tensor.hpp").is_file()


def test_the_command_builds_and_prints_the_paths(
    kernels: Path, fake_nvcc: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(library.sources, "data_folder", lambda name: kernels)
    assert main(["build", "--arch", "90a,100a"]) == 0
    printed = capsys.readouterr()
    assert [line.split()[0] for line in printed.out.splitlines()] == ["sm_90a", "sm_100a"]
    assert "compiling 2 of 2 CUDA files for sm_90a with nvcc 13.0.88" in printed.err
    assert main(["build", "--arch", ","]) == 1
    assert "names no architecture" in capsys.readouterr().err
    assert main(["build", "--arch", "80"]) == 1
    assert "unknown architecture '80'" in capsys.readouterr().err
    assert main(["build", "--arch", "90a", "--jobs", "0"]) == 2


@pytest.mark.skipif(
    shutil.which("nvcc") is None and "CUDA_HOME" not in os.environ, reason="no CUDA compiler (nvcc) here"
)
def test_a_real_compilation_loads_and_answers(kernels: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (kernels / "forward.cu").write_text(
        '#include "tile.cuh"\n__global__ void fill(int* x) { x[threadIdx.x] = TILE; }\n'
        'extern "C" int forward(int launch) { if (launch) fill<<<1, 1>>>(nullptr); return TILE; }\n'
    )
    monkeypatch.setattr(library.sources, "data_folder", lambda name: kernels)
    loaded = build_package.load_library("90a")
    assert isinstance(loaded, ctypes.CDLL)
    assert (loaded.forward(0), loaded.pull()) == (128, 7)
    (kernels / "comm" / "pull.cu").write_text('extern "C" int missing(); extern "C" int pull() { return missing(); }\n')
    with pytest.raises(BuildError, match=r"nvcc failed on link:(.|\n)*undefined reference to `missing'"):
        library.build(["90a"])
