from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_speedkit.compress import shrink_run
from lightning_speedkit.compress.shrink_plan import ShrinkSettings
from lightning_speedkit.compress.shrink_run import ShrinkRun
from tests.compress.models import Digits, mlp


def _trainer(first: bool, answer: Any = None) -> Any:
    def broadcast(value: Any) -> Any:
        return value if first else answer

    strategy = SimpleNamespace(broadcast=broadcast)
    return SimpleNamespace(is_global_zero=first, strategy=strategy, callback_metrics={}, optimizers=[], current_epoch=1)


def test_a_failure_on_the_first_rank_reaches_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> Any:
        raise OSError("no memory")

    monkeypatch.setattr(shrink_run, "network_calls", broken)
    batch = (torch.zeros(2, 1, 8, 8), torch.zeros(2, dtype=torch.long))
    with pytest.raises(OSError, match="no memory"):
        ShrinkRun().step(_trainer(True), Digits(mlp()), batch, ShrinkSettings(), None)
    with pytest.raises(Exception, match="StructuredPruning failed on the first rank; its log says why"):
        ShrinkRun().step(_trainer(False, (None, True)), Digits(mlp()), batch, ShrinkSettings(), None)


def test_state_is_plain_and_complete() -> None:
    run = ShrinkRun()
    run.epoch, run.layers, run.pending = 3, {"a": [4, 2]}, {"epoch": 1, "metric": 0.5, "layers": {}, "snapshot": {}}
    other = ShrinkRun()
    other.load(run.state())
    assert vars(other) == vars(run)


def test_nothing_pending_is_not_judged() -> None:
    run = ShrinkRun()
    run.judge(_trainer(True), Digits(mlp()), 0.1)
    assert (run.undone, run.metric_drop) == (False, None)


@pytest.mark.parametrize(
    ("after", "told"), [(0.95, "a gain of 0.05, within"), (0.9, "no drop, within"), (0.5, "a drop of 0.4, over")]
)
def test_what_became_of_the_metric_is_told_as_what_it_is(
    monkeypatch: pytest.MonkeyPatch, after: float, told: str
) -> None:
    monkeypatch.setattr(shrink_run, "put_back", lambda *_: None)
    monkeypatch.setattr(shrink_run, "wrap_again", lambda *_: None)
    run = ShrinkRun()
    run.metric, run.mode, run.validated, run.last = "val_acc", "max", True, after
    run.pending = {"metric": 0.9, "layers": {}, "snapshot": None}

    run.judge(_trainer(True), Digits(mlp()), 0.1)
    assert told in run.reason
