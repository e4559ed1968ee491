"""Checks of the GPUs and of the NVLink between them."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from mok_megatron import tuned
from mok_megatron.build import ARCHITECTURES
from mok_megatron.doctor.facts import Facts
from mok_megatron.doctor.nvml import Driver
from mok_megatron.doctor.report import Check, failure, ok, warning


def checks(facts: Facts) -> Iterator[Check]:
    if isinstance(facts.driver, str) or not facts.driver.gpus:
        reason = facts.driver if isinstance(facts.driver, str) else "the driver finds none"
        yield warning(
            "GPU",
            f"none: {reason}",
            "without one the reference backend runs, on the CPU: enough to develop and to run the quick start and the "
            "tests",
        )
        return
    yield gpus(facts.driver)
    if len(facts.driver.gpus) > 1:
        yield nvlink(facts.driver)
        yield peer_access(facts)
    yield from symmetric_memory(facts)
    yield fabric(facts.driver)
    yield from imex(facts)
    yield tuned_settings(facts)


def gpus(driver: Driver) -> Check:
    kinds = Counter((gpu.name, gpu.capability, round(gpu.memory_gib)) for gpu in driver.gpus)
    found = "; ".join(f"{n} x {name}, sm_{c[0]}{c[1]}, {gib} GiB" for (name, c, gib), n in kinds.items())
    supported = {arch.capability for arch in ARCHITECTURES.values()}
    without = sorted({gpu.name for gpu in driver.gpus if gpu.capability not in supported})
    if without:
        known = "; ".join("sm_{}{} ({})".format(*arch.capability, arch.gpus) for arch in ARCHITECTURES.values())
        return failure(
            "GPU",
            f"{found}: no kernel for {', '.join(without)}",
            f"kernels are for {known}; --mok-backend reference runs on any",
        )
    unproven = {arch.capability for arch in ARCHITECTURES.values() if not arch.run}
    if any(gpu.capability in unproven for gpu in driver.gpus):
        return warning(
            "GPU",
            f"{found}: the kernels were compiled and checked for it, and never run",
            "mok-megatron selftest --gpu says whether they work here; docs/blackwell.md what it checks",
        )
    if len(kinds) > 1:
        return warning(
            "GPU", f"{found}: they differ", "use equal GPUs in an expert-parallel group: the slowest sets the pace"
        )
    return ok("GPU", found)


def nvlink(driver: Driver) -> Check:
    count = len(driver.gpus)
    pairs = {(i, j) for j in range(count) for i in range(j)}
    apart = sorted(pairs - driver.nvlink)
    if apart:
        listed = ", ".join(f"{i}-{j}" for i, j in apart[:8]) + (" ..." if len(apart) > 8 else "")
        return failure(
            "NVLink",
            f"not between GPUs {listed} ({len(apart)} of {len(pairs)} pairs)",
            "keep expert-parallel groups inside GPUs that NVLink joins ('nvidia-smi topo -m'); where it should join "
            "them, see 'nvidia-smi nvlink -s' and the fabric manager (systemctl status nvidia-fabricmanager)",
        )
    return ok("NVLink", f"between all {count} GPUs of this machine")


def peer_access(facts: Facts) -> Check:
    denied = facts.torch.found.get("no_peer_access")
    if denied is None:
        return failure("Peer access", "unknown: torch does not import", "see torch above")
    if denied:
        listed = ", ".join(f"{i} to {j}" for i, j in denied[:8]) + (" ..." if len(denied) > 8 else "")
        return failure(
            "Peer access",
            f"refused from GPU {listed}",
            "switch ACS off in the machine's firmware or for the virtual machine, and see 'nvidia-smi topo -p2p r'",
        )
    return ok("Peer access", "between all GPUs that torch sees")


def symmetric_memory(facts: Facts) -> Iterator[Check]:
    probe = facts.symmetric_memory
    if probe is None:
        return
    if probe.error:
        yield failure(
            "Symmetric memory",
            f"a round trip between the local GPUs failed: {probe.error}",
            "containers need the capability to share GPU memory between processes: --ipc=host, or "
            "--cap-add=SYS_PTRACE; see the peer access and fabric lines too",
        )
    else:
        yield ok("Symmetric memory", f"written and read across {probe.found['ranks']} GPUs")


def fabric(driver: Driver) -> Check:
    """The NVLink fabric beyond the host (NVL72 and NVSwitch systems), as each GPU's registration says."""
    bad = [
        f"GPU {i}: {gpu.fabric}" + (f", NVML status {gpu.fabric_status}" if gpu.fabric_status else "")
        for i, gpu in enumerate(driver.gpus)
        if gpu.fabric in ("not started", "in progress") or (gpu.fabric == "completed" and gpu.fabric_status)
    ]
    if bad:
        return failure(
            "NVLink fabric",
            "; ".join(bad),
            "start the fabric manager of the NVLink switches and wait until 'nvidia-smi -q' says Completed under "
            "Fabric",
        )
    clusters = {gpu.cluster for gpu in driver.gpus if gpu.cluster}
    if len(clusters) > 1:
        return failure(
            "NVLink fabric",
            f"this machine's GPUs are in {len(clusters)} clusters",
            "see the fabric manager's configuration",
        )
    if clusters:
        return ok("NVLink fabric", f"registered, cluster {clusters.pop()}")
    return ok("NVLink fabric", "NVLink ends at this host: an expert-parallel group must stay inside it")


def imex(facts: Facts) -> Iterator[Check]:
    """IMEX exports memory between the hosts of an NVLink fabric; only such fabrics need it (NVIDIA IMEX guide)."""
    if isinstance(facts.driver, str) or not any(gpu.cluster for gpu in facts.driver.gpus):
        return
    if not facts.imex_channels:
        yield failure(
            "IMEX",
            "no channel: /dev/nvidia-caps-imex-channels is empty",
            "create channel 0 (load the driver with NVreg_CreateImexChannel0=1) and pass it into the container",
        )
        return
    if facts.imex_status is None:
        yield warning(
            "IMEX",
            f"{len(facts.imex_channels)} channel(s); nvidia-imex-ctl is not here to ask for the state of the domain",
            "on the host: nvidia-imex-ctl -N must list every node of the rack as READY and CONNECTED",
        )
    elif "UP" not in facts.imex_status.split():
        last = facts.imex_status.splitlines()[-1] if facts.imex_status else "(nothing)"
        yield failure(
            "IMEX",
            f"the domain is not up; nvidia-imex-ctl -N ends with: {last}",
            "start nvidia-imex on every node of the rack with the same nodes_config.cfg (systemctl start nvidia-imex)",
        )
    else:
        yield ok("IMEX", f"domain up, {len(facts.imex_channels)} channel(s)")


def tuned_settings(facts: Facts) -> Check:
    """What `mok-megatron tune` left for these GPUs; the layer takes the file of its shape and EP by itself."""
    if isinstance(facts.tuned, str):
        return failure(
            "Tuned settings", facts.tuned, f"correct or remove the file, or set {tuned.FOLDER_ENV}={tuned.NONE}"
        )
    names = ", ".join(Path(path).stem for path in facts.tuned)
    return ok("Tuned settings", names or "none for these GPUs: the defaults run")
