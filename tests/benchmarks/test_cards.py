"""The measured tables of the documents are those of the results files."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import cards

_ROOT = Path(cards.__file__).parent.parent


@pytest.mark.parametrize("place", cards.documents(), ids=lambda place: place.name)
def test_documents_show_what_the_results_files_hold(place: Path) -> None:
    text = place.read_text()
    assert cards.with_tables(text, place) == text, "run: python -m benchmarks.cards"


def test_a_table_is_made_of_the_rows_and_columns_that_were_asked_for() -> None:
    asked = "<!-- measured: optimizer_step; rows: *transformer; seconds_per_step as ms = step -->\n"
    made = cards.with_tables(f"a\n{asked}old\n<!-- end of measured -->\nb", _ROOT / "docs" / "methods" / "x.md")
    lines = made.splitlines()
    assert lines[0] == "a"
    assert lines[-2:] == ["<!-- end of measured -->", "b"]
    assert "old" not in lines
    assert "(../../benchmarks/results/optimizer_step.json)" in lines[2]
    assert lines[4] == "| variant | step, ms |"
    assert all("transformer | " in line for line in lines[6:-2])
    assert len(lines) == 6 + 7 + 2


@pytest.mark.parametrize("asked", ["optimizer_step; seconds_per_step", "optimizer_step; rows: none; bytes as MB"])
def test_what_cannot_be_shown_is_an_error(asked: str) -> None:
    with pytest.raises(ValueError, match=r"x\.md"):
        cards.with_tables(f"<!-- measured: {asked} -->\n<!-- end of measured -->", _ROOT / "x.md")
