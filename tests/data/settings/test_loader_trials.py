"""The measuring process: what it tells, and how it ends."""

from __future__ import annotations

import multiprocessing

import pytest
import torch

from lightning_speedkit.data.settings.loader_settings import LoaderLimits
from lightning_speedkit.data.settings.loader_trials import run_trials
from lightning_speedkit.data.settings.trial_measurement import LoaderJob


def test_trials_come_with_the_memory_of_a_worker_and_the_bytes_of_a_batch() -> None:
    before = set(multiprocessing.active_children())
    job = LoaderJob(dataset=torch.zeros(100, 10), batch_size=4)
    trials = run_trials(job, LoaderLimits(max_workers=1), seconds=0.1, patience=60)
    assert [trial.num_workers for trial in trials][:2] == [0, 1]
    assert [trial.failure for trial in trials] == [""] * len(trials)
    assert trials[0].batch_bytes == trials[1].batch_bytes == 160
    assert trials[0].worker_bytes == 0
    assert 2**16 < trials[1].worker_bytes < 2**31
    assert set(multiprocessing.active_children()) <= before


def test_in_a_process_that_may_have_no_children_nothing_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(multiprocessing.current_process()._config, "daemon", True)  # type: ignore[attr-defined]
    (trial,) = run_trials(LoaderJob(dataset=[1], batch_size=1), LoaderLimits(max_workers=1), seconds=0.1, patience=5)
    assert "daemonic processes are not allowed to have children" in trial.failure
