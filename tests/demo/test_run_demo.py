"""The demo as a whole, in its quick form."""

from __future__ import annotations

import importlib.util
import io
import json
import logging
import tempfile
import warnings
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest
from rich.console import Console

from lightning_speedkit.compress import load_quantized
from lightning_speedkit.demo import run_demo as module
from lightning_speedkit.demo.model import DigitNet
from lightning_speedkit.demo.results import DemoResults, TrainingResult
from lightning_speedkit.demo.run_demo import run_demo
from lightning_speedkit.errors import MissingExtraError
from tests.demo.made_up import training


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> tuple[DemoResults, Path, str, list[Path]]:
    """Results, folder, what was printed, and what was left in the folder for temporary files."""
    out, temporary = tmp_path_factory.mktemp("demo"), tmp_path_factory.mktemp("temporary")
    (out / "report.html").write_text("an older report")
    (out / "notes.txt").write_text("mine")
    console = Console(file=io.StringIO(), width=120)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tempfile, "tempdir", str(temporary))
        results = run_demo(str(out), quick=True, seed=3, keep_files=True, console=console)
    assert isinstance(console.file, io.StringIO)
    return results, out, console.file.getvalue(), list(temporary.iterdir())


def test_the_report_and_the_numbers_are_written(quick: tuple[DemoResults, Path, str, list[Path]]) -> None:
    results, out, printed, left = quick
    assert left == []
    page = (out / "report.html").read_text(encoding="utf-8")
    assert page.startswith("<!doctype html>")
    assert "an older report" not in page
    assert (out / "notes.txt").read_text() == "mine"
    assert json.loads((out / "results.json").read_text()) == json.loads(results.to_json())
    assert {path.name for path in out.iterdir() if path.is_file()} == {"report.html", "results.json", "notes.txt"}
    for run in results.trainings:
        assert run.name in printed
        assert run.name in page
    assert str(out / "report.html") in printed


def test_the_numbers_fit_together(quick: tuple[DemoResults, Path, str, list[Path]]) -> None:
    results = quick[0]
    assert results.quick
    assert results.rounds == 1
    assert results.samples == {"train": 96, "val": 96, "test": 96}
    assert results.disk.files == 288
    assert results.disk.payload_bytes == 288 * (64 * 64 + 8)
    assert results.disk.file_allocated_bytes > results.disk.file_bytes > 0
    assert [run.timing.steps for run in results.trainings] == [2 * (96 // 16 - 3)] * 4
    files, workers, store, _ = results.trainings
    assert files.weights_digest == workers.weights_digest == store.weights_digest
    assert results.seconds_total > sum(run.seconds_fit for run in results.trainings)
    int8 = results.quantization
    assert int8.kept
    assert (int8.layers_quantized, int8.layers_total) == (5, 5)
    assert int8.bytes_float > 242_122 * 4 > int8.bytes_int8 > 242_122
    assert [latency.batch_size for latency in int8.latencies] == [1, 16]


def test_kept_files_are_in_a_new_folder_and_can_be_used(quick: tuple[DemoResults, Path, str, list[Path]]) -> None:
    results, out, printed, _ = quick
    (kept,) = (path for path in out.iterdir() if path.is_dir())
    assert str(kept) in printed
    assert len(list(kept.rglob("*.png"))) == 288
    stores = [kept / "stores" / f"{split}.lmdb" for split in ("train", "val", "test")]
    assert sum(path.stat().st_size for path in stores) == results.disk.store_bytes
    assert not load_quantized(kept / "quantized", DigitNet()).training


def test_of_two_rounds_the_faster_training_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = {  # per way, first and second round
        "files": [4.0, 5.0],
        "files, 2 workers": [3.0, 2.0],
        "LMDB": [2.5, 2.6],
        "LMDB, preset cpu": [9.0, 1.0],
    }
    order: list[str] = []

    def made_up(name: str) -> TrainingResult:
        order.append(name)
        return training(name, wall=seconds[name].pop(0), data=0.1)

    def from_files(*_: object, num_workers: int = 0, **__: object) -> TrainingResult:
        return made_up(f"files, {num_workers} workers" if num_workers else "files")

    def from_store(*_: object, presets: Sequence[str] = (), **__: object) -> TrainingResult:
        return made_up("LMDB, preset cpu" if presets else "LMDB")

    monkeypatch.setattr(module, "train_from_files", from_files)
    monkeypatch.setattr(module, "train_from_store", from_store)
    monkeypatch.setattr(module._Ways, "warm_up", lambda self: None)
    results = run_demo(str(tmp_path / "out"), console=Console(file=io.StringIO()))
    names = list(seconds)
    assert order == [*names, *reversed(names)]
    assert results.rounds == 2
    assert [run.name for run in results.trainings] == names
    assert [run.timing.seconds_wall for run in results.trainings] == [4.0, 2.0, 2.5, 1.0]

    seconds.update({name: [1.0] for name in names})
    monkeypatch.setattr(module, "_SECOND_ROUND_BEFORE", 0.0)  # a machine that is too slow for a second round
    assert run_demo(str(tmp_path / "out"), console=Console(file=io.StringIO())).rounds == 1


def test_a_file_in_the_place_of_the_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("a file")
    with pytest.raises(FileExistsError):
        run_demo(str(tmp_path / "taken"), quick=True)
    assert (tmp_path / "taken").read_text() == "a file"


def test_what_fails_leaves_no_folder_file_filter_or_setting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))

    def stopped(*_: object, **__: object) -> float:
        assert list(temporary.iterdir()) != []
        raise KeyboardInterrupt

    monkeypatch.setattr("lightning_speedkit.demo.run_demo.pack", stopped)
    logger = logging.getLogger("lightning.pytorch.utilities.rank_zero")
    filters, shown = list(logger.filters), list(warnings.filters)
    with pytest.raises(KeyboardInterrupt):
        run_demo(str(tmp_path / "out"), quick=True, console=Console(file=io.StringIO()))
    assert not (tmp_path / "out").exists()
    assert list(temporary.iterdir()) == []
    assert logger.filters == filters
    assert warnings.filters == shown
    (tmp_path / "mine").mkdir()
    with pytest.raises(KeyboardInterrupt):
        run_demo(str(tmp_path / "mine"), quick=True, console=Console(file=io.StringIO()))
    assert (tmp_path / "mine").exists()


@pytest.mark.parametrize(("module", "library"), [("PIL", "pillow"), ("jinja2", "jinja2"), ("matplotlib", "matplotlib")])
def test_a_missing_library_is_named_before_anything_runs(
    module: str, library: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = importlib.util.find_spec

    def without(name: str) -> ModuleSpec | None:
        return None if name == module else found(name)

    monkeypatch.setattr("lightning_speedkit.demo.run_demo.find_spec", without)
    with pytest.raises(MissingExtraError, match=rf"{library}.*pip install 'lightning-speedkit\[demo\]'"):
        run_demo(str(tmp_path / "out"), quick=True)
    assert not (tmp_path / "out").exists()
