"""The documents' figures of training are the record's."""

import json
from pathlib import Path

import pytest

from mok_megatron.compare import report

ROOT = Path(__file__).parents[2]
RECORD = json.loads((ROOT / "docs" / "results" / "training_2xh200.json").read_text())


@pytest.mark.parametrize("document", ["README.md", "docs/results/README.md"])
def test_documents_quote_the_record(document):
    text = (ROOT / document).read_text()
    rows = report.markdown_rows(RECORD)
    assert len(rows) == 2 + len(RECORD["results"])
    assert all(row in text for row in rows)


def test_conclusions_are_the_records():
    text = (ROOT / "docs" / "results" / "README.md").read_text()
    assert all(sentence in text for sentence in report.conclusions(RECORD))


def test_the_record_says_how_it_was_made():
    assert all(RECORD["run"][key] for key in ("commit", "commands", "hardware", "versions"))
    assert (ROOT / "docs" / "results" / "training_2xh200.png").read_bytes().startswith(b"\x89PNG")
