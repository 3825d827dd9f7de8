"""What was replaced in a model and what it saves, and the plan from which the same structure is made again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from torch import nn

from lightning_speedkit.report import Table, format_number, ratio_text

__all__ = ["LightenReport", "LighterLayer", "read_plan"]

_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class LighterLayer:
    """One replaced layer. Multiply-adds are of all its calls in the example, seconds of one call; ``error`` is that of
    its weights before training, relative (Frobenius norm)."""

    name: str
    layer: str
    kind: str
    groups: int
    rank: int
    shape: tuple[int, ...]
    error: float
    parameters_before: int
    parameters_after: int
    multiply_adds_before: int
    multiply_adds_after: int
    seconds_before: float | None = None
    seconds_after: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LightenReport:
    """What :func:`~lightning_speedkit.architecture.lighten` did.

    ``left`` says of every other layer with a weight matrix why it stays. ``flops`` and ``seconds`` are of one forward
    of the example in eval mode; seconds are ``None`` where nothing was timed. ``output_error`` is how far the outputs
    are from the model's before any training, relative.
    """

    layers: tuple[LighterLayer, ...]
    left: Mapping[str, str]
    parameters_before: int
    parameters_after: int
    flops_before: int
    flops_after: int
    output_error: float
    seconds_before: float | None = None
    seconds_after: float | None = None

    @property
    def plan(self) -> dict[str, Any]:
        """What :func:`~lightning_speedkit.architecture.apply_plan` makes the same structure from: plain data, fit for
        JSON, YAML and the hyperparameters of a checkpoint."""
        return {
            "version": _VERSION,
            "layers": [
                {"name": one.name, "kind": one.kind, "groups": one.groups, "rank": one.rank, "shape": list(one.shape)}
                for one in self.layers
            ],
        }

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain data."""
        return {**asdict(self), "left": dict(self.left), "plan": self.plan}

    def describe(self) -> str:
        """What was saved, in a line.

        >>> LightenReport(
        ...     layers=(), left={}, parameters_before=100, parameters_after=50, flops_before=9, flops_after=3,
        ...     output_error=0.5, seconds_before=0.002, seconds_after=0.001,
        ... ).describe()
        '0 layers replaced, 0 left; parameters 100 -> 50, FLOPs 3.00× fewer, 2.00× faster; outputs off by 0.50'
        """
        flops = " ".join(ratio_text(self.flops_before / max(1, self.flops_after), "fewer", "more"))
        words = [
            f"{len(self.layers)} layers replaced, {len(self.left)} left; "
            f"parameters {format_number(self.parameters_before)} -> {format_number(self.parameters_after)}",
            f"FLOPs {flops}",
        ]
        if self.seconds_before is not None and self.seconds_after is not None:
            words.append(" ".join(ratio_text(self.seconds_before / self.seconds_after, "faster", "slower")))
        return f"{', '.join(words)}; outputs off by {self.output_error:.2f}"

    def table(self) -> Table:
        """A row for each replaced layer, as a table of a report."""
        rows = [
            (
                one.name,
                one.layer,
                f"{one.kind}, rank {one.rank}" + (f" in {one.groups} groups" if one.kind == "grouped" else ""),
                one.multiply_adds_after / one.multiply_adds_before,
                one.seconds_after / one.seconds_before if one.seconds_before and one.seconds_after else "–",
                one.error,
            )
            for one in self.layers
        ]
        header = ["layer", "was", "is", "share of multiply-adds", "share of time", "weights off by"]
        return Table(header, rows, caption=self.describe())

    def __str__(self) -> str:
        """The line, the table of the replaced layers under its headings, and a line for each that was left."""
        lines = [self.describe()]
        table = self.table()
        if table.rows:
            lines += _columns([tuple(table.header), *table.cells()])
        return "\n".join([*lines, *(f"  {name or 'the model'} stays: {why}" for name, why in self.left.items())])


def _columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Each row as a line, in columns as wide as their longest text."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [f"  {' | '.join(t.ljust(w) for t, w in zip(row, widths, strict=True))}".rstrip() for row in rows]


def read_plan(plan: Any, layers: Mapping[str, nn.Module], left: Mapping[str, str]) -> dict[str, tuple[int, int]]:
    """Groups and rank by the name of the layer, checked against the layers of the model.

    Raises:
        TypeError: ``plan`` is no plan.
        ValueError: It is of another version, or names a layer that the model lacks, that differs, or that must stay.
    """
    if not isinstance(plan, Mapping) or not isinstance(plan.get("layers"), (list, tuple)):
        raise TypeError("plan is that of a report of lighten(): a dict with 'version' and 'layers'.")
    if plan.get("version") != _VERSION:
        raise ValueError(f"plan: version {plan.get('version')!r} is not {_VERSION}, which this kit reads.")
    read: dict[str, tuple[int, int]] = {}
    for entry in plan["layers"]:
        if not isinstance(entry, Mapping) or (missing := {"name", "groups", "rank", "shape"} - set(entry)):
            lacks = f"; it lacks {', '.join(sorted(missing))}" if isinstance(entry, Mapping) else ""
            raise TypeError(f"plan: {entry!r} does not describe a layer{lacks}.")
        name = entry["name"]
        if name not in layers:
            why = left.get(name, "it has no such layer, or it is replaced already")
            raise ValueError(f"plan: the layer {name!r} of this model cannot be replaced: {why}.")
        shape = list(layers[name].get_parameter("weight").shape)
        if shape != list(entry["shape"]):
            raise ValueError(f"plan: the weight of {name!r} has the shape {shape}; the plan is for {entry['shape']}.")
        read[name] = (entry["groups"], entry["rank"])
    return read
