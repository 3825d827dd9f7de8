"""A document: what goes into it, and that its file is written by rename."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lightning_speedkit.report import Document, Section, Table, Text
from tests.report.pages import everything


def test_written_by_rename(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = everything("first").write_html(tmp_path / "deep" / "report.html")
    before = path.read_text(encoding="utf-8")
    assert before == everything("first").to_html()
    assert [entry.name for entry in path.parent.iterdir()] == ["report.html"]

    def full(*arguments: Any, **settings: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(OSError, match="No space"):
        everything("second").write_html(path)
    assert path.read_text(encoding="utf-8") == before
    assert [entry.name for entry in path.parent.iterdir()] == ["report.html"]


def test_only_blocks_go_into_a_section() -> None:
    with pytest.raises(TypeError, match=r"str is not a block; wrap text in Text"):
        Section("s", ["text"])  # type: ignore[list-item]


def test_the_callers_lists_may_change_afterwards() -> None:
    row, rows, blocks = ["a", 1.0], [["a", 1.0]], [Text("x")]
    rows[0] = row
    table, section = Table(["n", "v"], rows), Section("s", blocks)
    row[1], blocks[0] = 2.0, Text("y")
    assert table.rows == (("a", 1.0),)
    assert section.blocks == (Text("x"),)


def test_what_opens_a_document_is_checked_and_kept_like_a_section() -> None:
    opening, sections = [Text("a")], [Section("s", [])]
    document = Document("t", sections, opening=opening)
    opening.clear()
    sections.clear()
    assert document.opening == (Text("a"),)
    assert document.sections == (Section("s", ()),)
    with pytest.raises(TypeError, match="str is not a block"):
        Document("t", [], opening=["a"])  # type: ignore[list-item]


def test_printed_without_a_console_it_goes_to_the_output(capsys: pytest.CaptureFixture[str]) -> None:
    Document("Title", [Section("One", [Text("1")])]).print()
    assert capsys.readouterr().out.split() == ["Title", "One", "1"]
