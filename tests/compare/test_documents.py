"""The documents' figures of training are the record's."""

import json
from pathlib import Path

import pytest

from mok_megatron.compare import report

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "docs" / "results"
RECORDS = {path.stem: json.loads(path.read_text()) for path in sorted(RESULTS.glob("training_*.json"))}


@pytest.mark.parametrize(
    ("document", "name"), [("README.md", "training_2xh200"), *(("docs/results/README.md", name) for name in RECORDS)]
)
def test_documents_quote_the_record(document, name):
    text = (ROOT / document).read_text()
    rows = report.markdown_rows(RECORDS[name])
    assert len(rows) == 2 + len(RECORDS[name]["results"])
    assert all(row in text for row in rows)


@pytest.mark.parametrize("name", RECORDS)
def test_conclusions_are_the_records(name):
    text = (RESULTS / "README.md").read_text()
    assert all(sentence in text for sentence in report.conclusions(RECORDS[name]))


@pytest.mark.parametrize("name", RECORDS)
def test_the_record_says_how_it_was_made(name):
    assert all(RECORDS[name]["run"][key] for key in ("commit", "commands", "hardware", "versions"))


@pytest.mark.parametrize("picture", sorted(RESULTS.glob("training_*.png")), ids=lambda path: path.stem)
def test_the_pictures_are_pictures(picture):
    assert picture.read_bytes().startswith(b"\x89PNG")
