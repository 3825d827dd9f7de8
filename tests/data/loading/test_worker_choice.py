"""Who makes the batches: what is measured, and what follows from it."""

from __future__ import annotations

import logging
import multiprocessing
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lightning_speedkit.data import LMDBDataset, write_lmdb
from lightning_speedkit.data.loading import worker_choice
from lightning_speedkit.data.loading.batch_builder import StoreBatches, builder_for
from lightning_speedkit.data.loading.batch_task import BatchTask
from lightning_speedkit.data.loading.sample_batches import SampleBatches
from lightning_speedkit.data.loading.worker_choice import _Probe, choose_workers, cpu_count

TASKS = [BatchTask(number, np.arange(number, number + 2), (0, 0, 0, number)) for number in range(6)]


class Items:
    """A dataset that does something for each item."""

    def __init__(self, work: Callable[[int], Any]) -> None:
        self.work = work

    def __getitem__(self, index: int) -> int:
        self.work(index)
        return index


def choose(work: Callable[[int], Any], steps: int = 1000, **settings: Any) -> Any:
    return choose_workers(SampleBatches(Items(work), None), TASKS, steps, start_method="fork", **settings)


def sleep(_: int) -> None:
    time.sleep(0.05)  # long beside what a busy machine adds to it


GATE = threading.Lock()


def take_turns(_: int) -> None:
    """What holds the GIL, however busy the machine is: one at a time."""
    with GATE:
        time.sleep(0.02)


def sleep_and_draw(draw: Callable[[], Any]) -> Callable[[int], None]:
    def work(_: int) -> None:
        time.sleep(0.01)
        draw()

    return work


def test_work_that_runs_side_by_side_is_for_threads() -> None:
    choice = choose(sleep)
    assert (choice.kind, choice.workers) == ("threads", min(cpu_count(), 8))
    assert "ms a batch" in choice.reason


def test_work_that_takes_turns_is_for_processes() -> None:
    choice = choose(take_turns)
    assert (choice.kind, choice.workers) == ("processes", min(cpu_count(), 8))


@pytest.mark.parametrize(
    "draw", [random.random, np.random.rand, lambda: torch.rand(1)], ids=["python", "numpy", "torch"]
)
def test_work_that_draws_from_the_global_random_state_is_for_processes(draw: Callable[[], Any]) -> None:
    choice = choose(sleep_and_draw(draw))
    assert choice.kind == "processes"
    assert "random state" in choice.reason


def test_a_generator_of_its_own_does_not_count() -> None:
    choice = choose(sleep_and_draw(lambda: np.random.default_rng(1).random()))
    assert "times as many by two threads" in choice.reason


def test_a_very_short_epoch_is_done_at_once() -> None:
    assert choose(lambda index: None, steps=1).kind == "inline"


@pytest.mark.parametrize(
    ("seconds", "speedup", "draws", "steps", "kind"),
    [
        (0.0009, 2.0, False, 10_000, "inline"),  # a batch costs less than sending it
        (0.02, 2.0, False, 4, "inline"),  # all of them do
        (0.02, 1.6, False, 6, "threads"),
        (0.02, 1.4, False, 6, "processes"),
        (0.02, 2.0, True, 6, "processes"),
    ],
)
def test_what_was_measured_decides(
    seconds: float, speedup: float, draws: bool, steps: int, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    probe = worker_choice._Probe(seconds, speedup, draws)
    monkeypatch.setattr(worker_choice, "_probe_elsewhere", lambda *_: probe)
    assert choose(lambda index: None, steps=steps).kind == kind


def fail(index: int) -> None:
    raise ValueError("no")


@pytest.mark.parametrize(
    "work",
    [fail, lambda _: os._exit(1), lambda _: os.kill(os.getpid(), signal.SIGKILL), lambda _: exit(2), lambda _: 1 / 0],
    ids=["error", "exit", "killed", "system exit", "division"],
)
def test_a_dataset_that_fails_is_left_to_the_training_loop(work: Callable[[int], Any]) -> None:
    choice = choose(work)
    assert (choice.kind, choice.workers) == ("inline", 0)
    assert "failed" in choice.reason


def test_a_dataset_that_cannot_be_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    builder = SampleBatches([threading.Lock()], None)
    for method in ("spawn", "forkserver"):
        choice = choose_workers(builder, TASKS, 100, start_method=method)
        assert choice.kind == "inline"


def _choose_in_a_daemon(send: Any) -> None:
    send(choose(sleep))


def test_a_process_that_may_start_none_makes_them_itself() -> None:
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_choose_in_a_daemon, args=(theirs.send,), daemon=True)
    process.start()
    assert ours.poll(60)
    choice = ours.recv()
    process.join()
    assert (choice.kind, choice.workers) == ("inline", 0)
    assert "no process can be had" in choice.reason


