"""Schedules in optimizer steps, with numbers worked out by hand."""

from __future__ import annotations

import io

import pytest
import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau

from lightning_speedkit.optimize.schedule import (
    SCHEDULES,
    build_schedule,
    check_schedule,
    is_endless,
    scale_at,
    schedule_names,
)


def _sgd(*rates: float) -> torch.optim.SGD:
    return torch.optim.SGD([{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": lr} for lr in rates], lr=1.0)


def _run(schedule: torch.optim.lr_scheduler.LRScheduler, steps: int) -> list[float]:
    rates = []
    for _ in range(steps):
        rates.append(schedule.optimizer.param_groups[0]["lr"])
        schedule.optimizer.step()
        schedule.step()
    return rates


def test_no_step_is_taken_at_a_rate_of_0() -> None:
    """8 steps, 2 of them warming up; the fall would reach 0 at the ninth."""
    rates = _run(build_schedule("linear", _sgd(0.7), 8, warmup=2), 10)
    assert rates == pytest.approx([0.35, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.0, 0.0])


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_name_is_a_pure_function_that_a_resumed_run_goes_on_with(name: str) -> None:
    whole = _run(build_schedule(name, _sgd(0.5), 10, warmup=3), 10)
    assert whole == pytest.approx([0.5 * scale_at(name, step, 10, warmup=3) for step in range(10)])
    assert min(whole) > 0
    assert max(whole) == pytest.approx(0.5)
    first = build_schedule(name, _sgd(0.5), 10, warmup=3)
    _run(first, 4)
    file = io.BytesIO()
    torch.save([first.state_dict(), first.optimizer.state_dict()], file)
    schedule_state, optimizer_state = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
    optimizer = _sgd(0.5)
    resumed = build_schedule(name, optimizer, 10, warmup=3)
    optimizer.load_state_dict(optimizer_state)
    resumed.load_state_dict(schedule_state)
    assert _run(resumed, 6) == pytest.approx(whole[4:])


@pytest.mark.parametrize("frequency", [1, 2, 3])
def test_the_rate_changes_every_so_many_steps(frequency: int) -> None:
    rates = _run(build_schedule("linear", _sgd(1.0), 12, warmup=0, frequency=frequency), 12)
    assert rates == pytest.approx([1 - (step - step % frequency + 1) / 13 for step in range(12)])
    assert len(set(rates)) == 12 // frequency


def test_groups_keep_their_ratio() -> None:
    schedule = build_schedule("warmup-cosine", _sgd(0.1, 0.4), 9, warmup=4)
    for _ in range(8):
        low, high = schedule.get_last_lr()
        assert high == pytest.approx(4 * low)
        schedule.optimizer.step()
        schedule.step()


def test_an_endless_schedule_needs_no_number_of_steps() -> None:
    rates = _run(build_schedule("inverse-sqrt", _sgd(1.0), warmup=4), 64)
    assert [rates[k] for k in (0, 1, 3, 15, 63)] == pytest.approx([0.25, 0.5, 1.0, 0.5, 0.25])
    assert _run(build_schedule("constant", _sgd(0.3)), 3) == [0.3, 0.3, 0.3]
    assert [is_endless("inverse-sqrt", w) for w in (None, 0.1, 10)] == [False, False, True]


def test_the_plateau_is_that_of_torch() -> None:
    schedule = build_schedule("reduce-on-plateau", _sgd(1.0), options={"patience": 0, "factor": 0.5})
    assert isinstance(schedule, ReduceLROnPlateau)
    for metric in (1.0, 2.0, 2.0):
        schedule.step(metric)
    assert schedule.optimizer.param_groups[0]["lr"] == 0.25


def test_a_fall_by_a_line_or_by_a_root() -> None:
    settings = {"warmup": 0, "options": {"decay": 0.5, "power": 1.0}}
    assert [scale_at("warmup-stable-decay", k, 7, **settings) for k in range(8)] == pytest.approx(
        [1, 1, 1, 1, 0.75, 0.5, 0.25, 0]
    )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"name": "cosine"}, r"no schedule 'cosine'. Did you mean 'warmup-cosine'\?"),
        ({"name": "linear", "total_steps": None}, "'linear' needs the number of optimizer steps"),
        ({"name": "linear", "total_steps": None}, "Give it, or take 'inverse-sqrt' or 'constant' with a warmup in"),
        ({"name": "linear", "total_steps": 0}, "total_steps=0 must be 1 or more"),
        ({"name": "linear", "warmup": 11}, "warmup=11 steps are more than total_steps=10: the peak is never reached"),
        ({"name": "linear", "warmup": 1.0}, "share of the run below 1, or a whole number of steps"),
        ({"name": "linear", "warmup": -1}, "warmup=-1 must be 0 or more"),
        ({"name": "inverse-sqrt", "warmup": 0}, "warmup=0 must be above 0"),
        ({"name": "linear", "final": 2}, "final=2 must be 0 or more and at most 1"),
        ({"name": "constant", "final": 0.5}, "final has no effect on 'constant'"),
        ({"name": "linear", "frequency": 0}, "frequency=0 must be 1 or more"),
        ({"name": "one-cycle", "options": {"inital": 0.1}}, r"Did you mean 'initial'\?"),
        ({"name": "reduce-on-plateau", "warmup": 3}, "total_steps, warmup cannot be given with 'reduce-on-plateau'"),
        ({"name": "reduce-on-plateau", "total_steps": None, "options": {"factor": 2.0}}, "'factor': 2.0}: Factor"),
        ({"name": "reduce-on-plateau", "total_steps": None, "options": {"pace": 1}}, "no option of reduce-on-plateau"),
    ],
)
def test_bad_input_is_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_schedule(optimizer=_sgd(1.0), **{"total_steps": 10, **settings})  # type: ignore[arg-type]


def test_types_are_checked_and_all_names_are_told() -> None:
    plateau = {"name": "reduce-on-plateau", "total_steps": None}
    for wrong in (
        {"warmup": "3"},
        {"warmup": True},
        {"final": "1e-3"},
        {"frequency": 1.5},
        {"total_steps": 9.5},
        {"total_steps": "100"},
        {"name": "one-cycle", "options": {"initial": "0.1"}},
        {**plateau, "options": {"patience": "3"}},
        {**plateau, "options": {"mode": True}},
    ):
        with pytest.raises(TypeError, match=r"must be (a|text)"):
            build_schedule(**{"name": "linear", "optimizer": _sgd(1.0), "total_steps": 10, **wrong})  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"name of the schedule is text, one of warmup-cosine, .*; got NoneType"):
        build_schedule(None, _sgd(1.0), 10)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="The optimizer whose rate is to follow 'linear' is asked for; got int"):
        build_schedule("linear", 10)  # type: ignore[arg-type]
    assert schedule_names()[-1] == "reduce-on-plateau"


def test_a_schedule_is_checked_before_there_are_an_optimizer_and_a_length() -> None:
    for name in SCHEDULES:
        check_schedule(name, warmup=10_000)
    check_schedule("reduce-on-plateau", options={"min_lr": [0.1, 0.2]})
    check_schedule("inverse-sqrt", 10, warmup=500)  # endless: its length says nothing
    with pytest.raises(ValueError, match="warmup=500 steps are more than total_steps=10"):
        check_schedule("linear", 10, warmup=500)
    with pytest.raises(ValueError, match="final=2 must be"):
        check_schedule("linear", final=2)
    with pytest.raises(ValueError, match="frequency cannot be given"):
        check_schedule("reduce-on-plateau", frequency=2)
