"""Rates come back out of traces that were made up from them; files that are no traces are refused."""

from __future__ import annotations

import dataclasses
import gzip
import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from mok_megatron import cli
from mok_megatron.config import MokConfig
from mok_megatron.configs import load_cluster
from mok_megatron.errors import MokConfigError
from mok_megatron.simulate import document, fit
from mok_megatron.simulate.layer import LayerShape, sort_and_copy, sum_bytes
from mok_megatron.simulate.order import KINDS
from mok_megatron.simulate.rates import MEMORY_BYTES, MeasuredRates, kernel_rates, measured_rates
from mok_megatron.typed_yaml import ConfigFileError, load_typed

SHAPES = (LayerShape(1024, 1024, 512, 8, 4), LayerShape(1024, 512, 256, 16, 4))
STAGE = dict(zip(KINDS, (0.7, 0.71, 0.72, 0.73, 0.74, 0.75), strict=True))
EPILOGUE = dict(zip(KINDS, (3.0, 1.5, 12.0, 1.0, 5.0, 5.5), strict=True))
START, SUM, PREPARE, BETWEEN, WARM, HEAD = 1.25, 50.0, 40.0, 15.0, 1.1, 20.0
H200 = load_cluster("h200_x2")
RATES = kernel_rates(H200, 2)
SETTINGS = dataclasses.asdict(MokConfig(timeout_s=20.0))


def events(pid: int, shape: LayerShape, kinds: tuple[str, ...], slower: float, row_wait: float) -> list[dict]:
    """Two CTAs that handle two tiles of each kind, then sum; only the first tile waits."""
    found: list[dict] = []
    for cta in range(2):
        now = 0.0
        for kind in (*kinds, *kinds, fit.FINISH):
            last = kind == fit.FINISH
            multiply = SUM if last else slower * (START + fit.stages(kind, shape, 2) * STAGE[kind])
            wait = 0.0 if now else row_wait
            for name, length in (
                (f"wait for {kind}", wait), (kind, multiply), (f"store {kind}", 0.0 if last else EPILOGUE[kind])
            ):  # fmt: skip
                found.append({"ph": "X", "pid": pid, "tid": cta, "name": name, "ts": now, "dur": length})
                now += length
    return found


def write_trace(folder: Path, shape: LayerShape, row_wait: float = 10.0, about: dict | None = None):
    """The file, and what each direction takes in all."""
    names = [f"rank {rank} {direction}" for rank in range(2) for direction in fit.DIRECTIONS]
    kinds = {"forward": KINDS[:2], "backward": KINDS[2:]}
    traced = [{"ph": "M", "pid": pid, "args": {"name": name}} for pid, name in enumerate(names)]
    kernels: dict[str, dict[str, float]] = {}
    for pid, name in enumerate(names):
        direction = name.split()[-1]
        mine = events(pid, shape, kinds[direction], 1.0 if pid < 2 else 0.9, row_wait)
        if pid < 2:  # the slower rank's products take WARM longer in a row of calls, beside the faster's whole
            busy = sum(event["dur"] for event in mine if event["name"] in KINDS) / 2
            copy = sort_and_copy(shape, 2, RATES, direction == "forward")
            kernels[direction] = {"prepare": PREPARE + copy, "megakernel": HEAD + (WARM - 1) * busy}
        else:
            kernels[direction]["megakernel"] += max(event["ts"] + event["dur"] for event in mine)
        traced += mine
    usual = {"shape": dataclasses.asdict(shape), "ranks": 2, "settings": SETTINGS, "kernels_us": kernels}
    path = folder / f"{shape.hidden}.trace.json.gz"
    path.write_bytes(gzip.compress(json.dumps({"traceEvents": traced, "otherData": usual | (about or {})}).encode()))
    return path, {direction: sum(kernels[direction].values()) + BETWEEN for direction in fit.DIRECTIONS}


def write_record(folder: Path, ends: dict[LayerShape, dict[str, float]]) -> Path:
    results = []
    for shape, end in ends.items():
        ours = {"name": "mok", "times": {direction: us / 1e3 for direction, us in end.items()}}
        results.append({"shape": dataclasses.asdict(shape), "implementations": [{"name": "nccl"}, ours]})
    path = folder / "bench.json"
    about = {"ranks": 2, "time": "then", "commit": "abc", "hardware": {"device": "NVIDIA H200"}}
    path.write_text(json.dumps({**about, "results": results}))
    return path


@pytest.fixture
def recorded(tmp_path: Path) -> tuple[Path, list[Path]]:
    written = {shape: write_trace(tmp_path, shape) for shape in SHAPES}
    return write_record(tmp_path, {s: ends for s, (_, ends) in written.items()}), [path for path, _ in written.values()]


