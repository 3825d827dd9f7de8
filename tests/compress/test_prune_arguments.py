"""What pruning checks before it starts, on Trainers of which only what it reads is there."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import (
    Callback,
    EMAWeightAveraging,
    ModelCheckpoint,
    StochasticWeightAveraging,
    Timer,
)
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, SingleDeviceStrategy

from lightning_speedkit.compress.prune_arguments import (
    check_pruning,
    check_sparsity,
    planned_steps,
    refuse_pruning,
    resolved_steps,
    run_last,
)


class _Prunes(Callback):
    pass


def _trainer(*callbacks: Callback, strategy: Any = SingleDeviceStrategy, **values: Any) -> Any:
    plain = {"lightning_module": SimpleNamespace(automatic_optimization=True), "max_steps": -1}
    return SimpleNamespace(callbacks=list(callbacks), strategy=object.__new__(strategy), **{**plain, **values})


def test_what_prune_weights_and_the_callback_need_is_let_through() -> None:
    check_pruning(scope="layer", pattern="2:4")
    check_pruning(scope="global", pattern=None, criterion="movement", start=3, end=3, every=1, regrow=0.99)
    check_pruning(scope="global", pattern=None, start=0.5, end=3)  # which is first is known in the run


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ({"end": math.nan}, ValueError, "end=nan is not allowed"),
        ({"start": 0.5, "end": 0.25}, ValueError, "end=0.25 is before start=0.5"),
        ({"every": True}, TypeError, "every must be a whole number"),
        ({"regrow": math.nan}, ValueError, "regrow=nan is not allowed"),
        ({"regrow": "0.1"}, TypeError, "regrow must be a number"),
        ({"criterion": "movement", "start": 0, "end": 0}, ValueError, "Give a later end"),
    ],
)
def test_what_is_not_allowed(arguments: dict[str, Any], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        check_pruning(**{"scope": "global", "pattern": None, **arguments})


def test_a_sparsity_is_a_share() -> None:
    assert check_sparsity("s", 0.5, "2:4") == 0.5
    assert check_sparsity("s", 0, "2:4") == 0.0
    for value, told in ((1, "up to, and without, 1"), (80, "For 80 % write 0.8"), (math.nan, "s=nan")):
        with pytest.raises(ValueError, match=told):
            check_sparsity("s", value, None)


@pytest.mark.parametrize("strategy", [SingleDeviceStrategy, DDPStrategy])
def test_one_device_and_ddp_are_let_through_and_a_split_model_is_not(strategy: Any) -> None:
    refuse_pruning(_trainer(_Prunes(), strategy=strategy), _Prunes)
    with pytest.raises(MisconfigurationException, match="DeepSpeedStrategy, where no process has the whole"):
        refuse_pruning(_trainer(_Prunes(), strategy=DeepSpeedStrategy), _Prunes)


def test_structured_pruning_beside_it_is_refused_only_where_it_cuts() -> None:
    kind = type("StructuredPruning", (Callback,), {"ratio": 0.0, "head_ratio": 0.0})
    neutral, heads = kind(), kind()
    heads.head_ratio = 0.5  # type: ignore[attr-defined]
    refuse_pruning(_trainer(_Prunes(), neutral), _Prunes)
    with pytest.raises(MisconfigurationException, match="first StructuredPruning and then Pruning"):
        refuse_pruning(_trainer(_Prunes(), heads), _Prunes)


def test_it_comes_after_all_others_but_before_what_saves() -> None:
    mine, timer, saves, average = _Prunes(), Timer(), ModelCheckpoint(), EMAWeightAveraging()
    trainer = _trainer(mine, timer, average, saves)
    before = trainer.callbacks
    assert run_last(trainer, mine)
    assert trainer.callbacks == [timer, average, mine, saves]
    assert before == [mine, timer, average, saves]  # which is being gone through
    assert not run_last(_trainer(timer, mine), mine)
    assert run_last(_trainer(StochasticWeightAveraging(0.1), mine), mine)
    assert run_last(_trainer(type("AverageWeights", (Callback,), {})(), mine), mine)
    trainer = _trainer(timer)
    assert not run_last(trainer, mine)  # called by hand, not one of the Trainer's
    assert trainer.callbacks == [timer]


def test_the_length_of_a_run() -> None:
    assert planned_steps(_trainer(estimated_stepping_batches=40)) == 40
    assert planned_steps(_trainer(estimated_stepping_batches=math.inf)) is None
    manual = SimpleNamespace(automatic_optimization=False)
    assert planned_steps(_trainer(lightning_module=manual, estimated_stepping_batches=40)) is None
    assert planned_steps(_trainer(lightning_module=manual, max_steps=9)) == 9


@pytest.mark.parametrize(
    ("start", "end", "steps"),
    [(0.1, 0.75, (4, 30)), (0, 1.0, (0, 40)), (3, 7, (3, 7)), (0.0, 0.5125, (0, 21))],  # 20.5 becomes 21
)
def test_shares_of_forty_steps(start: float, end: float, steps: tuple[int, int]) -> None:
    assert resolved_steps(_trainer(estimated_stepping_batches=40), start, end, {}) == steps


def test_shares_of_a_resumed_run_are_those_of_the_first_one() -> None:
    trainer = _trainer(estimated_stepping_batches=1000)
    assert resolved_steps(trainer, 0.1, 0.75, {"start": 4, "end": 30}) == (4, 30)
    assert resolved_steps(trainer, 5, 0.75, {"start": 4, "end": 30}) == (5, 30)  # a number of steps is what it says


def test_shares_need_a_length_and_an_end_after_the_start() -> None:
    with pytest.raises(MisconfigurationException, match=r"start=0\.1 and end=9 .* max_steps"):
        resolved_steps(_trainer(estimated_stepping_batches=math.inf), 0.1, 9, {})
    with pytest.raises(MisconfigurationException, match=r"end=9 comes after 9 steps and start=0\.5 after 20"):
        resolved_steps(_trainer(estimated_stepping_batches=40), 0.5, 9, {})
