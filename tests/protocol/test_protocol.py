"""The model of the synchronisation protocol, explored completely; and each seeded fault found in it.

README.md says what is modelled. `pytest tests/protocol -rP` prints states, memory and seconds of each exploration.
"""

from __future__ import annotations

import functools
import os
import re
import resource
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

HERE = Path(__file__).parent
KERNELS = HERE.parent.parent / "kernels"
MISSING = [tool for tool in ("spin", "gcc") if shutil.which(tool) is None]
needs_spin = pytest.mark.skipif(
    bool(MISSING), reason=f"{' and '.join(MISSING)} not found; on Debian: apt-get install spin gcc"
)


@dataclass(frozen=True)
class Result:
    """What a run of the verifier said; `seconds` of CPU."""

    errors: list[str]
    states: int
    megabytes: float
    seconds: float


@pytest.fixture(scope="session")
def verifier(tmp_path_factory: pytest.TempPathFactory) -> functools.partial[Path]:
    return functools.partial(_build, tmp_path_factory.mktemp("protocol"))


@functools.cache
def _build(folder: Path, defines: str, flags: str = "-O1 -DSAFETY") -> Path:
    """Compile a verifier of the model with these bounds."""
    place = folder / re.sub(r"\W+", "_", defines + flags)
    place.mkdir()
    subprocess.run(["spin", *defines.split(), "-a", str(HERE / "protocol.pml")], cwd=place, check=True, timeout=60)
    subprocess.run(
        ["gcc", *flags.split(), "-w", "-DCOLLAPSE", "-DMEMLIM=4096", "pan.c", "-o", "pan"], cwd=place, check=True
    )
    return place / "pan"


def _explore(pan: Path, fault: int = 0, *options: str) -> Result:
    start = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    done = subprocess.run(
        [str(pan), "-m1000000", *options],
        cwd=pan.parent,
        env={**os.environ, "FAULT": str(fault)},
        capture_output=True,
        text=True,
        timeout=170,
    )
    seconds = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - start
    errors = re.findall(r"^pan:1: (.*) \(at depth", done.stdout, re.M)
    states = re.search(r"(\d+) states, stored", done.stdout)
    memory = re.search(r"([\d.]+)\s+total actual memory usage", done.stdout)
    assert states and memory, done.stdout + done.stderr
    counted = re.search(r"errors: (\d+)", done.stdout)
    assert counted and (counted[1] == "0") == (not errors), done.stdout
    if not errors:
        for bad in ("Search not completed", "search depth too small", "out of memory", "max search depth"):
            assert bad not in done.stdout + done.stderr, done.stdout
    result = Result(errors, int(states[1]), float(memory[1]), seconds)
    print(f"{result.states:,} states, {result.megabytes:.0f} MB, {result.seconds:.1f} s")
    return result


# ---- the protocol holds: bounds, and the least number of states that a run must have seen to mean anything

COMPLETE = {
    "two minibatches, ring of one": ("-DBLOCKS=2 -DRING=1", 20_000),
    "three minibatches, ring of one": ("-DBLOCKS=3 -DRING=1", 30_000),
    "three minibatches, ring of two": ("-DBLOCKS=3 -DRING=2", 40_000),
    "nothing evicted": ("-DBLOCKS=2 -DRING=2", 20_000),
    "two compute CTAs": ("-DBLOCKS=2 -DRING=1 -DWORKERS=2", 500_000),
    "three ranks": ("-DRANKS=3 -DBLOCKS=2 -DRING=1", 1_000_000),
    "three ranks, ring of two": ("-DRANKS=3 -DBLOCKS=3 -DRING=2 -DLAUNCHES=2", 2_500_000),
    "any routing": ("-DBLOCKS=2 -DRING=1 -DANY_ROUTING=1", 400_000),
    "pipeline order, any routing": ("-DBLOCKS=2 -DRING=1 -DLAUNCHES=4 -DORDER_OF_LAUNCHES=1 -DANY_ROUTING=2", 500_000),
    "a rank overflows": ("-DBLOCKS=2 -DRING=1 -DOVERFLOW=1", 40_000),
    "a rank dies": ("-DBLOCKS=2 -DRING=1 -DDEAD=1", 700_000),
    "one of three ranks dies": ("-DRANKS=3 -DBLOCKS=1 -DRING=1 -DLAUNCHES=2 -DDEAD=2", 3_000_000),
    "a rank gives up early": ("-DBLOCKS=3 -DRING=1 -DIMPATIENT=0", 150_000),
    "one of three ranks gives up early": ("-DRANKS=3 -DBLOCKS=1 -DRING=1 -DLAUNCHES=2 -DIMPATIENT=0", 500_000),
    "one rank goes on to other steps": ("-DBLOCKS=2 -DRING=1 -DLAUNCHES=4 -DDIFFERS", 10_000),
    "one of three ranks goes on to other steps": ("-DRANKS=3 -DBLOCKS=2 -DRING=1 -DDIFFERS", 500_000),
    "memory order": ("-DBLOCKS=2 -DRING=1 -DORDERED", 20_000),
    "memory order, two compute CTAs": ("-DBLOCKS=2 -DRING=1 -DLAUNCHES=2 -DORDERED -DWORKERS=2", 4_000_000),
}