def test_rates_come_back(recorded: tuple[Path, list[Path]], monkeypatch: pytest.MonkeyPatch) -> None:
    simulated = SimpleNamespace(row_waits=0.0, first_tile=HEAD)
    monkeypatch.setattr(fit, "_simulated", lambda launch, rates, cluster: simulated)
    rates = fit.fit(*recorded, "h200_x2")
    assert rates.stage_us == pytest.approx({kind: WARM * us for kind, us in STAGE.items()}, rel=1e-3)
    assert rates.tile_start_us == pytest.approx(WARM * START, rel=1e-2)
    assert rates.epilogue_us == EPILOGUE
    assert rates.prepare_us == pytest.approx({"forward": PREPARE, "backward": PREPARE}, rel=1e-2)
    assert rates.between_us == pytest.approx(BETWEEN, rel=1e-2)
    mean = sum(sum_bytes(shape) for shape in SHAPES) / 2 / SUM / 1e3
    assert rates.sum_gb_per_s == pytest.approx(mean, rel=1e-3)
    assert rates.cta_pull_gb_per_s in fit.PULL_RATES
    small = fit.read_trace(recorded[1][1])[3]  # the faster rank's backward of the smaller shape
    length = sum(small.multiply[k].sum() + small.store[k].sum() for k in ("dW1", "dW2")) / 2
    assert rates.main_grad_gb_per_s == pytest.approx(8 * MEMORY_BYTES["dW1"] / length / 1e3, rel=1e-3)
    assert rates.sources["hardware"] == "2 x NVIDIA H200" and "abc" in rates.sources["record"]


def test_the_command_writes_a_file_that_is_read(recorded: tuple[Path, list[Path]], tmp_path: Path, capsys) -> None:
    record, traces = recorded
    path = tmp_path / "deep" / "rates.yaml"
    assert cli.main(["simulate", "--fit", str(record), *map(str, traces), "--rates", str(path)]) == 0
    assert load_typed(path, MeasuredRates) == fit.fit(record, traces, "h200_x2")
    assert "stage_us" in capsys.readouterr().out


@pytest.mark.parametrize(("waited", "rate"), [(0.0, 30.0), (25.0, 4.0), (1000.0, 1.0)])
def test_the_rate_of_a_pull_is_that_of_the_nearest_waits(recorded, monkeypatch, waited: float, rate: float) -> None:
    def simulated(launch: fit.Launch, rates: MeasuredRates, cluster: object) -> SimpleNamespace:
        return SimpleNamespace(row_waits=100 / rates.cta_pull_gb_per_s)

    monkeypatch.setattr(fit, "_simulated", simulated)
    monkeypatch.setattr(fit, "_waits", lambda launch: waited)
    launches = fit.read_trace(recorded[1][0])
    assert fit._pull_rate(measured_rates(), launches, H200) == rate


SIZES = dataclasses.asdict(SHAPES[0])


@pytest.mark.parametrize(
    ("about", "message"),
    [
        ({"settings": SETTINGS | {"fwd_comm_sms": 4}}, "traced with fwd_comm_sms set"),
        ({"shape": {"tokens": 3}}, "is not a trace of"),
        ({"shape": SIZES | {"shared": 64}}, "have a shared expert"),
        ({"shape": SIZES | {"tokens": 2048}}, "has no times of the traced shape"),
    ],
)
def test_traces_that_cannot_be_used(recorded, tmp_path: Path, about: dict, message: str) -> None:
    path, _ = write_trace(tmp_path, SHAPES[0], about=about)
    with pytest.raises(MokConfigError, match=message):
        fit.fit(recorded[0], [path, recorded[1][1]], "h200_x2")


def test_files_that_cannot_be_used(recorded: tuple[Path, list[Path]], tmp_path: Path, capsys) -> None:
    record, traces = recorded
    assert cli.main(["simulate", "--fit", str(record), str(traces[0])]) == 2
    assert "at least two shapes" in capsys.readouterr().err
    assert cli.main(["simulate", "--fit", str(traces[0]), str(record), str(record)]) == 2
    assert "is not a record of" in capsys.readouterr().err
    assert cli.main(["simulate", "--check", str(tmp_path / "none.json")]) == 2
    assert "none.json" in capsys.readouterr().err


def test_a_rates_file_that_lacks_a_kind_is_named(tmp_path: Path) -> None:
    path = tmp_path / "rates.yaml"
    fit.write_rates(dataclasses.replace(measured_rates(), stage_us={"FC1": 1.0}), path)
    with pytest.raises(ConfigFileError, match=r"rates.yaml, line \d+: stage_us: has the keys FC1, not FC1, FC2"):
        load_typed(path, MeasuredRates)


def test_a_record_is_compared(capsys) -> None:
    record = Path(__file__).parents[2] / "docs" / "results" / "layer_2xh200_ep2.json"
    assert cli.main(["simulate", "--check", str(record)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 10 and all(line.rstrip().endswith("%") for line in lines[2:])


def test_a_page_without_a_marker_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "page.md"
    monkeypatch.setattr(document, "TABLES", {"rates": document.rates_table})
    page.write_text("<!-- rates -->\n| old |\n\nafter\n")
    document.rewrite(page)
    assert "| old |" not in page.read_text() and page.read_text().endswith(" |\n\nafter\n")
    page.write_text("nothing\n")
    with pytest.raises(ValueError, match="0 times"):
        document.rewrite(page)
