"""The view of a kernel's recorded tiles, on records made here."""

import json
from pathlib import Path

import numpy as np
import pytest

from mok_megatron.bench import trace


def record(*tiles: tuple[int, ...], ctas: int = 2, tiles_a_cta: int = 3) -> bytes:
    """Bytes as the kernel leaves them; a tile is (cta, place, kind, block, waiting, started, multiplied, stored)."""
    records = np.zeros((ctas, tiles_a_cta), trace.TILE)
    for cta, place, kind, block, *instants in tiles:
        records[cta, place] = (kind, block, 256, cta + 10, *instants)
    return records.tobytes()


T0 = 5_000_000_000_000_000_000  # ns, near what a device's clock may say: beyond the integers of a float64
GOOD = record(
    (0, 0, 1, 0, T0, T0 + 1000, T0 + 5000, T0 + 6000),
    (0, 1, 2, 0, T0 + 6000, T0 + 6000, T0 + 10000, T0 + 10000),
    (1, 0, 1, 1, T0, T0, T0 + 4000, T0 + 5000),
)


def test_reading_keeps_the_tiles_that_were_handled() -> None:
    found = trace.read(GOOD, 2, "forward")
    assert found.cta.tolist() == [0, 0, 1]
    assert found.tiles["kind"].tolist() == [1, 2, 1]
    assert found.microseconds("stored").tolist() == [6.0, 10.0, 5.0]


def test_the_layout_is_the_kernels() -> None:
    binding = pytest.importorskip("mok_megatron.megakernel.binding")
    import ctypes

    tile = binding.MokTraceTile
    assert ctypes.sizeof(tile) == trace.TILE.itemsize
    assert [name for name, _ in tile._fields_] == list(trace.TILE.names or ())
    for name, _ in tile._fields_:
        assert getattr(tile, name).offset == trace.TILE.fields[name][1]  # type: ignore[index]


def test_shares_of_time() -> None:
    shares = trace.summary(trace.read(GOOD, 2, "forward"))
    # two CTAs for 10 us: 12 of 20 multiply, 1 waits, 2 store, 5 idle
    assert shares == pytest.approx({"multiply": 0.6, "wait": 0.05, "store": 0.1, "idle": 0.25})


def test_means_by_kind_and_text() -> None:
    found = trace.read(GOOD, 2, "forward, rank 0")
    assert trace.by_kind(found)["FC1"] == {"tiles": 2, "wait": 0.5, "multiply": 4.0, "store": 1.0}
    lines = trace.text(found).splitlines()
    assert lines[0] == "forward, rank 0: 10 us; multiply 60.0%, wait 5.0%, store 10.0%, idle 25.0%"
    assert [line.split()[0] for line in lines[2:]] == ["FC1", "FC2"]


@pytest.mark.parametrize(
    ("buffer", "words"),
    [
        (record(), "is empty"),
        (record((0, 0, 1, 0, T0 + 9, T0, T0 + 10, T0 + 11)), "end before they start"),
        (record((0, 0, 99, 0, T0, T0, T0, T0)), "unknown kinds"),
    ],
)
def test_records_that_cannot_be(buffer: bytes, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        trace.read(buffer, 2, "forward")


def test_files(tmp_path: Path) -> None:
    found = trace.read(GOOD, 2, "forward")
    picture, chrome = trace.write([{"forward": found}, {"forward": found}], tmp_path / "view", {"ranks": 2})
    assert picture.read_bytes().startswith(b"\x89PNG")
    written = json.loads(chrome.read_text())
    assert written["otherData"] == {"ranks": 2}
    events = written["traceEvents"]
    assert [e["args"]["name"] for e in events if e["ph"] == "M"] == ["rank 0 forward", "rank 1 forward"]
    fc2 = next(event for event in events if event["name"] == "FC2")
    assert (fc2["tid"], fc2["ts"], fc2["dur"]) == (0, 6.0, 4.0)
    waits = [event["dur"] for event in events if event["name"] == "wait for FC1" and event["pid"] == 1]
    assert waits == [1.0, 0.0]


FORWARD, BACKWARD = "void mok::megakernel<mok::ForwardProgram>", "void mok::megakernel<mok::BackwardProgram>"
PREPARE = "mok::prepare_kernel"
CALL = [(PREPARE, 60.0), (FORWARD, 2000.0), ("other", 7.0), (PREPARE, 40.0), (BACKWARD, 4000.0)]


def test_kernels_are_told_apart_by_what_follows() -> None:
    from mok_megatron.bench.trace_run import medians

    later = [(name, 3 * length) for name, length in CALL]
    found = medians((start, *kernel) for start, kernel in reversed(list(enumerate([*CALL, *CALL, *later]))))
    assert found == {
        "forward": {"prepare": 60.0, "megakernel": 2000.0},
        "backward": {"prepare": 40.0, "megakernel": 4000.0},
    }
    line = "rank 0, kernels in a row of calls, us: forward prepare 60, forward megakernel 2000, backward prepare 40"
    assert trace.kernels_text(found).startswith(line)
    for kernels in ([], CALL[:3], CALL[1:]):
        with pytest.raises(RuntimeError, match="the profile has no"):
            medians((start, *kernel) for start, kernel in enumerate(kernels))


@pytest.mark.gpu
def test_a_launch_is_recorded() -> None:
    import torch

    from mok_megatron.bench.layers import MokLayer
    from mok_megatron.bench.problem import Shape, make_problem
    from mok_megatron.bench.trace_run import kernel_times
    from mok_megatron.bench.trace_run import record as record_launch
    from mok_megatron.config import MokConfig

    problem = make_problem(Shape(512, 256, 128, 8, 2, 64), 0, 1, torch.device("cuda"), torch.bfloat16)
    layer = MokLayer(problem, None, MokConfig())
    traces = record_launch(layer, problem, None, "test")
    assert {"FC1", "FC2"} <= set(trace.by_kind(traces["forward"]))
    assert {"dHidden", "dX", "dW1", "dW2"} <= set(trace.by_kind(traces["backward"]))
    assert all(us > 0 for of in kernel_times(layer, problem, None).values() for us in of.values())
