"""What the command prints and its exit status, and how facts are gathered from this machine and from a fake driver."""

import argparse
import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mok_megatron.doctor import command, facts, nvml, report
from tests.doctor.machines import HOPPER, LAPTOP, machine


def run(monkeypatch: pytest.MonkeyPatch, found: facts.Facts, as_json: bool = False) -> int:
    monkeypatch.setattr(facts, "gather", lambda quick: found)
    return command.run(argparse.Namespace(json=as_json, quick=True))


def test_exit_status_and_verdict_follow_the_worst_check(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = machine("no driver")
    broken = broken.__class__(**{**vars(broken), "python": (3, 9, 0)})
    for found, status, verdict in (
        (HOPPER, 0, "Ready: this machine has GPUs"),
        (LAPTOP, 1, "Ready for the reference backend"),
        (broken, 2, "Not ready: Python."),
    ):
        assert run(monkeypatch, found) == status
        assert capsys.readouterr().out.splitlines()[-1].startswith(verdict)


def test_json_has_every_check(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(monkeypatch, LAPTOP, as_json=True) == 1
    printed = json.loads(capsys.readouterr().out)
    assert printed["status"] == "warning"
    (gpu,) = [check for check in printed["checks"] if check["name"] == "GPU"]
    assert gpu["status"] == "warning" and gpu["remedy"]


def test_text_is_a_line_a_check_with_the_remedy_below() -> None:
    text = report.as_text([report.ok("One", "fine"), report.failure("Another", "broken", "mend it")], "No.")
    assert text == "ok       One      fine\nfailure  Another  broken\n" + " " * 18 + "-> mend it\n\nNo."


def test_a_probe_that_crashes_or_hangs_is_a_finding() -> None:
    assert "KeyError: 'nonsense'" in str(facts.run_probe("nonsense").error)
    assert facts.run_probe("torch", timeout_s=0.01).error == "no answer within 0 s"


def test_a_probe_that_hangs_is_ended_with_what_it_started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Its ranks would keep their GPUs."""
    program, started = tmp_path / "python", tmp_path / "pid"
    program.write_text(f"#!/bin/sh\nsleep 60 &\necho $! > {started}\nwait\n")
    program.chmod(0o755)
    monkeypatch.setattr(facts.sys, "executable", str(program))
    begin = time.monotonic()
    assert facts.run_probe("symmetric", timeout_s=2).error == "no answer within 2 s"
    assert time.monotonic() - begin < 20  # though they hold its output open
    state, end = Path("/proc", started.read_text().strip(), "stat"), time.monotonic() + 5
    while state.exists() and state.read_text().rpartition(")")[2].split()[0] != "Z":
        assert time.monotonic() < end
        time.sleep(0.05)


def test_the_torch_probe_tells_about_this_machine() -> None:
    probe = facts.run_probe("torch")
    assert probe.error is None
    assert set(probe.found) == {"version", "cuda", "nccl", "devices", "no_peer_access", "autoloaded"}


@pytest.mark.parametrize(
    ("file", "whose"),
    [("optimizers/fused_adam.py", "nvidia"), ("multi_tensor_apply/__init__.py", "nvidia"), ("lib/flash.py", "other")],
)
def test_apex_is_told_by_its_files_without_importing_it(
    file: str, whose: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "apex" / file).parent.mkdir(parents=True)
    (tmp_path / "apex" / file).touch()
    (tmp_path / "apex" / "__init__.py").write_text("raise RuntimeError('imported')")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert facts.which_apex() == whose


class FakeNvml:
    """pynvml with two H200s joined by NVLink, in a fabric that ends at the host."""

    NVML_P2P_CAPS_INDEX_NVLINK, NVML_P2P_STATUS_OK = 2, 0

    class NVMLError(Exception):
        pass

    def __init__(self, **replaced: Any):
        self.shut_down = False
        self.__dict__.update(replaced)

    def nvmlInit(self) -> None: ...

    def nvmlShutdown(self) -> None:
        self.shut_down = True

    def nvmlSystemGetCudaDriverVersion(self) -> int:
        return 13020

    def nvmlSystemGetDriverVersion(self) -> bytes:
        return b"580.65.06"

    def nvmlDeviceGetCount(self) -> int:
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetCudaComputeCapability(self, handle: int) -> tuple[int, int]:
        return (9, 0)

    def nvmlDeviceGetName(self, handle: int) -> str:
        return "NVIDIA H200"

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> Any:
        return SimpleNamespace(total=140 * 2**30)

    def nvmlDeviceGetP2PStatus(self, one: int, other: int, what: int) -> int:
        return 0

    def c_nvmlGpuFabricInfoV_t(self) -> Any:
        import pynvml

        return pynvml.c_nvmlGpuFabricInfoV_t()

    def nvmlDeviceGetGpuFabricInfoV(self, handle: int, info: Any) -> None:
        info._obj.state = 3


def test_the_driver_is_read_through_nvml() -> None:
    fake = FakeNvml()
    driver = nvml.find_driver(fake)
    gpu = nvml.Gpu("NVIDIA H200", (9, 0), 140.0, "completed")
    assert driver == nvml.Driver("580.65.06", (13, 2), (gpu, gpu), frozenset({(0, 1)}))
    assert fake.shut_down


def test_an_old_driver_without_fabric_or_link_status_still_counts() -> None:
    def unknown(*args: Any) -> None:
        raise FakeNvml.NVMLError("Function Not Found")

    driver = nvml.find_driver(FakeNvml(nvmlDeviceGetGpuFabricInfoV=unknown, nvmlDeviceGetP2PStatus=unknown))
    assert isinstance(driver, nvml.Driver)
    assert driver.nvlink == frozenset() and driver.gpus[0].fabric == "not supported"


def test_no_driver_is_told_in_words() -> None:
    def missing() -> None:
        raise FakeNvml.NVMLError("NVML Shared Library Not Found")

    assert nvml.find_driver(FakeNvml(nvmlInit=missing)) == (
        "no NVIDIA driver answers (NVML: NVML Shared Library Not Found)"
    )


@pytest.mark.gpu
def test_the_symmetric_memory_probe_passes_here() -> None:
    probe = facts.run_probe("symmetric")
    assert probe.error is None and probe.found["ranks"] >= 1
