"""The folder of a result: what is written, what an older one left, and what is said where something is missing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn

import lightning_speedkit.compress.result_files as result_files
from lightning_speedkit.compress.report import QuantizationReport
from lightning_speedkit.compress.result_files import refuse_folder, write_result
from lightning_speedkit.errors import MissingExtraError
from tests.compress.fakes import FakeEngine

_KEPT = QuantizationReport(kept=True, reason="It holds.")
_NOT_KEPT = QuantizationReport(kept=False, reason="no")


def _converted(size: int = 100, formats: tuple[str, ...] = ("onnx", "pt2")) -> Any:
    engine = FakeEngine("fake", size=size, formats=formats)
    return engine.prepare(nn.Sequential(nn.Linear(2, 2)), []).convert()


def _names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_the_preferred_format_and_both_reports_are_written(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "folder"
    report = write_result(folder, _converted(), _KEPT, None)
    assert _names(folder) == ["manifest.json", "model.onnx", "report.html", "report.json"]
    assert (report.folder, report.files) == (str(folder), ("manifest.json", "model.onnx"))
    assert json.loads((folder / "report.json").read_text())["files"] == ["manifest.json", "model.onnx"]


def test_the_formats_that_are_asked_for_and_what_cannot_be_written(tmp_path: Path) -> None:
    report = write_result(tmp_path, _converted(), _KEPT, ["pt2", "state_dict"])
    assert report.files == ("manifest.json", "model.pt2")
    assert report.notes == ("fake cannot write state_dict; it writes onnx, pt2.",)


def test_files_of_an_older_result_that_are_not_replaced_are_put_aside(tmp_path: Path) -> None:
    (tmp_path / "model.pt").write_bytes(b"from before there were manifests")
    (tmp_path / "notes.txt").write_text("of the user")
    write_result(tmp_path, _converted(), _KEPT, ["onnx"])
    reports = ["report.html", "report.json"]
    assert _names(tmp_path) == ["manifest.json", "model.onnx", "model.previous.pt", "notes.txt", *reports]
    write_result(tmp_path, _converted(), _KEPT, ["pt2"])
    assert "model.previous.onnx" in _names(tmp_path)
    assert "model.onnx" not in _names(tmp_path)
    write_result(tmp_path, None, _NOT_KEPT, None)
    assert not {"manifest.json", "model.pt2", "model.onnx", "model.pt"} & set(_names(tmp_path))
    assert {"manifest.previous.json", "model.previous.pt2"} <= set(_names(tmp_path))


def test_a_damaged_manifest_or_one_that_points_elsewhere_moves_nothing_outside(tmp_path: Path) -> None:
    outside, folder = tmp_path / "outside.onnx", tmp_path / "q"
    outside.write_bytes(b"x")
    folder.mkdir()
    for content in ("{", '{"files": 3}', json.dumps({"files": {"../outside.onnx": "hash"}})):
        (folder / "manifest.json").write_text(content)
        write_result(folder, None, _NOT_KEPT, None)
        assert outside.exists()
        assert not (folder / "manifest.json").exists()


def test_without_the_library_for_pages_there_is_a_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Page:
        def write_html(self, path: Path) -> Path:
            raise MissingExtraError("an HTML report", extra="report", library="jinja2")

    monkeypatch.setattr(result_files, "report_document", lambda report: Page())
    report = write_result(tmp_path, None, _NOT_KEPT, None)
    assert _names(tmp_path) == ["report.json"]
    (note,) = report.notes
    assert note.startswith("There is no report.html: an HTML report needs jinja2")
    assert "pip install 'lightning-speedkit[report]'" in note


def test_a_folder_that_nothing_can_be_written_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "file"
    file.write_text("mine")
    with pytest.raises(MisconfigurationException, match=r"s3://bucket/quantized.*Pass folder="):
        refuse_folder("s3://bucket/quantized")
    with pytest.raises(MisconfigurationException, match=r"file is a file\."):
        refuse_folder(str(file / "below"))
    refuse_folder(str(tmp_path / "new" / "one"))
    refuse_folder("quantized")
    assert _names(tmp_path) == ["file"]
    monkeypatch.setattr("os.access", lambda path, mode: path != tmp_path)
    with pytest.raises(MisconfigurationException, match="is read-only"):
        refuse_folder(str(tmp_path / "new"))
