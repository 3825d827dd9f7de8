"""The files of a quantization: what was kept in the formats that were asked for, and the report as JSON and HTML."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from lightning.fabric.utilities.exceptions import MisconfigurationException

from lightning_speedkit.compress.artefact import MODEL_FILE, REPORT_FILE, publish
from lightning_speedkit.compress.engine import Converted
from lightning_speedkit.compress.report import QuantizationReport
from lightning_speedkit.compress.report_page import report_document
from lightning_speedkit.errors import MissingExtraError

__all__ = ["PAGE_FILE", "refuse_folder", "write_result"]

PAGE_FILE = "report.html"
_MANIFEST = "manifest.json"


def refuse_folder(folder: str) -> None:
    """MisconfigurationException if nothing can be written to ``folder``: said before the training, and not after it."""
    if "://" in folder:
        raise MisconfigurationException(
            f"QuantizeOnFitEnd writes to the local disk, and not to {folder!r}. Pass folder=, such as 'quantized', and "
            "copy it from there."
        )
    path = Path(folder).absolute()
    nearest = next(parent for parent in (path, *path.parents) if parent.exists())
    if not nearest.is_dir():
        raise MisconfigurationException(f"QuantizeOnFitEnd cannot write to {folder!r}: {nearest} is a file.")
    if not os.access(nearest, os.W_OK):
        raise MisconfigurationException(f"QuantizeOnFitEnd cannot write to {folder!r}: {nearest} is read-only.")


def write_result(
    folder: Path, converted: Converted | None, report: QuantizationReport, formats: Sequence[str] | None
) -> QuantizationReport:
    """Write what was kept and its report to ``folder``; the report with the names of the files.

    What an earlier result left there and this one does not replace is renamed to ``<name>.previous<suffix>``.
    """
    folder.mkdir(parents=True, exist_ok=True)
    older, notes = _model_files(folder), report.notes
    files: tuple[str, ...] = ()
    if converted is not None:
        wanted = None if formats is None else [name for name in formats if name in converted.formats]
        refused = [name for name in formats or () if name not in converted.formats]
        if refused:
            notes += (
                f"{converted.engine} cannot write {', '.join(refused)}; it writes {', '.join(converted.formats)}.",
            )
        converted.save(folder, wanted)
        files = tuple(sorted(_model_files(folder, named=True)))
    for name in older:
        path = folder / name
        if name not in files and path.exists():
            path.replace(path.with_name(f"{path.stem}.previous{path.suffix}"))
    report = replace(report, folder=str(folder), files=files, notes=notes)
    try:
        report_document(report).write_html(folder / PAGE_FILE)
    except MissingExtraError as missing:
        report = replace(report, notes=(*report.notes, f"There is no {PAGE_FILE}: {missing}"))
    publish(folder / REPORT_FILE, lambda temporary: temporary.write_text(report.to_json() + "\n"))
    return report


def _model_files(folder: Path, *, named: bool = False) -> list[str]:
    """The manifest in ``folder`` and the files that it names; also a ``model.pt`` without one, unless ``named``."""
    found = [] if named or not (folder / MODEL_FILE).exists() else [MODEL_FILE]
    manifest = folder / _MANIFEST
    if not manifest.exists():
        return found
    try:
        content = json.loads(manifest.read_text())
        listed = [str(name) for name in content["files"]]
    except (ValueError, KeyError, TypeError):  # damaged, or of another kind
        listed = []
    inside = [name for name in listed if (folder / name).resolve().parent == folder.resolve()]
    return list(dict.fromkeys([*found, *inside, _MANIFEST]))
