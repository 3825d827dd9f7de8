"""The curve of a learning-rate range test: what it suggests, and its plot. Plain numbers.

The rule of the suggestion: the rate at which the loss falls fastest per decade of the rate, where that fall stands out
of the noise. The slope at a point is that of a straight line fitted to the losses around it, over the logarithm of the
rates; a fall stands out if it is more than four times the line's standard error. The idea of taking the steepest fall
is from Smith (arXiv 1506.01186, section 3.3) and Gugger ("How do you find a good learning rate", 2018). Lightning
2.6.6 takes the slope over the rate itself, where the small rates lie close together, so that noise decides; and it
smooths over about 50 steps before a point, which moves the suggestion to larger rates.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from lightning_speedkit.errors import MissingExtraError

__all__ = ["LRRange", "suggest_rate"]

_FORMATS = (".svg", ".png")


@dataclass(frozen=True, slots=True)
class LRRange:
    """What a learning-rate range test measured.

    Attributes:
        rates: The learning rate of each step, of the parameter group with the highest one.
        losses: The loss of each step before its update, the mean over ranks.
        diverged: Whether the test stopped since the loss rose or was not finite.
        ratios: What each parameter group's rate is of ``rates``.

    Example:

        >>> rates = tuple(10.0 ** (x / 10 - 6) for x in range(61))
        >>> curve = LRRange(rates, tuple(2.0 - 1.5 / (1 + 1e-3 / rate) for rate in rates))
        >>> round(curve.suggestion, 6)
        0.001
    """

    rates: tuple[float, ...]
    losses: tuple[float, ...]
    diverged: bool = False
    ratios: tuple[float, ...] = (1.0,)

    @property
    def suggestion(self) -> float | None:
        """The rate of :func:`suggest_rate`."""
        return suggest_rate(self.rates, self.losses)

    def smoothed(self) -> tuple[float, ...]:
        """The losses, each the median of those around it."""
        reach = max(2, len(self.losses) // 40)  # a wider median would show the valley of a few steps as flat
        return tuple(median(self.losses[max(0, i - reach) : i + reach + 1]) for i in range(len(self.losses)))

    def plot(self, path: str | Path) -> None:
        """Draw the curve and the suggestion into a file, ``.svg`` or ``.png``.

        Raises:
            ValueError: another ending, or there is nothing to draw.
            MissingExtraError: matplotlib is not installed.
        """
        path = Path(path)
        if path.suffix.lower() not in _FORMATS:
            raise ValueError(f"The plot {str(path)!r} has to end in one of {', '.join(_FORMATS)}.")
        if not self.losses:
            raise ValueError("The test measured no loss, so there is nothing to plot.")
        try:
            import matplotlib
            from matplotlib.figure import Figure
        except ImportError as error:
            raise MissingExtraError("a plot", extra="report", library="matplotlib") from error
        with matplotlib.rc_context({"svg.hashsalt": "learning-rate range test", "svg.fonttype": "none"}):
            figure = Figure(figsize=(7, 4), layout="constrained")
            self._draw(figure.add_subplot())
            path.parent.mkdir(parents=True, exist_ok=True)
            figure.savefig(path, dpi=144, metadata={"Date": None} if path.suffix.lower() == ".svg" else None)

    def _draw(self, axes: Any) -> None:
        smoothed = self.smoothed()
        axes.plot(self.rates, self.losses, ".", color="#b8c0cc", markersize=4, label="loss of a step")
        axes.plot(self.rates, smoothed, color="#2563a8", linewidth=2, label="median of the steps around it")
        if (rate := self.suggestion) is not None:
            axes.axvline(rate, color="#c2571a", linestyle="--", label=f"suggestion: {rate:.2g}")
        bottom = min(self.losses)
        rise = 0.6 * (smoothed[0] - bottom)
        if rise > 0:  # where the loss diverges it would press all the rest into one line
            top = min(max(self.losses), max(self.losses[0], smoothed[0]) + rise)
            axes.set_ylim(bottom - 0.2 * rise, top + 0.1 * rise)
        axes.set(xscale="log", xlabel="learning rate", ylabel="training loss")
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False)


def suggest_rate(rates: Sequence[float], losses: Sequence[float]) -> float | None:
    """The rate at which the loss falls fastest per decade; ``None`` where no fall stands out of the noise.

    Args:
        rates: Positive and growing.
        losses: As many finite numbers.

    Example:

        >>> suggest_rate([1e-4, 1e-3, 1e-2, 1e-1, 1.0], [2.0, 2.0, 2.0, 2.0, 2.0]) is None
        True
    """
    reach = _reach(len(losses))
    logs = [math.log10(rate) for rate in rates]
    steepest, best = 0.0, None
    for i in range(reach, len(losses) - reach):
        slope, error = _line(logs[i - reach : i + reach + 1], losses[i - reach : i + reach + 1])
        if slope < steepest and -slope > 4 * error:
            steepest, best = slope, rates[i]
    return best


def _reach(points: int) -> int:
    """How many points on either side count as around one."""
    return max(2, points // 12)


def _line(x: Sequence[float], y: Sequence[float]) -> tuple[float, float]:
    """The slope of the line of least squares, and its standard error."""
    centre, level = math.fsum(x) / len(x), math.fsum(y) / len(y)
    spread = math.fsum((a - centre) ** 2 for a in x)
    slope = math.fsum((a - centre) * (b - level) for a, b in zip(x, y, strict=True)) / spread
    rest = math.fsum((b - level - slope * (a - centre)) ** 2 for a, b in zip(x, y, strict=True))
    return slope, math.sqrt(rest / (len(x) - 2) / spread)
