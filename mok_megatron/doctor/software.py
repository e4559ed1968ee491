"""Checks of Python, the packages, and the plugin's registration."""

from collections.abc import Iterator

from mok_megatron import versions
from mok_megatron.doctor.facts import Facts
from mok_megatron.doctor.report import Check, failure, ok, warning


def checks(facts: Facts) -> Iterator[Check]:
    yield python(facts)
    yield torch(facts)
    yield megatron_core(facts)
    yield plugin(facts)
    yield transformer_engine(facts)
    yield apex(facts)


def python(facts: Facts) -> Check:
    version = ".".join(map(str, facts.python))
    found = f"{version} ({facts.executable})"
    if versions.in_range(version, versions.PYTHON):
        return ok("Python", found)
    return failure("Python", found, f"install Python {versions.PYTHON} and create the environment with it")


def torch(facts: Facts) -> Check:
    package = versions.VersionCheck("torch", versions.TORCH, facts.distributions["torch"])
    if package.problem:
        return failure("torch", package.problem.split(":")[0], f"pip install 'torch{versions.TORCH}'")
    if facts.torch.error:
        return failure(
            "torch",
            f"{package.found} is installed but does not import: {facts.torch.error}",
            "install it again, with the versions of constraints.txt; an error that names a library "
            "means that LD_LIBRARY_PATH leads to another version of it",
        )
    cuda, devices = facts.torch.found["cuda"], facts.torch.found["devices"]
    found = f"{facts.torch.found['version']}, " + (f"built for CUDA {cuda}" if cuda else "built without CUDA")
    gpus = 0 if isinstance(facts.driver, str) else len(facts.driver.gpus)
    if gpus and not cuda:
        return failure(
            "torch", f"{found}; this machine has {gpus} GPUs", "pip install torch from an index with CUDA builds"
        )
    if gpus and not devices:
        return failure(
            "torch",
            f"{found}, but it sees none of this machine's {gpus} GPUs",
            "look at CUDA_VISIBLE_DEVICES, at the match of driver and CUDA below, and at what "
            "python -c 'import torch; torch.cuda.init()' says",
        )
    return ok("torch", found + (f", NCCL {facts.torch.found['nccl']}" if devices else ""))


def megatron_core(facts: Facts) -> Check:
    package = versions.VersionCheck("megatron-core", versions.MEGATRON_CORE, facts.distributions["megatron-core"])
    if package.found is None or package.problem:
        found = "not installed" if package.found is None else f"{package.found}; supported is {package.supported}"
        return failure("Megatron Core", found, f"pip install 'megatron-core{versions.MEGATRON_CORE}'")
    if facts.megatron.error:
        return failure(
            "Megatron Core",
            f"{package.found} is installed but does not import: {facts.megatron.error}",
            "install what the message names, or install mok-megatron again with the versions of constraints.txt",
        )
    return ok("Megatron Core", package.found)


def plugin(facts: Facts) -> Check:
    version = facts.distributions["mok-megatron"]
    name = "Plugin registration"
    if version is None:
        return warning(
            name,
            "mok_megatron is on the path but not installed, so Megatron does not find it by itself",
            "pip install -e . in the checkout, or call mok_megatron.register() before Megatron parses its arguments",
        )
    if facts.autoload_disabled:
        return warning(
            name,
            f"mok-megatron {version} is installed, but TORCH_DEVICE_BACKEND_AUTOLOAD=0 turns torch's autoload off",
            "unset that variable, or call mok_megatron.register() before Megatron parses its arguments",
        )
    if facts.torch.error or facts.megatron.error:
        return failure(name, "cannot be tested: torch or Megatron Core does not import", "see the lines above")
    if not facts.torch.found["autoloaded"]:
        return failure(
            name,
            f"mok-megatron {version} is installed, but import torch does not load it",
            "install it again (pip install --force-reinstall --no-deps mok-megatron): its entry point is missing",
        )
    if not facts.megatron.found["accepts_mok"]:
        return failure(
            name,
            "Megatron Core does not accept --moe-token-dispatcher-type mok",
            f"use Megatron Core {versions.MEGATRON_CORE}; if it is, report this with the output of this command",
        )
    return ok(name, f"mok-megatron {version}; --moe-token-dispatcher-type mok is accepted by an unmodified Megatron")


def transformer_engine(facts: Facts) -> Check:
    name, version = "Transformer Engine", facts.distributions["transformer_engine"]
    if version is None:
        if isinstance(facts.driver, str):
            return ok(name, "not installed, and not needed without a GPU")
        return warning(
            name,
            "not installed; Megatron's scripts use it unless told otherwise",
            "pip install --no-build-isolation 'mok-megatron[te]', or train with --transformer-impl local",
        )
    if not versions.in_range(version, versions.TRANSFORMER_ENGINE):
        return warning(
            name,
            f"{version}; tested is {versions.TRANSFORMER_ENGINE}",
            f"pip install --no-build-isolation 'transformer_engine[pytorch]{versions.TRANSFORMER_ENGINE}'",
        )
    return ok(name, version)


def apex(facts: Facts) -> Check:
    if facts.apex == "other":
        return warning(
            "Apex",
            "the package named apex is not NVIDIA's: PyPI's apex is an unrelated toolkit for the Pyramid web framework",
            "pip uninstall apex. NVIDIA's is built from its repository, github.com/NVIDIA/apex, and is optional "
            "beside Transformer Engine",
        )
    if facts.apex == "nvidia":
        return ok("Apex", "NVIDIA's")
    return ok("Apex", "not installed; optional: Megatron takes Transformer Engine's kernels or torch's instead")
