"""OOMSnapshot in a Trainer, with memory that is said to run out in each phase; the error has to stay the same one."""

from __future__ import annotations

import json
import pickle
import time
import traceback
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer

from lightning_speedkit.memory import oom_snapshot
from lightning_speedkit.memory.oom_snapshot import OOMSnapshot
from tests.optimize.line import trainer as line_trainer
from tests.optimize.scarce_memory import Scarce, batches, loader
from tests.two_ranks import on_two_ranks


class Sgd(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        if len(self.state) > 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB.")
        return loss


def _fails(what: str, callback: OOMSnapshot, most: int = 5, **options: Any) -> tuple[RuntimeError, Trainer]:
    model = Scarce()
    if what == "optimizer":
        model.optimizer = lambda parameters: Sgd(parameters, lr=0.1, momentum=0.9)
    else:
        setattr(model, what, most)
    trainer = line_trainer(callback, max_epochs=1, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            trainer.fit(model, loader(batches(4, 4, 8)), loader(batches(6, 4)))
        except RuntimeError as error:
            return error, trainer
    raise AssertionError("it does not fail")


def _fails_at_once(callback: OOMSnapshot) -> None:
    model = Scarce()
    model.forward_most = 5
    with pytest.raises(torch.OutOfMemoryError):
        line_trainer(callback, max_epochs=1).fit(model, loader(batches(8)))


@pytest.mark.parametrize(
    ("what", "options", "phase", "step", "place"),
    [
        ("forward_most", {"num_sanity_val_steps": 0}, "training", 2, "Scarce.training_step"),
        ("backward_most", {"num_sanity_val_steps": 0}, "training", 2, "scarce_memory.py"),
        ("optimizer", {"num_sanity_val_steps": 0}, "training", 0, "test_oom_snapshot.py"),
        ("validation_most", {"num_sanity_val_steps": 0}, "validation", 3, "Scarce.validation_step"),
        ("validation_most", {}, "sanity check", 0, "Scarce.validation_step"),
    ],
)
def test_in_every_phase_it_tells_and_the_error_goes_on(
    what: str, options: dict[str, int], phase: str, step: int, place: str, tmp_path: Path
) -> None:
    callback = OOMSnapshot(folder=str(tmp_path / "made"), largest=10_000)  # beside what other tests have left
    error, _ = _fails(what, callback, **options)
    snapshot = callback.snapshot
    assert snapshot is not None
    assert (snapshot.phase, snapshot.step, snapshot.rank) == (phase, step, 0)
    assert place in snapshot.place
    assert (error.__cause__, error.__context__) == (None, None)
    assert traceback.extract_tb(error.__traceback__)[-1].name in (
        "training_step",
        "backward",
        "step",
        "validation_step",
    )
    content = json.loads((tmp_path / "made" / "out-of-memory-rank0.json").read_text())
    assert content["parts"]["parameters"] == 8 * (3 * 5 + 5 + 5 + 1)
    assert content["phase"] == phase
    text = (tmp_path / "made" / "out-of-memory-rank0.txt").read_text()
    assert text == snapshot.text()
    assert "first.weight in first" in text
    assert "What may help" in text
    assert sorted(path.name for path in (tmp_path / "made").iterdir()) == [
        "out-of-memory-rank0.json",
        "out-of-memory-rank0.txt",
    ]


def test_a_good_run_after_it_has_no_snapshot(tmp_path: Path) -> None:
    callback = OOMSnapshot(folder=str(tmp_path))
    with pytest.warns(UserWarning, match="Out of memory"):
        _fails_at_once(callback)
    assert callback.snapshot is not None
    line_trainer(callback, max_epochs=1).fit(Scarce(), loader(batches(8)))
    assert callback.snapshot is None


def test_another_error_is_not_looked_at(tmp_path: Path) -> None:
    class Fails(Scarce):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            raise ValueError("CUDA out of memory")

    callback = OOMSnapshot(folder=str(tmp_path))
    with pytest.raises(ValueError, match="out of memory"):
        line_trainer(callback, max_epochs=1).fit(Fails(), loader(batches(4)))
    assert callback.snapshot is None
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_is_told_and_nothing_more(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    callback = OOMSnapshot(folder=str(tmp_path / "file"))
    with pytest.warns(UserWarning, match="could not be written"):
        _fails_at_once(callback)
    assert callback.snapshot is not None


def test_a_fault_of_its_own_does_not_hide_the_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left(*arguments: Any, **options: Any) -> Any:
        raise MemoryError

    monkeypatch.setattr(oom_snapshot, "measure_parts", none_left)
    callback = OOMSnapshot(folder=str(tmp_path))
    with pytest.warns(UserWarning, match="could not tell"):
        _fails_at_once(callback)
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def history(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What torch is asked to record, without a device."""
    asked: list[dict[str, Any]] = []
    monkeypatch.setattr(oom_snapshot, "_record_history", lambda **options: asked.append(options))
    monkeypatch.setattr(oom_snapshot, "_is_recording", lambda: bool(asked) and asked[-1].get("enabled", "all") == "all")
    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", lambda path: Path(path).write_bytes(pickle.dumps("it")))
    return asked


def test_the_history_is_bounded_written_and_ended(history: list[dict[str, Any]], tmp_path: Path) -> None:
    callback = OOMSnapshot(folder=str(tmp_path), history_entries=1000)
    on_cuda: Any = type("Trainer", (), {"strategy": type("S", (), {"root_device": torch.device("cuda", 0)})})
    callback.setup(on_cuda, Scarce(), "fit")
    assert [options["max_entries"] for options in history] == [1000]
    _fails("forward_most", callback, num_sanity_val_steps=0)
    assert (tmp_path / "out-of-memory-rank0.pickle").exists()
    assert history[1:] == [{"enabled": None}]


def test_a_history_of_the_users_own_is_left_alone(history: list[dict[str, Any]]) -> None:
    history.append({"max_entries": 7})
    callback = OOMSnapshot(history_entries=1000)
    on_cuda: Any = type("Trainer", (), {"strategy": type("S", (), {"root_device": torch.device("cuda", 0)})})
    callback.setup(on_cuda, Scarce(), "fit")
    callback.teardown(on_cuda, Scarce(), "fit")
    assert history == [{"max_entries": 7}]


def _fail_on_a_rank(folder: str) -> int:
    options: dict[str, Any] = {"strategy": "ddp", "devices": 2, "num_sanity_val_steps": 0}
    _, trainer = _fails("forward_most", OOMSnapshot(folder=folder), most=3, **options)
    end = time.monotonic() + 30
    while len(list(Path(folder).glob("*.txt"))) < 2 and time.monotonic() < end:
        time.sleep(0.05)  # else the other one is told that this one is gone
    return trainer.global_rank


def test_each_process_writes_its_own_file(tmp_path: Path) -> None:
    assert on_two_ranks(_fail_on_a_rank, str(tmp_path)) == [0, 1]
    assert sorted(path.name for path in tmp_path.glob("*.txt")) == [f"out-of-memory-rank{rank}.txt" for rank in (0, 1)]


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"folder": 3}, TypeError, "folder=3 must be a path"),
        ({"largest": -1}, ValueError, "largest=-1 must be 0 or more"),
        ({"history_entries": True}, TypeError, "whole number"),
    ],
)
def test_arguments_are_checked(arguments: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        OOMSnapshot(**arguments)
