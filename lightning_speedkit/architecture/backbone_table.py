"""A table of backbones with their costs: ranked, held against a budget, and as data."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import cast

from torch import nn

from lightning_speedkit.architecture.backbone_build import build_backbone
from lightning_speedkit.architecture.backbone_limits import COSTS, HIGHER_IS_BETTER, LIMITS, OBJECTIVES
from lightning_speedkit.architecture.backbone_report import backbone_document, draw_front
from lightning_speedkit.errors import did_you_mean
from lightning_speedkit.registry import Part
from lightning_speedkit.report import Document, Table, format_number

__all__ = ["Backbone", "BackboneTable"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Backbone:
    """One candidate and what it costs. What was not measured is ``None``; ``error`` says why, if it could not be.

    ``flops`` are of one image, two for each multiplication with addition. ``latency_ms`` is of one image,
    ``batch_latency_ms`` of a batch, both medians in eval mode. Memory is the most at any time in MiB, with a batch,
    weights included; training is a step with AdamW. ``accuracy`` is what you gave.
    """

    name: str
    task_shape: tuple[int, int, int]
    num_classes: int
    parameters: int | None = None
    flops: int | None = None
    latency_ms: float | None = None
    batch_latency_ms: float | None = None
    inference_memory_mib: float | None = None
    training_memory_mib: float | None = None
    training_samples_per_second: float | None = None
    accuracy: float | None = None
    error: str | None = None

    @property
    def part(self) -> Part:
        """What rebuilds it, as plain data: ``part.config()`` is the form that LightningCLI reads."""
        arguments = {"name": self.name, "task_shape": list(self.task_shape), "num_classes": self.num_classes}
        return Part(cast("type", build_backbone), arguments)

    def build(self) -> nn.Module:
        """A new network of this kind, with random weights, on the CPU."""
        return build_backbone(self.name, self.task_shape, self.num_classes)

    def cost(self, name: str) -> float:
        """A cost as a number of which less is better; infinite if not measured."""
        value = getattr(self, name)
        if value is None:
            return math.inf
        return -float(value) if name == HIGHER_IS_BETTER else float(value)

    def excess(self, budget: Mapping[str, float]) -> dict[str, float]:
        """Each limit that is not kept, and how many times it is exceeded; infinite if the cost is not known.

        >>> net = Backbone(name="torchvision:resnet18", task_shape=(3, 64, 64), num_classes=10, latency_ms=8.0)
        >>> net.excess({"max_latency_ms": 4.0}), net.excess({"max_latency_ms": 8.0})
        ({'max_latency_ms': 2.0}, {})
        """
        found: dict[str, float] = {}
        for limit, allowed in budget.items():
            value = getattr(self, LIMITS[limit])
            if value is None:
                found[limit] = math.inf
            elif value < allowed if limit.startswith("min_") else value > allowed:
                found[limit] = _times(value, allowed, limit)
        known = {limit: times for limit, times in found.items() if math.isfinite(times)}
        return known or found  # what is over a known limit was not measured further


def _times(value: float, allowed: float, limit: str) -> float:
    above, below = (allowed, value) if limit.startswith("min_") else (value, allowed)
    return above / below if below else math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class BackboneTable:
    """The candidates, ranked: first those within the budget, then the others by how far they are over it, last those
    that could not be measured. Within the budget the order is by accuracy where you gave accuracies, else by the
    objective alone: the cheapest is first, and how well it learns nobody has looked at.

    >>> small, large = (
    ...     Backbone(name=f"torchvision:{name}", task_shape=(3, 64, 64), num_classes=10, latency_ms=ms)
    ...     for name, ms in (("resnet18", 4.0), ("resnet50", 9.0))
    ... )
    >>> table = BackboneTable(rows=(large, small), objective="latency", budget={"max_latency_ms": 10.0})
    >>> table.best.name
    'torchvision:resnet18'
    >>> table.with_accuracies({"torchvision:resnet18": 0.70, "torchvision:resnet50": 0.76}).best.name
    'torchvision:resnet50'
    """

    rows: tuple[Backbone, ...]
    objective: str = "latency"
    budget: Mapping[str, float] = field(default_factory=dict)
    device: str = "cpu"
    device_name: str = ""
    threads: int = 1
    batch_size: int = 32
    rounds: int = 0
    versions: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "rows", tuple(sorted(self.rows, key=self._place)))

    def _place(self, row: Backbone) -> tuple[int, float, float]:
        cost = row.cost(OBJECTIVES[self.objective])
        if row.error is not None:
            return 2, 0.0, 0.0
        if over := row.excess(self.budget):
            return 1, max(over.values()), cost
        return 0, -row.accuracy if row.accuracy is not None else 0.0, cost

    @property
    def names(self) -> tuple[str, ...]:
        """The candidates in order."""
        return tuple(row.name for row in self.rows)

    def __getitem__(self, name: str) -> Backbone:
        """The row of that name."""
        found = next((row for row in self.rows if row.name == name), None)
        if found is None:
            raise KeyError(f"{name!r} is not a candidate.{did_you_mean(name, self.names, most=1)}")
        return found

    def __iter__(self) -> Iterator[Backbone]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def best(self) -> Backbone:
        """The first one within the budget; ValueError, which names the nearest, if none is."""
        first = self.rows[0]
        if first.error is not None:
            raise ValueError(f"No candidate could be measured; {first.name}: {first.error}")
        if first.excess(self.budget):
            raise ValueError(f"No candidate meets the budget. The nearest is {first.name}: {self.note(first)}.")
        return first

    @property
    def axes(self) -> tuple[str, str]:
        """What the front is of: the objective, and the accuracy if there is one, else another cost."""
        first = OBJECTIVES[self.objective]
        if any(row.accuracy is not None for row in self.rows):
            return first, "accuracy"
        return first, "latency_ms" if first == "training_memory_mib" else "training_memory_mib"

    @property
    def pareto(self) -> tuple[Backbone, ...]:
        """Those that no other one beats in one of the two :attr:`axes` without losing in the other, cheapest first.

        Only candidates within the budget are looked at.
        """
        measured = [row for row in self.rows if self._place(row)[0] == 0 and math.isfinite(sum(self.point(row)))]
        front = [row for row in measured if not any(_beats(self.point(o), self.point(row)) for o in measured)]
        return tuple(sorted(front, key=self.point))

    def point(self, row: Backbone) -> tuple[float, float]:
        """Its place on the two :attr:`axes`, as numbers of which less is better."""
        first, second = self.axes
        if second != "accuracy":
            return row.cost(first), row.cost(second)
        return row.cost(first), math.inf if row.accuracy is None else -row.accuracy

    def with_accuracies(self, accuracies: Mapping[str, float]) -> BackboneTable:
        """A new table, ranked by these: what each candidate reached in a training of yours, by its name.

        Any measure of which more is better will do. Candidates that are left out rank behind those with one.
        """
        unknown = [name for name in accuracies if name not in self.names]
        if unknown:
            hint = did_you_mean(unknown[0], self.names, most=1)
            raise ValueError(f"accuracies: {unknown[0]!r} is not a candidate.{hint}")
        for name, value in accuracies.items():
            if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
                raise ValueError(f"accuracies: {value!r} of {name!r} is not a finite number.")
        rows = (dataclasses.replace(row, accuracy=accuracies.get(row.name, row.accuracy)) for row in self.rows)
        return dataclasses.replace(self, rows=tuple(rows))

    def note(self, row: Backbone) -> str:
        """What there is to say of a row: why it failed, or which limits it does not keep."""
        if row.error is not None:
            return row.error
        told = []
        for limit in row.excess(self.budget):
            name = LIMITS[limit]
            unit, value = COSTS[name][1], getattr(row, name)
            got = "not known here" if value is None else format_number(value, unit)
            told.append(f"{COSTS[name][0]} {got}, {limit}={self.budget[limit]:g}")
        return "; ".join(told)

    def table(self) -> Table:
        """The candidates as a table of a report."""
        scored = any(row.accuracy is not None for row in self.rows)
        header = ["backbone", *(["accuracy"] if scored else []), "M parameters", "MFLOPs", "ms, 1 image"]
        header += [f"ms, {self.batch_size} images", "MiB, inference", "MiB, training", "samples/s, training", "note"]
        rows = []
        for row in self.rows:
            millions = (None if n is None else n / 1e6 for n in (row.parameters, row.flops))
            numbers = (*millions, row.latency_ms, row.batch_latency_ms, row.inference_memory_mib)
            numbers = (*numbers, row.training_memory_mib, row.training_samples_per_second)
            if scored:
                numbers = (row.accuracy, *numbers)
            cells = ["–" if number is None else format_number(float(number)) for number in numbers]
            rows.append([row.name, *cells, self.note(row)])
        return Table(header, rows, caption=f"Measured on {self.device_name or self.device}, {self.threads} thread(s)")

    def __str__(self) -> str:
        """The table as lines of text."""
        table = self.table()
        lines = [table.header, *table.cells()]
        widths = [max(len(line[column]) for line in lines) for column in range(len(table.header))]
        ends = (0, len(widths) - 1)  # texts; the numbers are to the right
        told = []
        for line in lines:
            cells = zip(range(len(line)), line, widths, strict=True)
            told.append("  ".join(c.ljust(width) if i in ends else c.rjust(width) for i, c, width in cells).rstrip())
        return "\n".join([table.caption, *told])

    def document(self) -> Document:
        """The table and its front as a report: ``table.document().write_html("backbones.html")``."""
        return backbone_document(self)

    def to_svg(self) -> str:
        """A picture of all candidates over the two :attr:`axes`, with the front as a line, as SVG.

        Raises:
            MissingExtraError: matplotlib is not installed.
            ValueError: No candidate has both values.
        """
        return draw_front(self)

    def to_json(self) -> str:
        """The table as JSON, from which :meth:`from_json` makes it again."""
        return json.dumps({"schema": "backbones", "schema_version": 1, **dataclasses.asdict(self)}, indent=1)

    @classmethod
    def from_json(cls, text: str) -> BackboneTable:
        """The table that :meth:`to_json` wrote; ValueError if the text is something else."""
        try:
            content = json.loads(text)
            if content.pop("schema") != "backbones" or content.pop("schema_version") != 1:
                raise ValueError("schema")
            rows = (Backbone(**{**row, "task_shape": tuple(row["task_shape"])}) for row in content.pop("rows"))
            return cls(rows=tuple(rows), **content)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"This is not a table of backbones that to_json wrote: {error!r}.") from error


def _beats(one: tuple[float, float], other: tuple[float, float]) -> bool:
    return one != other and all(a <= b for a, b in zip(one, other, strict=True))
