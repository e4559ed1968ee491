"""Checks of the CUDA toolkit, its match with torch and driver, and the cache of compiled kernels."""

from collections.abc import Iterator

from packaging.version import Version

from mok_megatron import versions
from mok_megatron.build import ARCHITECTURES
from mok_megatron.doctor.facts import Facts
from mok_megatron.doctor.report import Check, failure, ok, warning


def needed_architectures(facts: Facts) -> list[str]:
    """Architectures of this machine's GPUs that there are kernels for."""
    if isinstance(facts.driver, str):
        return []
    capabilities = {gpu.capability for gpu in facts.driver.gpus}
    return [arch.name for arch in ARCHITECTURES.values() if arch.capability in capabilities]


def checks(facts: Facts) -> Iterator[Check]:
    yield toolkit(facts)
    yield host_compiler(facts)
    yield cutlass(facts)
    yield from cuda_match(facts)
    yield kernel_cache(facts)


def _missing(facts: Facts, name: str, found: str, remedy: str) -> Check:
    """A part of the compiler that is missing: grave only where kernels have yet to be compiled."""
    needed = needed_architectures(facts)
    if not needed:
        return warning(name, f"{found} (nothing here needs it: there is no GPU with a kernel)", remedy)
    if set(needed) <= set(facts.libraries):
        return warning(name, f"{found} (the cache has this machine's kernels)", remedy)
    return failure(name, found, remedy)


def toolkit(facts: Facts) -> Check:
    if isinstance(facts.toolkit, str):
        first, _, rest = facts.toolkit.partition(": ")
        return _missing(facts, "CUDA toolkit", first, rest.partition("Tried:")[0].strip() or first)
    found = f"nvcc {facts.toolkit.version} ({facts.toolkit.root})"
    if not versions.in_range(facts.toolkit.version, versions.CUDA_TOOLKIT):
        return _missing(facts, "CUDA toolkit", f"{found}, too old", f"install CUDA {versions.CUDA_TOOLKIT}")
    return ok("CUDA toolkit", found)


def host_compiler(facts: Facts) -> Check:
    if facts.host_compiler is None:
        return _missing(
            facts, "C++ compiler", "none on PATH; nvcc calls g++", "apt-get install g++, or name one with NVCC_CCBIN"
        )
    return ok("C++ compiler", facts.host_compiler)


def cutlass(facts: Facts) -> Check:
    if isinstance(facts.cutlass, str):
        first, _, remedy = facts.cutlass.partition(": ")
        return _missing(facts, "CUTLASS headers", first, remedy or first)
    return ok("CUTLASS headers", facts.cutlass.version)


def cuda_match(facts: Facts) -> Iterator[Check]:
    """Driver, torch and toolkit: a library runs on a driver of its CUDA major version or later (CUDA Compatibility)."""
    if isinstance(facts.driver, str) or facts.torch.error:
        return
    name = "Driver and CUDA"
    driver = facts.driver.cuda
    built = {}
    if facts.torch.found["cuda"]:
        built["torch"] = Version(facts.torch.found["cuda"]).release[:2]
    if not isinstance(facts.toolkit, str):
        built["nvcc"] = Version(facts.toolkit.version).release[:2]
    too_new = [f"{what} (CUDA {major}.{minor})" for what, (major, minor) in built.items() if major > driver[0]]
    found = "driver {} runs CUDA up to {}.{}".format(facts.driver.version, *driver)
    if too_new:
        yield failure(
            name,
            f"{found}, too old for {' and '.join(too_new)}",
            "update the driver: CUDA 13 needs 580 or later",
        )
    else:
        yield ok(name, "; ".join([found, *(f"{what} is of CUDA {a}.{b}" for what, (a, b) in built.items())]))


def kernel_cache(facts: Facts) -> Check:
    name = "Kernel cache"
    if facts.cache_error is not None:
        first, _, remedy = facts.cache_error.rpartition(": ")
        return failure(name, first or facts.cache_error, remedy)
    built = ", ".join(f"sm_{arch}" for arch in facts.libraries) or "empty"
    found = f"{facts.cache_folder}: {built}"
    missing = [arch for arch in needed_architectures(facts) if arch not in facts.libraries]
    if missing:
        return warning(
            name,
            f"{found}; first use compiles sm_{', sm_'.join(missing)}, which takes minutes",
            f"compile ahead of time: mok-megatron build --arch {','.join(missing)}",
        )
    return ok(name, found)
