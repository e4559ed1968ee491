"""`mok-megatron simulate` as a user runs it, and what docs/nvl72.md shows of it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from mok_megatron import cli

DOCUMENT = Path(__file__).parents[2] / "docs" / "nvl72.md"
SMALL = ["simulate", "--shape", "1024,1024,512,8,4", "--cluster", "h200_x2", "--ep", "2"]


def test_table(capsys):
    assert cli.main(SMALL) == 0
    text = capsys.readouterr().out
    for part in ("A prediction", "rates of this cluster: measured", "exposed communication", "NVLink busy", "backward"):
        assert part in text


def test_json_and_settings(capsys):
    assert cli.main([*SMALL, "--json", "--mok-minibatch-size", "512", "--overlap-epilogues"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["prediction"] is True
    assert found["minibatch_size"] == 512
    assert found["shape"]["tokens"] == 1024
    assert found["forward"]["exposed"] == pytest.approx(
        found["forward"]["total"] - found["forward"]["without_communication"]
    )


@pytest.mark.parametrize(
    "arguments,message",
    [
        (["--ep", "2"], "one of --model and --shape and --cluster must be given"),
        (["--shape", "1,2", "--cluster", "h200_x2", "--ep", "2"], "is not T,H,I,E,K"),
        (["--shape", "1,64,64,2,x", "--cluster", "h200_x2", "--ep", "2"], "is not T,H,I,E,K"),
        (["--model", "deepseek_v3", "--cluster", "h200_x2", "--ep", "64"], "exceeds the 2 GPUs"),
        (["--model", "deepseek_v33", "--cluster", "h200_x2", "--ep", "2"], "deepseek_v3"),
        ([*SMALL[1:], "--tokens", "8"], "--tokens belongs to --model"),
        ([*SMALL[1:], "--mok-fwd-comm-sms", "132"], "leaves none of 132 SMs"),
        ([*SMALL[1:], "--mok-num-sms", "200"], "exceeds the 132 of H200"),
        ([*SMALL[1:], "--mok-minibatch-size", "100"], "--mok-minibatch-size"),
    ],
)
def test_what_cannot_be_simulated_is_refused(capsys, arguments, message):
    assert cli.main(["simulate", *arguments]) == 2
    assert message in capsys.readouterr().err


def shown(title):
    section = DOCUMENT.read_text().split("<!-- simulated -->")[1]
    row = re.search(rf"^\| {re.escape(title)} \|(.*)\|$", section, re.MULTILINE)
    assert row
    return [cell.strip() for cell in row.group(1).split("|")]


def test_the_document_shows_what_the_simulation_gives(capsys):
    cells = []
    for options in ([], ["--overlap-epilogues"]):
        words = ["simulate", "--model", "qwen3_5_397b_a17b", "--cluster", "gb300_nvl72", "--ep", "64", "--json"]
        assert cli.main([*words, *options]) == 0
        cells.append(json.loads(capsys.readouterr().out))
    expected = []
    for direction in ("forward", "backward"):
        values = [times[direction][name] for times in cells for name in ("total", "exposed")]
        expected += [f"{value:.2f}" for value in (*values, cells[0][direction]["limit"])]
    assert shown("Qwen3.5-397B-A17B") == expected
