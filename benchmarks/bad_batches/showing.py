"""The table and the picture of ``benchmarks/spikes.py``."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any

__all__ = ["WORST", "by_seed", "draw", "table"]

WORST = 1e6  # a number that a result file can hold; stands for NaN too
# Colour, width and order of the clean run, the unguarded one, and the guards: those below are wider
_LINES = (("lightgrey", 6, 1), ("tab:red", 1, 8), ("tab:orange", 3, 2), ("tab:blue", 1.5, 3), ("black", 0.5, 4))


def by_seed(content: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Of each variant the losses, and their ratios to the baseline's: of each seed, the median, and the largest."""
    (told,) = content["rounds"]
    found = {}
    for variant in content["variants"]:
        mine, base = (told["runs"][name].get("metrics") for name in (variant["name"], variant["baseline"]))
        if mine is None or base is None:
            continue
        seeds = range(variant["arguments"]["seeds"])
        ratios = [mine[f"loss_{seed}"] / base[f"loss_{seed}"] for seed in seeds]
        found[variant["name"]] = {
            "baseline": variant["baseline"],
            **{key: [mine[f"{key}_{seed}"] for seed in seeds] for key in ("loss", "acted", "taken_back", "stopped")},
            "ratios": ratios,
            "median": statistics.median(ratios),
            "worst": max(ratios),
            "within_5_percent": sum(ratio <= 1.05 for ratio in ratios),
            "diverged": sum(ratio >= 10 for ratio in ratios),
        }
    return found


def table(seeds: dict[str, dict[str, Any]]) -> str:
    """Markdown: each variant's ratios to the clean run, and what its guard did; one number where all seeds agree.

    >>> told = {"loss": [0.2, 0.1], "ratios": [1.08, 1.0], "median": 1.04, "worst": 1.08, "within_5_percent": 1}
    >>> told |= {"diverged": 0, "stopped": [0.0, 0.0], "acted": [1.0, 1.0], "taken_back": [0.0, 3.0]}
    >>> print(table({"spike, skip": told}))
    | | final loss | times clean, by seed | median | worst | within 5 % | diverged | stopped | left out | taken back |
    |---|---:|---|---:|---:|---:|---:|---:|---:|---:|
    | spike, skip | 0.150 | 1.080, 1.000 | 1.040 | 1.080 | 1 of 2 | 0 | 0 | 1 | 0, 3 |
    """
    heads = ("", "final loss", "times clean, by seed", "median", "worst", "within 5 %", "diverged", "stopped")
    lines = [f"|{' | '.join((*heads, 'left out', 'taken back'))} |", "|---|---:|---" + "|---:" * 7 + "|"]
    for name, told in seeds.items():
        loss = statistics.median(told["loss"])
        cells = [name, f"{loss:.3f}" if loss < WORST else "not finite", _each(map(_times, told["ratios"]))]
        cells += [_times(told["median"]), _times(told["worst"]), f"{told['within_5_percent']} of {len(told['loss'])}"]
        cells += [f"{told['diverged']}", f"{sum(told['stopped']):.0f}"]
        cells += [_each(f"{number:.0f}" for number in told[key]) for key in ("acted", "taken_back")]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _each(told: Iterable[str]) -> str:
    cells = list(told)
    return cells[0] if len(set(cells)) == 1 else ", ".join(cells)


def _times(ratio: float) -> str:
    return f"{ratio:.3f}" if ratio < 10 else f"{ratio:.0f}" if ratio < 1e4 else "> 10 000"


def draw(panels: dict[str, dict[str, list[float]]], path: Path) -> Path:
    """For each fault the loss of every batch of its runs, on a logarithmic axis; a cross is where a run is lost."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context({"svg.hashsalt": "spikes", "svg.fonttype": "none"}):
        figure = Figure(figsize=(12, 4), layout="constrained")
        for axes, (title, curves) in zip(figure.subplots(1, len(panels), sharey=True), panels.items(), strict=True):
            longest = max(map(len, curves.values()))
            for (name, losses), (colour, width, order) in zip(curves.items(), _LINES, strict=False):
                axes.plot(losses, label=name, color=colour, linewidth=width, zorder=order)
                if len(losses) < longest or not math.isfinite(losses[-1]):
                    last = max(place for place, loss in enumerate(losses) if math.isfinite(loss))
                    axes.plot(last, losses[last], "x", color=colour, markersize=8, markeredgewidth=2, zorder=9)
            axes.set(title=title, xlabel="batch", ylabel="training loss", yscale="log")
            axes.label_outer()
            axes.legend(fontsize="small")
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, metadata={"Date": None})
    return path
