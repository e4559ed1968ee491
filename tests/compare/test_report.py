"""The comparison's table, conclusions, Markdown and picture."""

import json
import math

import pytest

from mok_megatron.compare import report
from mok_megatron.compare.draw import draw
from mok_megatron.compare.log import Training
from mok_megatron.compare.presets import PRESETS

SIZES = {
    "seq_length": 4096,
    "world_size": 2,
    "micro_batch_size": 1,
    "data_parallel_size": 2,
    "pipeline_model_parallel_size": 1,
}


def training(ms: float, loss: list[float], peak: float | None = 45.0) -> Training:
    steps = len(loss)
    return Training(loss, [ms] * steps, [400.0] * steps, [8] * steps, peak, dict(SIZES))


@pytest.fixture
def trained() -> dict[str, Training]:
    loss = [9.0 - i / 10 for i in range(12)]
    return {"mok": training(600, [*loss[:5], 8.504, *loss[6:]]), "alltoall": training(900, loss)}


def complete(trained, absent=None, **more):
    summary = report.summarize(PRESETS["proxy-2gpu"], trained, absent or {}) | {"no_layer": "Left out."} | more
    run = {"hardware": {"device": "H200", "driver": None}, "versions": {"torch": "2.11"}, "commit": "abc"}
    return summary | {"run": run | {"commands": {"mok": "bash pretrain --dispatcher mok"}}}


def test_summary_compares_with_alltoall(trained):
    summary = report.summarize(PRESETS["proxy-2gpu"], trained, {"deepep": "not installed"})
    mok = summary["results"]["mok"]
    assert mok["speedup"] == pytest.approx(1.5)
    assert mok["tokens_per_s_per_gpu"] == pytest.approx(8 * 4096 / 0.6 / 2)
    assert mok["max_abs_loss_diff"] == pytest.approx(0.004)
    assert mok["max_rel_loss_diff"] == pytest.approx(0.004 / 8.5, rel=1e-6)
    assert summary["results"]["alltoall"]["max_abs_loss_diff"] == 0.0
    assert summary["not_run"] == {"deepep": "not installed"}


def test_without_alltoall_there_is_no_difference(trained):
    summary = report.summarize(PRESETS["proxy-2gpu"], {"mok": trained["mok"]}, {})
    assert summary["results"]["mok"]["max_abs_loss_diff"] is None
    assert report.rows(summary)[0][-1] == "-"


def test_a_nan_is_an_infinite_difference(trained):
    trained["mok"].loss[3] = math.nan
    summary = report.summarize(PRESETS["proxy-2gpu"], trained, {})
    assert summary["results"]["mok"]["max_abs_loss_diff"] == math.inf
    assert summary["results"]["mok"]["max_rel_loss_diff"] == math.inf


def test_the_rest_of_a_step_is_told_for_each_dispatcher(trained):
    trained["mok"].moe_ms, trained["alltoall"].moe_ms = [200.0] * 12, [500.0] * 12
    sentences = report.conclusions(report.summarize(PRESETS["proxy-2gpu"], trained, {}))
    for name, moe, share, rest in (("mok", "200.0", "33%", "400.0"), ("alltoall", "500.0", "56%", "400.0")):
        found = [text for text in sentences if f"{moe} ms of a step under {name} ({share})" in text]
        assert len(found) == 1 and f"not MoE takes {rest} ms" in found[0]


def test_table_and_markdown_show_every_figure(trained):
    summary = complete(trained, {"hybridep": "the package deep_ep is not installed"})
    expected = ["mok", "600.0", "27,307", "400.0", "45.0", "9.000000", "8.100000", "7.900000", "4.0e-03"]
    assert report.rows(summary)[0] == expected
    assert "hybridep: not run: the package deep_ep is not installed" in report.table(summary)
    text = report.markdown(summary)
    assert "| " + " | ".join(expected) + " |" in text
    for part in (
        "600.0 ms against 900.0 ms under alltoall (1.50x)",
        "commit abc",
        "H200",
        "bash pretrain",
        "torch 2.11",
    ):
        assert part in text
    assert "None" not in text


def test_conclusions_say_when_mok_is_slower(trained):
    trained["mok"].milliseconds = [1200.0] * 12
    assert "(0.75x)" in report.conclusions(complete(trained))[0]


def test_moe_layers_explain_part_of_the_step(trained):
    times = {"mok": 10.0, "alltoall": 30.0}
    entries = [{"name": name, "times": {"both": ms}} for name, ms in times.items()]
    record = {"results": [{"implementations": [*entries, {"name": "deepep", "times": None}]}]}
    explained = report.explain_by_layers(PRESETS["proxy-2gpu"], trained, record)
    # 3 MoE layers x 4 microbatches x 20 ms of the 300 ms.
    assert explained == {
        "alltoall": {"step_difference_ms": 300, "moe_layers_difference_ms": 240, "moe_layers_of_mok_ms": 120}
    }
    assert "240.0 of the 300.0 ms" in report.markdown(complete(trained, moe_layers=explained, layer_table="the table"))
    trained["mok"].arguments["pipeline_model_parallel_size"] = 2
    assert report.explain_by_layers(PRESETS["proxy-2gpu"], trained, record) == {}


def test_files_are_written(trained, tmp_path):
    summary = complete(trained)
    report.write(summary, tmp_path)
    draw(summary, tmp_path / "compare.png")
    assert json.loads((tmp_path / "summary.json").read_text())["results"]["mok"]["loss"] == trained["mok"].loss
    assert (tmp_path / "report.md").read_text().startswith("# Token dispatchers compared: proxy-2gpu, 12 steps")
    assert (tmp_path / "compare.png").read_bytes().startswith(b"\x89PNG")
