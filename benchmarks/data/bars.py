"""What a loader has to reach, held against the rounds of a result file, and told as met or not.

A bar is a ratio of two variants of one metric, taken round by round as everything else; its figure is the median. It is
not decided where one of the two variants gave no number, and that is told too.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lightning_speedkit.facts import write_json

__all__ = ["Bar", "held_against"]


@dataclass(frozen=True)
class Bar:
    """``metric`` of one variant over that of another, or alone, at least ``least`` or at most ``most``."""

    name: str
    variant: str
    against: str | None = None
    metric: str = "samples_per_second"
    least: float | None = None
    most: float | None = None

    def figures(self, rounds: Iterable[Mapping[str, Any]]) -> list[float]:
        """One number for each round that has both."""
        found = []
        for told in rounds:
            mine = told["runs"][self.variant].get("metrics", {}).get(self.metric)
            other = 1.0 if self.against is None else told["runs"][self.against].get("metrics", {}).get(self.metric)
            if mine is not None and other:
                found.append(mine / other)
        return found

    def judged(self, rounds: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
        """The bar with its figure (the median), the spread, and ``met``: ``None`` where it could not be measured."""
        figures = self.figures(rounds)
        if not figures:
            return {**asdict(self), "figure": None, "met": None}
        figure = statistics.median(figures)
        met = (self.least is None or figure >= self.least) and (self.most is None or figure <= self.most)
        return {**asdict(self), "figure": figure, "min": min(figures), "max": max(figures), "met": met}


def held_against(content: dict[str, Any], bars: Iterable[Bar], results: Path) -> list[dict[str, Any]]:
    """Judge the bars, add them to the result file, and print them."""
    judged = [bar.judged(content["rounds"]) for bar in bars]
    content["bars"] = judged
    write_json(json.dumps(content, indent=1, allow_nan=False) + "\n", results / f"{content['name']}.json")
    for bar in judged:
        wanted = f">= {bar['least']:g}" if bar["least"] is not None else f"<= {bar['most']:g}"
        if bar["figure"] is None:
            print(f"not measured  {bar['name']}: {wanted}")
        else:
            spread = f"{bar['min']:.3g} to {bar['max']:.3g}"
            print(
                f"{'met' if bar['met'] else 'NOT MET':13} {bar['name']}: {wanted}, got {bar['figure']:.3g} ({spread})"
            )
    return judged
