"""Machines that do not exist, as facts: a good one of each kind, to be spoilt one fact at a time."""

from pathlib import Path

from mok_megatron.build.toolkit import Cutlass, Toolkit
from mok_megatron.doctor.facts import Facts, Probe
from mok_megatron.doctor.nvml import Driver, Gpu

H200 = Gpu("NVIDIA H200", (9, 0), 140.4)
GB300 = Gpu("NVIDIA GB300", (10, 3), 277.0, "completed", 0, "5f" * 16)


def torch_probe(devices: int) -> Probe:
    return Probe(
        {
            "version": "2.11.0+cu130",
            "cuda": "13.0",
            "nccl": "2.28.9",
            "devices": devices,
            "no_peer_access": [],
            "autoloaded": True,
        }
    )


def machine(driver: Driver | str, libraries: tuple[str, ...] = (), symmetric: Probe | None = None) -> Facts:
    gpus = 0 if isinstance(driver, str) else len(driver.gpus)
    return Facts(
        python=(3, 12, 9),
        executable="/venv/bin/python",
        distributions={
            "mok-megatron": "0.1.0",
            "torch": "2.11.0+cu130",
            "megatron-core": "0.19.2",
            "transformer_engine": "2.20.2",
            "nvidia-cutlass": "4.2.0.0",
            "nvidia-ml-py": "13.615.71",
        },
        apex=None,
        autoload_disabled=False,
        torch=torch_probe(gpus),
        megatron=Probe({"accepts_mok": True}),
        toolkit=Toolkit(Path("/cuda/bin/nvcc"), "13.0.88", Path("/cuda")),
        host_compiler="/usr/bin/g++",
        cutlass=Cutlass(Path("/cutlass/include"), "4.2.0.0"),
        cache_folder="/home/user/.cache/mok_megatron",
        cache_error=None,
        libraries=libraries,
        driver=driver,
        symmetric_memory=symmetric,
        imex_channels=(),
        imex_status=None,
    )


def pairs(count: int) -> frozenset[tuple[int, int]]:
    return frozenset((i, j) for j in range(count) for i in range(j))


LAPTOP = machine("no NVIDIA driver answers (NVML: NVML Shared Library Not Found)")
HOPPER = machine(Driver("580.65.06", (13, 0), (H200,) * 2, pairs(2)), ("90a",), Probe({"ranks": 2}))
TRAY = machine(Driver("580.65.06", (13, 0), (GB300,) * 4, pairs(4)), ("103a",), Probe({"ranks": 4}))
