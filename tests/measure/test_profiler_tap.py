"""The tap hears what it asked for, passes everything on, and leaves the Trainer as it found it."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.profilers import SimpleProfiler

from lightning_speedkit.measure.profiler_tap import ProfilerTap


def new(profiler: Any = None) -> Trainer:
    return Trainer(logger=False, enable_checkpointing=False, accelerator="cpu", profiler=profiler)


def listener(heard: list[str], *actions: str) -> Any:
    return {
        action: (lambda a=action: heard.append(f"start {a}"), lambda a=action: heard.append(f"stop {a}"))
        for action in actions
    }


def test_only_the_asked_actions_are_heard_and_all_are_passed_on() -> None:
    profiler, heard = SimpleProfiler(), []
    trainer = new(profiler)
    tap = listener(heard, "a", "b")
    ProfilerTap.attach(trainer, tap)
    trainer.profiler.start("a")
    trainer.profiler.stop("a")
    with trainer.profiler.profile("b"), trainer.profiler.profile("c"):
        pass
    assert heard == ["start a", "stop a", "start b", "stop b"]
    assert {name: len(times) for name, times in profiler.recorded_durations.items()} == {"a": 1, "b": 1, "c": 1}
    ProfilerTap.detach(trainer, tap)
    assert trainer.profiler is profiler


def test_two_listeners_leave_in_any_order() -> None:
    for order in ((0, 1), (1, 0)):
        heard: list[list[str]] = [[], []]
        trainer = new()
        before = trainer.profiler
        taps = [listener(told, "a") for told in heard]
        for tap in taps:
            ProfilerTap.attach(trainer, tap)
            ProfilerTap.attach(trainer, tap)  # twice is once
        ProfilerTap.detach(trainer, taps[order[0]])
        with trainer.profiler.profile("a"):
            pass
        assert heard[order[0]] == []
        assert heard[order[1]] == ["start a", "stop a"]
        ProfilerTap.detach(trainer, taps[order[1]])
        assert trainer.profiler is before
        ProfilerTap.detach(trainer, taps[0])  # once more is nothing


def test_an_exception_in_an_action_still_stops_it() -> None:
    heard: list[str] = []
    trainer = new()
    tap = listener(heard, "a")
    ProfilerTap.attach(trainer, tap)
    try:
        with trainer.profiler.profile("a"):
            raise ValueError
    except ValueError:
        heard.append("raised")
    assert heard == ["start a", "stop a", "raised"]


def test_what_else_the_profiler_has_is_reached_and_its_file_stays_open() -> None:
    profiler = SimpleProfiler(extended=False)
    trainer = new(profiler)
    tap = listener([], "a")
    ProfilerTap.attach(trainer, tap)
    assert trainer.profiler.extended is False
    with trainer.profiler.profile("a"):
        pass
    assert "a" in trainer.profiler.summary()
    torn: list[Any] = []
    profiler.teardown = lambda stage: torn.append(stage)  # type: ignore[method-assign]
    trainer.profiler.teardown("fit")
    assert torn == []
    ProfilerTap.detach(trainer, tap)