def test_a_probe_that_hangs_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_choice, "_PATIENCE", 0.3)
    before = multiprocessing.active_children()
    assert choose(lambda _: time.sleep(100)).kind == "inline"
    assert multiprocessing.active_children() == before


def test_the_probe_touches_nothing_here(tmp_path: Path) -> None:
    """Neither the dataset nor the random state nor torch's threads, and it leaves nothing open."""
    touched: list[int] = []
    before = random.getstate(), torch.get_rng_state().tolist(), torch.get_num_threads()
    files = len(list(Path("/proc/self/fd").iterdir()))
    choose(lambda index: (touched.append(index), sleep(0), torch.rand(1)))
    assert touched == []
    assert (random.getstate(), torch.get_rng_state().tolist(), torch.get_num_threads()) == before
    assert len(list(Path("/proc/self/fd").iterdir())) == files


MS = 1e-3


@pytest.mark.parametrize(
    ("probe", "steps", "kind"),
    [
        (_Probe(0.9 * MS, 2.0, False), 10**6, "inline"),
        (_Probe(1.1 * MS, 2.0, False), 10**6, "threads"),
        (_Probe(1.1 * MS, 1.4, False), 10**6, "processes"),
        (_Probe(1.1 * MS, 2.0, True), 10**6, "processes"),
        (_Probe(0.9 * MS, 2.0, True), 10**6, "inline"),
        (_Probe(11 * MS, 1.5, False), 10, "threads"),
        (_Probe(11 * MS, 1.5, False), 9, "inline"),
        (_Probe(11 * MS, 0.5, False), 10, "processes"),
    ],
)
def test_what_follows_from_a_measurement(
    probe: _Probe, steps: int, kind: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(worker_choice, "_probe_elsewhere", lambda *_: probe)
    with caplog.at_level(logging.INFO, worker_choice.__name__):
        choice = choose(sleep, steps, workers=3)
    assert (choice.kind, choice.workers) == (kind, 0 if kind == "inline" else 3)
    assert f"Batches are made by {kind}" in caplog.text


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"kind": "inline"}, ("inline", 0)),
        ({"kind": "inline", "workers": 3}, ("inline", 0)),
        ({"kind": "auto", "workers": 0}, ("inline", 0)),
        ({"kind": "threads", "workers": 5}, ("threads", 5)),
        ({"kind": "processes", "workers": 5}, ("processes", 5)),
        ({"kind": "threads"}, ("threads", 6)),
        ({"kind": "processes"}, ("processes", 6)),
    ],
)
def test_what_was_asked_for_is_not_measured(
    settings: dict[str, Any], expected: tuple[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_choice, "_probe_elsewhere", lambda *_: 1 / 0)
    monkeypatch.setattr(worker_choice, "cpu_count", lambda: 6)
    choice = choose(sleep, **settings)
    assert (choice.kind, choice.workers) == expected


class Field:
    """Stands for an ImageField."""

    shape = (2, 2, 3)
    random = False
    decode_into = None


@pytest.mark.parametrize(("cores", "copying", "decoding"), [(1, 1, 1), (3, 3, 3), (64, 4, 16)])
def test_a_plain_store_is_for_threads(
    tmp_path: Path, cores: int, copying: int, decoding: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_choice, "cpu_count", lambda: cores)
    monkeypatch.setattr(worker_choice, "_probe_elsewhere", lambda *_: 1 / 0)
    path = write_lmdb([(b"picture", 1)], tmp_path / "a.lmdb")
    for fields, count in ((None, copying), ({0: Field()}, decoding)):
        builder = builder_for(LMDBDataset(path, fields=fields), None)  # type: ignore[arg-type]
        assert isinstance(builder, StoreBatches)
        choice = choose_workers(builder, TASKS, 10)
        assert (choice.kind, choice.workers) == ("threads", count)
        assert choose_workers(builder, TASKS, 10, workers=2).workers == 2
        assert choose_workers(builder, TASKS, 10, kind="threads").workers == count


def test_the_probe_stops_when_it_has_seen_enough() -> None:
    seen: list[int] = []

    def slow(index: int) -> None:
        seen.append(index)
        time.sleep(0.3)

    found = worker_choice._probe(SampleBatches(Items(slow), None), TASKS)  # here, to look on
    assert seen[:2] == [0, 1]
    assert len(seen) == 2 + 2 * 2  # one batch, and two by threads
    assert found.seconds_per_batch >= 0.6
    assert not found.draws_random_numbers


def test_the_cores_of_this_process() -> None:
    assert 1 <= cpu_count() <= (os.cpu_count() or 1)
