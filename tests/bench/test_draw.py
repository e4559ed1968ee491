"""The picture and the table of a bench record, and the figures that the documents quote from it."""

import json
from pathlib import Path

import pytest

from mok_megatron.bench.draw import draw, table_rows

ROOT = Path(__file__).parents[2]
RECORD = ROOT / "docs" / "results" / "layer_2xh200_ep2.json"


def record() -> dict:
    return json.loads(RECORD.read_text())


@pytest.mark.parametrize("document", ["README.md", "docs/results/README.md"])
def test_documents_quote_the_record(document):
    text = (ROOT / document).read_text()
    rows = table_rows(record())
    assert len(rows) == 4
    for row in rows:
        assert row in text


def test_a_record_says_how_it_was_made():
    for key in ("command", "commit", "time", "hardware", "versions", "units"):
        assert record()[key], key


def test_picture(tmp_path):
    picture = tmp_path / "bars.png"
    draw(record(), picture)
    assert picture.read_bytes().startswith(b"\x89PNG") and picture.stat().st_size > 10_000


def test_an_implementation_that_was_not_timed_leaves_a_gap(tmp_path):
    partial = record()
    missing = partial["results"][0]["implementations"].pop()
    draw(partial, tmp_path / "bars.png")
    assert missing["name"] != "mok"
    assert table_rows(partial)[0].split(" | ")[3] == "-"
    assert table_rows(partial)[1:] == table_rows(record())[1:]
