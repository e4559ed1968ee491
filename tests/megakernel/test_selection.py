"""Which GPU gets which kernels: those of its compute capability and no others."""

from __future__ import annotations

import warnings

import pytest
import torch

from mok_megatron import MokConfig, megakernel
from mok_megatron.build import ARCHITECTURES, BuildError, library
from mok_megatron.errors import MokBackendError
from mok_megatron.megakernel import binding
from mok_megatron.ops import backend

GPU = torch.device("cuda", 0)


@pytest.fixture
def machine(monkeypatch):
    """A machine with one GPU of a compute capability."""

    def have(capability):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "Some GPU")
        monkeypatch.setattr(backend, "_selected", {}, raising=False)

    return have


@pytest.mark.parametrize("capability,name", [((9, 0), "90a"), ((10, 0), "100a"), ((10, 3), "103a")])
def test_a_supported_gpu_gets_the_kernels_of_its_architecture(machine, capability, name):
    machine(capability)
    assert library.local_architecture().name == name
    assert megakernel.unavailable_reason(GPU) is None
    assert backend.select_backend(MokConfig(), GPU).name == "megakernel"


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (10, 1), (11, 0), (12, 0), (12, 1)])
def test_other_gpus_are_refused_with_what_there_is(machine, capability):
    machine(capability)
    with pytest.raises(BuildError, match="{}.{}; there are kernels for 9.0 .*10.0 .*10.3".format(*capability)):
        library.local_architecture()
    with pytest.raises(MokBackendError, match=r"Some GPU has .*9.0 .*10.0 .*10.3 .*--mok-backend reference"):
        backend.select_backend(MokConfig(), GPU)


def test_one_table_of_architectures():
    from mok_megatron.ops.formats import SUPPORT

    assert set(SUPPORT["megakernel"]) == {arch.capability for arch in ARCHITECTURES.values()}
    assert [arch.name for arch in ARCHITECTURES.values() if arch.run] == ["90a"]


@pytest.mark.parametrize("capability,warned", [((9, 0), False), ((10, 0), True), ((10, 3), True)])
def test_kernels_that_were_never_run_say_so(machine, monkeypatch, capability, warned):
    def no_compiler(arch=None):
        raise BuildError("no compiler here")

    machine(capability)
    monkeypatch.setattr(binding, "load_library", no_compiler)
    with warnings.catch_warnings(record=True) as said, pytest.raises(BuildError):
        warnings.simplefilter("always")
        binding.library.__wrapped__()
    messages = [str(w.message) for w in said]
    assert len(messages) == warned and all("never run on one" in m and "selftest --gpu" in m for m in messages)
