"""The record of a staged copy: written, read, and refused where it is none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lightning_speedkit.data.staging.staged_record import RECORD_FILES, CopiedFile, Record, read_record, write_record


def test_a_record_comes_back_as_it_was(tmp_path: Path) -> None:
    record = Record("/data/ä", "1", "2", True, [CopiedFile("a.lmdb", 5, 3, 77, 9), CopiedFile("b.lmdb", None, 2)])
    write_record(tmp_path, record)
    assert read_record(tmp_path) == record
    assert (record.bytes, record.copied) == (7, 5)
    assert [path.name for path in tmp_path.iterdir()] == [".staged.json"]
    assert ".staged.json" in RECORD_FILES


@pytest.mark.parametrize(
    "text",
    [
        "", "[]", "{}", '{"schema": "run"}', "\x00",
        json.dumps({"schema": "speedkit-staged", "source": "", "source_id": "", "identity": "", "is_folder": False}),
        *(
            json.dumps({"schema": "speedkit-staged", "source": "", "source_id": "", "identity": "", "is_folder": False,
                        "files": [{"name": name, "size": 1}]})
            for name in ("../outside", "/etc/passwd", "..", ".", "", "a/b", 3)
        ),
    ],
)  # fmt: skip
def test_a_record_of_another_kind_or_of_files_elsewhere_is_none(tmp_path: Path, text: str) -> None:
    (tmp_path / ".staged.json").write_text(text)
    assert read_record(tmp_path) is None
