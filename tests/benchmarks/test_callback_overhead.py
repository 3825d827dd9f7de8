"""The script measures what it says; its numbers are not looked at here."""

from __future__ import annotations

import importlib

import pytest

from benchmarks.callback_overhead import measure, variants


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("model", ["linear", "blocks"])
def test_measure(model: str) -> None:
    recorder = {"class_path": "lightning_speedkit.measure.RunRecorder", "init_args": {"warmup_steps": 1}}
    metrics = measure(steps=62, model=model, callbacks=[recorder])
    assert set(metrics) == {"seconds_per_step", "seconds_fit_end"}
    assert all(value > 0 for value in metrics.values())


def test_every_callback_exists_and_is_held_against_the_same_work() -> None:
    told = {variant.name: variant for variant in variants(steps=10)}
    for variant in told.values():
        for callback in variant.arguments.get("callbacks", []):
            module, _, name = callback["class_path"].rpartition(".")
            getattr(importlib.import_module(module), name)(**callback["init_args"])
            base = told[variant.baseline or "plain"]
            factors = {"callbacks": None, "accumulate": None}
            assert {**variant.arguments, **factors} == {**base.arguments, **factors}
            schedule = callback["init_args"].get("schedule", 1)
            assert base.arguments.get("accumulate", 1) == schedule
