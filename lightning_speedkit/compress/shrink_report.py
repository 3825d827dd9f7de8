"""What shrinking a network removed, what that gained and what it cost."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from lightning_speedkit.compress.calls import Call, batch_size, call_with, first_sample, replay
from lightning_speedkit.compress.quality import alternating_seconds, serialized_bytes
from lightning_speedkit.measure import flops

__all__ = ["ShrinkReport", "count_flops", "count_parameters", "measured_sizes"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ShrinkReport:
    """What was removed and what came of it.

    ``layers`` has the width of each layer (or the number of heads of an attention) before and after, ``skipped`` why
    others keep theirs. ``flops`` are those of the network's forward for ``batch_size`` samples, twice the
    multiply-adds; seconds are medians of that forward, both networks called alternately on ``threads`` threads of a
    CPU, for one sample and for the batch. ``undone`` says that the last step was taken back because the metric fell too
    far. What could not be measured is ``None``.

    >>> ShrinkReport(reason="ratio is 0").describe()
    'Nothing was removed: ratio is 0'
    """

    reason: str = ""
    ratio: float = 0.0
    head_ratio: float = 0.0
    steps_done: int = 0
    undone: bool = False
    layers: Mapping[str, Sequence[int]] = field(default_factory=dict)
    skipped: Mapping[str, str] = field(default_factory=dict)
    parameters_before: int | None = None
    parameters_after: int | None = None
    bytes_before: int | None = None
    bytes_after: int | None = None
    flops_before: int | None = None
    flops_after: int | None = None
    batch_size: int | None = None
    threads: int | None = None
    seconds_before_one: float | None = None
    seconds_after_one: float | None = None
    seconds_before_batch: float | None = None
    seconds_after_batch: float | None = None
    metric: str | None = None
    metric_before: float | None = None
    metric_after: float | None = None
    metric_drop: float | None = None
    max_metric_drop: float | None = None

    def describe(self) -> str:
        """A few words for a person."""
        if not self.layers:
            return f"Nothing was removed: {self.reason}"
        if self.parameters_before is None or self.parameters_after is None:
            parts = [f"Shrunk {len(self.layers)} layers in an earlier part of the run"]
        else:
            sizes = f"{self.parameters_before:,} -> {self.parameters_after:,} parameters"
            parts = [f"Shrunk {len(self.layers)} layers: {sizes}"]
        if self.flops_before and self.flops_after:
            parts.append(f"{self.flops_before / 1e6:.3g} -> {self.flops_after / 1e6:.3g} MFLOP")
        if self.seconds_before_batch and self.seconds_after_batch:
            parts.append(
                f"{self.seconds_before_batch * 1e3:.3g} -> {self.seconds_after_batch * 1e3:.3g} ms "
                f"for a batch of {self.batch_size}"
            )
        if self.metric_before is not None and self.metric_after is not None:
            parts.append(f"{self.metric} {self.metric_before:.4g} -> {self.metric_after:.4g}")
        return f"{', '.join(parts)}. {self.reason}".strip()

    def to_json(self) -> str:
        """The report as JSON; a number that is not finite becomes a string."""
        values = {
            name: str(value) if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in dataclasses.asdict(self).items()
        }
        return json.dumps({"schema": 1, **values}, indent=2, allow_nan=False)

    def numbers(self) -> dict[str, float]:
        """What a logger can plot: every number that was measured, under ``shrink/``."""
        values = dataclasses.asdict(self)
        return {
            f"shrink/{name}": float(value)
            for name, value in values.items()
            if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
        }


def count_parameters(module: nn.Module) -> int:
    """Numbers in the parameters of ``module``, shared ones counted once.

    >>> count_parameters(nn.Linear(3, 2))
    8
    """
    return sum(parameter.numel() for parameter in module.parameters())


def count_flops(root: nn.Module, calls: Sequence[Call]) -> int:
    """Floating-point operations of the matrix products and convolutions of these calls, twice the multiply-adds.

    >>> count_flops(nn.Linear(3, 2), [Call("", (torch.ones(4, 3),), {})])
    48
    """
    return flops.count_flops(lambda: replay(root, calls))


def measured_sizes(before: nn.Module, after: nn.Module, calls: Sequence[Call]) -> dict[str, Any]:
    """The fields of a report that compare two networks, both in eval mode on the CPU and called as ``calls`` say."""
    one = [first_sample(call) for call in calls]
    batch, single = _seconds(before, after, calls), _seconds(before, after, one)
    return {
        "parameters_before": count_parameters(before),
        "parameters_after": count_parameters(after),
        "bytes_before": serialized_bytes(before.state_dict()),
        "bytes_after": serialized_bytes(after.state_dict()),
        "flops_before": count_flops(before, calls),
        "flops_after": count_flops(after, calls),
        "batch_size": batch_size(calls[0]),
        "threads": torch.get_num_threads(),
        "seconds_before_batch": batch[0],
        "seconds_after_batch": batch[1],
        "seconds_before_one": single[0],
        "seconds_after_one": single[1],
    }


def _seconds(before: nn.Module, after: nn.Module, calls: Sequence[Call]) -> tuple[float | None, float | None]:
    def run(root: nn.Module) -> None:
        for call in calls:
            call_with(root.get_submodule(call.name), call)

    functions: list[Callable[[], None]] = [partial(run, root) for root in (before, after)]
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            first, second = alternating_seconds(functions, budget_seconds=1.0)
        return first, second
    except Exception:  # a network that needs a full batch; the full batch itself was run before
        return None, None
