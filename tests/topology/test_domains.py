"""NVLink domains from recorded NVML answers, and without NVML."""

import builtins

import pynvml
import pytest
import torch

from mok_megatron.topology.domains import Domain, FabricError, local_domain
from tests.topology.fake_nvml import FakeNvml

RACK_A, RACK_B = bytes(range(16)), bytes(range(1, 17))
COMPLETED = pynvml.NVML_GPU_FABRIC_STATE_COMPLETED


def fabric(cluster=RACK_A, clique=3, state=COMPLETED, status=0):
    return (state, status, cluster, clique)


def domain_of(*answers, timeout_s=5.0, host="tray7"):
    nvml = FakeNvml({"GPU-0": list(answers)})
    try:
        return local_domain("GPU-0", nvml=nvml, host=host, timeout_s=timeout_s)
    finally:
        assert nvml.open == 0  # NVML is shut down again, whatever happened


def test_cluster_and_clique_make_the_domain():
    first = domain_of(fabric(), host="tray1")
    assert first.kind == "fabric"
    assert RACK_A.hex() in str(first)
    assert first == domain_of(fabric(), host="tray2")
    assert first != domain_of(fabric(cluster=RACK_B))
    assert first != domain_of(fabric(clique=4))


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (fabric(state=pynvml.NVML_GPU_FABRIC_STATE_NOT_SUPPORTED), "no NVLink fabric beyond its host"),
        (fabric(cluster=bytes(16)), "no cluster UUID"),
    ],
)
def test_the_host_where_there_is_no_fabric(answer, reason):
    domain = domain_of(answer, host="node3")
    assert domain.kind == "host"
    assert reason in domain.reason
    assert "node3" in str(domain)


def test_padding_after_the_state_byte_is_ignored():
    assert domain_of(fabric(state=COMPLETED | 0xABCD00)).kind == "fabric"


def test_a_gpu_that_is_still_registering_is_waited_for(monkeypatch):
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    pending = fabric(state=pynvml.NVML_GPU_FABRIC_STATE_IN_PROGRESS)
    assert domain_of(pending, pending, fabric()).kind == "fabric"


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (fabric(state=pynvml.NVML_GPU_FABRIC_STATE_IN_PROGRESS), "still registering with its NVLink fabric after 0 s"),
        (fabric(state=pynvml.NVML_GPU_FABRIC_STATE_NOT_STARTED), "start the fabric manager"),
        (fabric(status=pynvml.NVML_ERROR_UNKNOWN), "failed to register.*take this node out"),
    ],
)
def test_a_broken_fabric_is_an_error_and_not_a_host(answer, says):
    with pytest.raises(FabricError, match=says):
        domain_of(answer, timeout_s=0.0)


def test_nvml_that_is_missing_or_refuses():
    no_library = FakeNvml({}, init_error=pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)
    domain = local_domain("GPU-0", nvml=no_library, host="node3")
    assert domain.kind == "host"
    assert "NVML is not available" in domain.reason
    old_driver = FakeNvml({"GPU-0": [fabric()]}, query_error=pynvml.NVML_ERROR_FUNCTION_NOT_FOUND)
    assert "no fabric information for GPU-0" in local_domain("GPU-0", nvml=old_driver, host="node3").reason
    assert old_driver.open == 0


def test_nvidia_ml_py_that_is_not_installed(monkeypatch):
    real = builtins.__import__

    def without_pynvml(name, *args, **kwargs):
        if name == "pynvml":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without_pynvml)
    domain = local_domain("GPU-0", host="node3")
    assert domain.kind == "host"
    assert "nvidia-ml-py is not installed" in domain.reason


def test_two_processes_of_one_machine_share_a_host_domain():
    assert domain_of(fabric(cluster=bytes(16)), host="container-1") == domain_of(
        fabric(cluster=bytes(16)), host="container-2"
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_machine_without_gpus():
    assert local_domain(host="laptop") == Domain("host", local_domain().key)
    assert local_domain(host="laptop").reason == "no CUDA device"


@pytest.mark.gpu
def test_this_machine():
    domain = local_domain()
    assert domain == local_domain(0)
    assert domain.kind in ("fabric", "host")