@needs_spin
@pytest.mark.parametrize("scenario", COMPLETE)
def test_no_state_breaks_the_protocol(scenario: str, verifier: functools.partial[Path]) -> None:
    defines, least = COMPLETE[scenario]
    # A slow build pays where there are many states.
    pan = verifier(defines, "-O1 -DSAFETY" if least >= 500_000 else "-O0 -DSAFETY")
    result = _explore(pan)
    assert result.errors == []
    assert result.states >= least


@needs_spin
def test_no_launch_goes_on_for_ever(verifier: functools.partial[Path]) -> None:
    """No cycle of states without progress; with no deadlock above, every run ends."""
    assert _explore(verifier("-DBLOCKS=2 -DRING=1", "-O0 -DNP"), 0, "-l").errors == []


# ---- each fault is found: by fault, the scenario that shows it and what is reported

BASE = "-DBLOCKS=2 -DRING=1 -DSEEDED"
TWO = f"{BASE} -DWORKERS=2"
ORDER = f"{TWO} -DLAUNCHES=2 -DORDERED"
FORWARD = f"{TWO} -DLAUNCHES=1 -DORDERED"
FAULTS = {
    "PULL_BEFORE_INPUT_FLAG": (BASE, r"input\["),
    "INPUT_FLAG_OF_WRONG_EPOCH": (BASE, r"input\["),
    "ROUTES_FLAG_OF_WRONG_EPOCH": (BASE, r"announced\["),
    "DONE_FLAG_OF_WRONG_EPOCH": (BASE, r"slots\["),
    "NO_WAIT_FOR_DONE": (BASE, r"slots\["),
    "DONE_BY_FIRST_TILE": (TWO, r"slots\["),
    "COUNTERS_NOT_CLEARED": (BASE, r"x_rows\["),
    "TILE_BEFORE_ROWS": (BASE, r"x_rows\["),
    "X_RING_REUSED_EARLY": (BASE, r"x_rows\["),
    "HIDDEN_RING_REUSED_EARLY": (TWO, r"hidden_rows\["),
    "BACKWARD_RING_REUSED_EARLY": (BASE, r"(x_rows|dy_rows)\["),
    "DWEIGHT_BEFORE_DHIDDEN": (f"{BASE} -DWORKERS=3 -DLAUNCHES=2", r"dgate_up\["),
    "ONE_CARRY_BUFFER": ("-DBLOCKS=3 -DRING=1 -DSEEDED", r"carry\["),
    "ONE_DONE_FLAG": (f"{BASE} -DOVERFLOW=1", r"overflowed_in\["),
    "FAILURE_NOT_TOLD": (f"{BASE} -DOVERFLOW=1", r"overflowed_in\["),
    "ACTIVE_AFTER_STOP": (f"{BASE} -DIMPATIENT=1", r"announced\["),
    "ROWS_COUNTED_AFTER_STOP": (f"{BASE} -DIMPATIENT=1", r"x_rows\["),
    "LAG_IN_SHORT_RING": (BASE, "invalid end state"),
    "DONE_WAIT_WITHOUT_DEADLINE": (f"{BASE} -DDEAD=1", "invalid end state"),
    "STOP_NOT_SEEN": (f"{BASE} -DDEAD=1", "invalid end state"),
    "BACKWARD_NOT_ANNOUNCED": (f"{BASE} -DDIFFERS", "invalid end state"),
    "OTHER_STEP_NOT_TOLD": (f"{BASE} -DDIFFERS", "invalid end state"),
    "X_NOT_STAGED_AGAIN": (BASE, r"input_again\["),
    "ROUTES_WITHOUT_ACQUIRE": (ORDER, r"knows\["),
    "INPUT_WITHOUT_ACQUIRE": (ORDER, r"knows\["),
    "DONE_WITHOUT_ACQUIRE": (ORDER, r"knows\["),
    "ROWS_WITHOUT_ACQUIRE": (ORDER, r"knows_local\["),
    "FC1_WITHOUT_ACQUIRE": (ORDER, r"knows_local\["),
    "DHIDDEN_WITHOUT_ACQUIRE": (ORDER, r"knows_local\["),
    "MACROBATCH_WITHOUT_ACQUIRE": (ORDER, r"knows_local\["),
    "PUSHED_WITHOUT_ACQUIRE": (FORWARD, r"knows\["),
    "ROUTES_WITHOUT_RELEASE": (ORDER, r"knows\["),
    "INPUT_WITHOUT_RELEASE": (ORDER, r"knows\["),
    "DONE_WITHOUT_RELEASE": (ORDER, r"knows\["),
    "ROWS_WITHOUT_RELEASE": (ORDER, r"knows_local\["),
    "TILE_WITHOUT_RELEASE": (ORDER, r"knows_local\["),
    "PUSHED_WITHOUT_RELEASE": (FORWARD, r"knows\["),
}
LOST_BITS = "-DBLOCKS=2 -DRING=1 -DSEEDED -DLAUNCHES=4 -DORDER_OF_LAUNCHES=1 -DANY_ROUTING=2"


