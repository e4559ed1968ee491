"""Each check, on a good machine with one thing spoilt: the verdict, what it names and the remedy."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mok_megatron.build.toolkit import Toolkit
from mok_megatron.doctor import compiler, facts, gpu, software
from mok_megatron.doctor.facts import Facts, Probe
from mok_megatron.doctor.nvml import Driver, Gpu
from mok_megatron.doctor.report import Check, Status
from tests.doctor.machines import GB300, H200, HOPPER, LAPTOP, TRAY, pairs


def diagnose(facts: Facts) -> dict[str, Check]:
    checks = [*software.checks(facts), *compiler.checks(facts), *gpu.checks(facts)]
    assert len({check.name for check in checks}) == len(checks)
    for check in checks:  # a finding without a remedy, or a remedy without a finding, helps nobody
        assert (check.remedy is None) == (check.status is Status.OK)
    return {check.name: check for check in checks}


def with_driver(facts: Facts, **changes: Any) -> Facts:
    assert isinstance(facts.driver, Driver)
    return replace(facts, driver=replace(facts.driver, **changes))


def with_distribution(facts: Facts, name: str, version: str | None) -> Facts:
    return replace(facts, distributions={**facts.distributions, name: version})


def with_torch(facts: Facts, **changes: Any) -> Facts:
    return replace(facts, torch=Probe({**facts.torch.found, **changes}))


def test_two_h200s_are_ready() -> None:
    checks = diagnose(HOPPER)
    assert all(check.status is Status.OK for check in checks.values()), checks
    assert "NVLink ends at this host" in checks["NVLink fabric"].found
    assert "IMEX" not in checks


def test_a_tray_of_a_rack_with_imex_is_ready() -> None:
    facts = replace(TRAY, imex_channels=("channel0",), imex_status="Domain State: UP")
    checks = diagnose(facts)
    assert "selftest --gpu" in (checks.pop("GPU").remedy or ""), "its kernels were never run"
    assert all(check.status is Status.OK for check in checks.values())


def test_a_machine_without_gpu_gets_one_warning_and_no_checks_of_gpus() -> None:
    checks = diagnose(LAPTOP)
    assert [check.name for check in checks.values() if check.status is not Status.OK] == ["GPU"]
    assert checks["GPU"].status is Status.WARNING and "reference backend" in str(checks["GPU"].remedy)
    assert not {"NVLink", "Peer access", "Driver and CUDA"} & set(checks)


UNKNOWN_GPU = Gpu("NVIDIA A100", (8, 0), 80.0)
UNREGISTERED = replace(GB300, fabric="in progress")
REFUSED = replace(GB300, fabric_status=999)

CASES: list[tuple[str, Callable[[], Facts], str, Status, str, str]] = [
    # what is wrong, the machine, the check that says so, its status, words of the finding, words of the remedy
    ("old Python", lambda: replace(HOPPER, python=(3, 11, 7)), "Python", Status.FAILURE, "3.11.7", ">=3.12"),
    (
        "old torch",
        lambda: with_distribution(HOPPER, "torch", "2.9.1"),
        "torch",
        Status.FAILURE,
        "2.9.1",
        "pip install 'torch>=2.10'",
    ),
    (
        "broken torch",
        lambda: replace(HOPPER, torch=Probe(error="libcudnn.so.9: cannot open")),
        "torch",
        Status.FAILURE,
        "libcudnn.so.9",
        "LD_LIBRARY_PATH",
    ),
    ("CPU torch", lambda: with_torch(HOPPER, cuda=None), "torch", Status.FAILURE, "without CUDA", "CUDA builds"),
    (
        "hidden GPUs",
        lambda: with_torch(HOPPER, devices=0),
        "torch",
        Status.FAILURE,
        "none of this machine's 2",
        "CUDA_VISIBLE_DEVICES",
    ),
    (
        "no Megatron",
        lambda: with_distribution(LAPTOP, "megatron-core", None),
        "Megatron Core",
        Status.FAILURE,
        "not installed",
        "megatron-core>=0.19.2,<0.20",
    ),
    (
        "newer Megatron",
        lambda: with_distribution(LAPTOP, "megatron-core", "0.20.0"),
        "Megatron Core",
        Status.FAILURE,
        "0.20.0; supported is >=0.19.2,<0.20",
        "pip install",
    ),
    (
        "broken Megatron",
        lambda: replace(LAPTOP, megatron=Probe(error="No module named 'numpy'")),
        "Megatron Core",
        Status.FAILURE,
        "No module named 'numpy'",
        "constraints.txt",
    ),
    (
        "on the path only",
        lambda: with_distribution(LAPTOP, "mok-megatron", None),
        "Plugin registration",
        Status.WARNING,
        "not installed",
        "mok_megatron.register()",
    ),
    (
        "autoload off",
        lambda: replace(LAPTOP, autoload_disabled=True),
        "Plugin registration",
        Status.WARNING,
        "TORCH_DEVICE_BACKEND_AUTOLOAD=0",
        "unset",
    ),
    (
        "no entry point",
        lambda: with_torch(LAPTOP, autoloaded=False),
        "Plugin registration",
        Status.FAILURE,
        "does not load it",
        "--force-reinstall",
    ),
    (
        "not accepted",
        lambda: replace(LAPTOP, megatron=Probe({"accepts_mok": False})),
        "Plugin registration",
        Status.FAILURE,
        "does not accept",
        "0.19.2",
    ),
    (
        "no Transformer Engine",
        lambda: with_distribution(HOPPER, "transformer_engine", None),
        "Transformer Engine",
        Status.WARNING,
        "not installed",
        "mok-megatron[te]",
    ),
    (
        "old Transformer Engine",
        lambda: with_distribution(HOPPER, "transformer_engine", "1.13.0"),
        "Transformer Engine",
        Status.WARNING,
        "1.13.0",
        "2.20.2",
    ),
    ("PyPI's apex", lambda: replace(LAPTOP, apex="other"), "Apex", Status.WARNING, "Pyramid", "pip uninstall apex"),
    (
        "no nvcc, GPU, empty cache",
        lambda: replace(HOPPER, libraries=(), toolkit="no CUDA compiler (nvcc) found: install one. Tried:"),
        "CUDA toolkit",
        Status.FAILURE,
        "no CUDA compiler",
        "install one",
    ),
    (
        "no nvcc, GPU, kernels in the cache",
        lambda: replace(HOPPER, toolkit="no CUDA compiler (nvcc) found: install one. Tried:"),
        "CUDA toolkit",
        Status.WARNING,
        "the cache has this machine's kernels",
        "install one",
    ),
    (
        "no nvcc, no GPU",
        lambda: replace(LAPTOP, toolkit="no CUDA compiler (nvcc) found: install one. Tried:"),
        "CUDA toolkit",
        Status.WARNING,
        "nothing here needs it",
        "install one",
    ),
    (
        "toolkit too old",
        lambda: replace(TRAY, libraries=(), toolkit=Toolkit(Path("/cuda/bin/nvcc"), "12.8.93", Path("/cuda"))),
        "CUDA toolkit",
        Status.FAILURE,
        "too old",
        "install CUDA >=13.0",
    ),
    (
        "no g++",
        lambda: replace(HOPPER, host_compiler=None, libraries=()),
        "C++ compiler",
        Status.FAILURE,
        "g++",
        "apt-get install g++",
    ),
    (
        "no CUTLASS",
        lambda: replace(HOPPER, libraries=(), cutlass="CUTLASS's headers are missing: pip install nvidia-cutlass"),
        "CUTLASS headers",
        Status.FAILURE,
        "missing",
        "pip install nvidia-cutlass",
    ),
    (
        "driver too old",
        lambda: with_driver(HOPPER, version="570.1", cuda=(12, 8)),
        "Driver and CUDA",
        Status.FAILURE,
        "CUDA up to 12.8, too old for torch (CUDA 13.0) and nvcc (CUDA 13.0)",
        "update the driver",
    ),
    (
        "cache that others may write",
        lambda: replace(LAPTOP, cache_error="/cache can be written by others: chmod go-w /cache"),
        "Kernel cache",
        Status.FAILURE,
        "written by others",
        "chmod go-w /cache",
    ),
    (
        "empty cache",
        lambda: replace(HOPPER, libraries=()),
        "Kernel cache",
        Status.WARNING,
        "first use compiles sm_90a",
        "mok-megatron build --arch 90a",
    ),
    (
        "GPU without a kernel",
        lambda: with_driver(HOPPER, gpus=(UNKNOWN_GPU,) * 2),
        "GPU",
        Status.FAILURE,
        "no kernel for NVIDIA A100",
        "--mok-backend reference",
    ),
    (
        "unequal GPUs",
        lambda: with_driver(HOPPER, gpus=(H200, replace(H200, memory_gib=80.0))),
        "GPU",
        Status.WARNING,
        "they differ",
        "equal GPUs",
    ),
    (
        "GPUs without NVLink",
        lambda: with_driver(TRAY, nvlink=pairs(4) - {(1, 3)}),
        "NVLink",
        Status.FAILURE,
        "GPUs 1-3 (1 of 6 pairs)",
        "nvidia-smi topo -m",
    ),
    (
        "no peer access",
        lambda: with_torch(HOPPER, no_peer_access=[(0, 1)]),
        "Peer access",
        Status.FAILURE,
        "GPU 0 to 1",
        "ACS",
    ),
    (
        "symmetric memory fails",
        lambda: replace(HOPPER, symmetric_memory=Probe(error="pidfd_getfd: Operation not permitted")),
        "Symmetric memory",
        Status.FAILURE,
        "Operation not permitted",
        "--cap-add=SYS_PTRACE",
    ),
    (
        "fabric registering",
        lambda: with_driver(TRAY, gpus=(GB300, UNREGISTERED)),
        "NVLink fabric",
        Status.FAILURE,
        "GPU 1: in progress",
        "Completed",
    ),
    (
        "fabric refused a GPU",
        lambda: with_driver(TRAY, gpus=(REFUSED, GB300)),
        "NVLink fabric",
        Status.FAILURE,
        "GPU 0: completed, NVML status 999",
        "fabric manager",
    ),
    (
        "two clusters",
        lambda: with_driver(TRAY, gpus=(GB300, replace(GB300, cluster="6a" * 16))),
        "NVLink fabric",
        Status.FAILURE,
        "2 clusters",
        "fabric manager",
    ),
    ("no IMEX channel", lambda: TRAY, "IMEX", Status.FAILURE, "no channel", "NVreg_CreateImexChannel0"),
    (
        "IMEX tool missing",
        lambda: replace(TRAY, imex_channels=("channel0",)),
        "IMEX",
        Status.WARNING,
        "nvidia-imex-ctl",
        "READY",
    ),
    (
        "IMEX domain down",
        lambda: replace(TRAY, imex_channels=("channel0",), imex_status="Node 3 UNAVAILABLE\nDomain State: DOWN"),
        "IMEX",
        Status.FAILURE,
        "Domain State: DOWN",
        "systemctl start nvidia-imex",
    ),
    (
        "broken tuned file",
        lambda: replace(HOPPER, tuned="x.yaml, line 3: ep: needs a whole number"),
        "Tuned settings",
        Status.FAILURE,
        "x.yaml, line 3",
        "MOK_TUNED_DIR=none",
    ),
]


@pytest.mark.parametrize(
    ("facts", "name", "status", "found", "remedy"), [c[1:] for c in CASES], ids=[c[0] for c in CASES]
)
def test_finding(facts: Callable[[], Facts], name: str, status: Status, found: str, remedy: str) -> None:
    check = diagnose(facts())[name]
    assert check.status is status, check
    assert found in check.found, check
    assert remedy in str(check.remedy), check


def test_every_check_has_a_case_that_is_not_ok() -> None:
    names = set(diagnose(HOPPER)) | set(diagnose(TRAY)) | set(diagnose(LAPTOP))
    assert names == {case[2] for case in CASES}


def test_when_nothing_imports_every_check_still_answers() -> None:
    facts = replace(LAPTOP, torch=Probe(error="crash"), megatron=Probe(error="crash"), toolkit="no nvcc: get one")
    checks = diagnose(facts)
    assert set(checks) == set(diagnose(LAPTOP))
    assert checks["Plugin registration"].status is Status.FAILURE


def test_tuned_settings_are_listed() -> None:
    assert "the defaults run" in diagnose(HOPPER)["Tuned settings"].found
    listed = diagnose(replace(HOPPER, tuned=("/settings/h200/glm_5_2-ep2.yaml",)))["Tuned settings"]
    assert listed.status is Status.OK and listed.found == "glm_5_2-ep2"


def test_tuned_files_are_found_and_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOK_TUNED_DIR", str(tmp_path))
    path = tmp_path / "h200" / "x-ep2.yaml"
    path.parent.mkdir()
    path.write_text("gpu: 1\n")
    found = facts._tuned(HOPPER.driver)
    assert isinstance(found, str) and str(path) in found
    assert facts._tuned("no driver") == ()
