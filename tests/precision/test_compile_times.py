"""The break-even step, against sums worked out by hand."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_speedkit.precision import compile_times
from lightning_speedkit.precision.compile_times import CompileReport, StepWindows


class _Clock:
    """Counts how often the device was waited for."""

    def __init__(self) -> None:
        self.waits = 0

    def wait(self) -> None:
        self.waits += 1

    def mark(self) -> float: ...
    def passed(self, mark: object) -> bool: ...
    def seconds(self, start: object, end: object) -> float: ...
    def release(self, mark: object) -> None: ...


def _run(windows: StepWindows, monkeypatch: pytest.MonkeyPatch, steps: list[tuple[float, bool]]) -> None:
    now = 0.0
    monkeypatch.setattr(compile_times.time, "perf_counter", lambda: now)
    for seconds, compiled in steps:
        windows.begin()
        now += seconds
        windows.end(compiled)


def test_the_first_eager_step_and_steps_that_compile_are_no_measure(monkeypatch: pytest.MonkeyPatch) -> None:
    windows = StepWindows(_Clock(), eager_steps=3)
    steps = [(9.0, False), (4.0, False), (2.0, False), (50.0, True), (7.0, False), (1.0, False), (2.0, False)]
    _run(windows, monkeypatch, steps)
    assert (windows.eager_seconds, windows.compiled_seconds, windows.steps) == (3.0, 1.5, 4)


def test_batches_of_one_accumulation_are_averaged(monkeypatch: pytest.MonkeyPatch) -> None:
    windows = StepWindows(_Clock(), eager_steps=3, group=2)  # which makes it four eager batches
    _run(windows, monkeypatch, [(1.0, False), (9.0, False), (1.0, False), (5.0, False), (1.0, False), (3.0, False)])
    assert (windows.eager_seconds, windows.compiled_seconds, windows.steps) == (3.0, 2.0, 2)


def test_the_device_is_not_waited_for_once_enough_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = _Clock()
    _run(StepWindows(clock, eager_steps=0), monkeypatch, [(1.0, False)] * 100)
    assert clock.waits == 2 * 20


@pytest.mark.parametrize(
    ("eager", "compiled", "steps", "even", "paid", "said"),
    [
        (0.3, 0.1, 51, 50, True, "compiling paid"),
        (0.3, 0.1, 49, 50, False, "compiling did not pay"),
        (0.1, 0.2, 99, None, False, "0.50 times as fast. Compiling did not pay"),
        (None, 0.2, 99, None, None, "Not enough steps"),
    ],
)
def test_break_even(
    eager: float | None, compiled: float, steps: int, even: int | None, paid: bool | None, said: str
) -> None:
    report = CompileReport(
        paths=("net",), compile_seconds=10.0, eager_seconds=eager, compiled_seconds=compiled, steps=steps
    )
    assert (report.break_even_step, report.paid) == (even, paid)
    assert said in str(report)


@pytest.mark.parametrize("eager", [{"failures": (("net", "a limit."),)}, {"never_called": ("net",)}])
def test_a_run_in_which_nothing_is_compiled_never_pays(eager: dict[str, Any]) -> None:
    report = CompileReport(paths=("net",), eager_seconds=0.3, compiled_seconds=0.1, steps=99, **eager)
    assert (report.compiled, report.speedup, report.break_even_step, report.paid) == ((), None, None, False)
    assert "net not compiled" in str(report)
    assert str(report).endswith("Nothing runs compiled at the end, so it did not pay.")


def test_a_run_in_which_a_part_is_compiled_is_measured() -> None:
    failures = (("0", "no."),)
    report = CompileReport(paths=("0", "1"), failures=failures, eager_seconds=0.3, compiled_seconds=0.1, steps=99)
    assert (report.compiled, report.paid) == (("1",), True)
