"""Did compiling pay? Step times before and after, seconds of compiling, and the step at which both are even.

Source: asked of torch.compile since its first release (pytorch#97783: the first 500 batches at a hundredth of the
speed); the break-even step is arithmetic on what was measured in this very run.
"""

from __future__ import annotations

import math
import statistics
import time
from dataclasses import dataclass

from lightning_speedkit.measure.clocks import Clock

__all__ = ["CompileReport", "StepWindows"]

_MOST = 20  # groups of steps timed after compiling


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileReport:
    """What compiling cost and gained in one run.

    Attributes:
        paths: The modules that were compiled.
        never_called: Those of them whose ``__call__`` was never used, so that compiling them changed nothing.
        failures: Why a module is eager after all, by its path.
        recompiles: The shapes of inputs for which a module was compiled again, by its path.
        graphs: Number of graphs that were compiled.
        compile_seconds: Time in which the run waited for the compiler.
        eager_seconds: Median seconds of a training step before, ``None`` if it was not measured.
        compiled_seconds: Median seconds of a training step after.
        steps: Training steps (batches) that ran with compiling on.

    >>> report = CompileReport(paths=("net",), compile_seconds=8.0, eager_seconds=0.06, compiled_seconds=0.04, steps=300)
    >>> report.break_even_step, report.paid
    (400, False)
    >>> print(report)
    net compiled in 8.0 s (0 graphs). A step takes 40.00 ms, 60.00 ms before: 1.50 times as fast. That is even after 400 steps; this run made 300, so compiling did not pay.
    """  # noqa: E501

    paths: tuple[str, ...] = ()
    never_called: tuple[str, ...] = ()
    failures: tuple[tuple[str, str], ...] = ()
    recompiles: tuple[tuple[str, tuple[str, ...]], ...] = ()
    graphs: int = 0
    compile_seconds: float = 0.0
    eager_seconds: float | None = None
    compiled_seconds: float | None = None
    steps: int = 0

    @property
    def compiled(self) -> tuple[str, ...]:
        """The modules that were called and still run compiled at the end."""
        eager = {*self.never_called, *dict(self.failures)}
        return tuple(path for path in self.paths if path not in eager)

    @property
    def speedup(self) -> float | None:
        """How many times as fast a step became; ``None`` if it was not measured, or nothing is compiled."""
        if self.eager_seconds is None or not self.compiled_seconds or not self.compiled:
            return None
        return self.eager_seconds / self.compiled_seconds

    @property
    def break_even_step(self) -> int | None:
        """After so many steps the time spent on compiling is won back; ``None`` if never, or not measured."""
        if self.eager_seconds is None or self.compiled_seconds is None or self.eager_seconds <= self.compiled_seconds:
            return None
        if not self.compiled:
            return None
        return math.ceil(round(self.compile_seconds / (self.eager_seconds - self.compiled_seconds), 9))

    @property
    def paid(self) -> bool | None:
        """Whether this run was faster by compiling; ``None`` if it was not measured."""
        if self.steps and not self.compiled:
            return False
        if self.speedup is None:
            return None
        return self.break_even_step is not None and self.steps >= self.break_even_step

    def __str__(self) -> str:
        shown = ", ".join(path or "the model" for path in self.paths[:4])
        more = f" and {len(self.paths) - 4} more" if len(self.paths) > 4 else ""
        effort = f"{self.compile_seconds:.1f} s ({self.graphs} graphs)"
        said = [
            f"{shown}{more} compiled in {effort}." if self.compiled else f"{shown}{more} not compiled, in {effort}."
        ]
        if self.failures:
            said.append(f"{len(self.failures)} fell back to eager, {self.failures[0][0]!r}: {self.failures[0][1]}")
        if self.recompiles:
            path, shapes = max(self.recompiles, key=lambda entry: len(entry[1]))
            said.append(f"{path!r} was compiled again {len(shapes)} times.")
        if self.steps and not self.compiled:
            return " ".join([*said, "Nothing runs compiled at the end, so it did not pay."])
        if self.speedup is None or self.eager_seconds is None or self.compiled_seconds is None:
            return " ".join([*said, "Not enough steps were measured to say whether it pays."])
        said.append(
            f"A step takes {1000 * self.compiled_seconds:.2f} ms, {1000 * self.eager_seconds:.2f} ms before: "
            f"{self.speedup:.2f} times as fast."
        )
        if self.break_even_step is None:
            return " ".join([*said, "Compiling did not pay."])
        verdict = "compiling paid" if self.paid else "compiling did not pay"
        said.append(f"That is even after {self.break_even_step} steps; this run made {self.steps}, so {verdict}.")
        return " ".join(said)


class StepWindows:
    """Times training batches: first eager ones, then those with compiling on in which nothing was compiled.

    Args:
        clock: Waits for the device at the ends of a step, as long as steps are timed.
        eager_steps: Batches before compiling begins.
        group: Batches that belong together, as in accumulation; the time of a step is the mean over a group.
    """

    def __init__(self, clock: Clock, eager_steps: int, group: int = 1) -> None:
        self.steps = 0  # with compiling on
        self._clock, self._group = clock, max(1, group)
        self._eager_left = -(-eager_steps // self._group) * self._group if eager_steps else 0
        self._eager: list[float] = []
        self._compiled: list[float] = []
        self._current: list[float] = []
        self._began: float | None = None

    @property
    def is_eager(self) -> bool:
        """Whether the next batch runs without compiling."""
        return self._eager_left > 0

    @property
    def eager_seconds(self) -> float | None:
        """Median of the eager steps; the first of several is left out, in which memory is allocated."""
        return statistics.median(self._eager[1:] or self._eager) if self._eager else None

    @property
    def compiled_seconds(self) -> float | None:
        """Median of the steps with compiling on in which nothing was compiled."""
        return statistics.median(self._compiled[1:] or self._compiled) if self._compiled else None

    def begin(self) -> None:
        """A training batch begins."""
        if self.is_eager or len(self._compiled) < _MOST:
            self._clock.wait()
            self._began = time.perf_counter()

    def end(self, compiled: bool) -> None:
        """It ends; ``compiled`` says whether something was compiled in it."""
        eager = self.is_eager
        self._eager_left -= eager
        self.steps += not eager
        if self._began is None:
            return
        self._clock.wait()
        self._current.append(time.perf_counter() - self._began)
        self._began = None
        if compiled:
            self._current.clear()  # a group with a compilation in it is no measure
        elif len(self._current) == self._group:
            (self._eager if eager else self._compiled).append(statistics.mean(self._current))
            self._current.clear()