def _numbers() -> dict[str, int]:
    """The faults of the model, by name."""
    text = (HERE / "state.pml").read_text()
    section = text[text.index("seeded faults") : text.index("---- memory.")]
    return {name: int(number) for name, number in re.findall(r"#define (\w+) (\d+)", section)}


def test_every_fault_of_the_model_is_tested() -> None:
    numbers = _numbers()
    assert set(FAULTS) == set(numbers)
    assert len(set(numbers.values())) == len(numbers)


@needs_spin
@pytest.mark.parametrize("fault", FAULTS)
def test_a_seeded_fault_is_found(fault: str, verifier: functools.partial[Path]) -> None:
    defines, report = FAULTS[fault]
    errors = _explore(verifier(defines, "-O0 -DSAFETY"), _numbers()[fault]).errors
    assert len(errors) == 1 and re.search(report, errors[0])


@needs_spin
def test_one_done_flag_also_loses_the_request_for_x(verifier: functools.partial[Path]) -> None:
    """A forward followed by the backward of another microbatch: the peer is a launch ahead, its bits are gone."""
    errors = _explore(verifier(LOST_BITS, "-O0 -DSAFETY"), _numbers()["ONE_DONE_FLAG"]).errors
    assert len(errors) == 1 and "input_again[" in errors[0]


# ---- the model is of these kernels


def _mapped() -> list[tuple[str, str]]:
    rows = re.findall(r"^\|[^|]*\|([^|]*)\|([^|]*)\|$", (HERE / "README.md").read_text(), re.M)
    return [
        (file, name)
        for files, names in rows
        for file in re.findall(r"`kernels/([\w/.]+)`", files)
        for name in re.findall(r"`([\w:]+)`", names)
    ]


def test_every_step_of_the_model_names_a_function_of_the_kernels() -> None:
    mapped = _mapped()
    assert len(mapped) >= 20
    for file, name in mapped:
        text = (KERNELS / file).read_text()
        *owner, function = name.split("::")
        if owner:
            assert re.search(rf"\b(class|struct) {owner[0]}\b", text), f"{file} has no {owner[0]}"
        assert re.search(rf"\b{function}\s*\(", text), f"kernels/{file} has no function {function}"
