"""Which modules to recompute so that a step stays within a memory budget, at the least extra time.

What it does: runs one batch a few times on trial (weights, buffers, gradients and random state are afterwards as they
were), measures of each candidate module what it saves, what it would hold if it were checkpointed, and the seconds of
its forward, and searches all sets of candidates for the cheapest whose peak over the whole step is within the budget.
Then it measures that set; if it is over the budget after all, the next one. Only what was measured is returned.

The peak is of what a forward and backward hold at once beyond weights, buffers, inputs and the gradients of parameters.
On CUDA devices and CPUs the record of the allocator tells it, temporary tensors and buffers of kernels included.

When it helps: there is a certain amount of memory, and recomputing everything would cost more time than needed.
What it costs: about ten to twenty steps once, some of them slowed down by counting, and meanwhile a copy of the weights
in the memory of the host.

Source: Chen et al., Training Deep Nets with Sublinear Memory Cost, 2016; Herrmann et al., Optimal Checkpointing for
Heterogeneous Chains, 2019, where the peak is the limit and the time of the forwards is what is made small.
"""

from __future__ import annotations

import gc
import math
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from numpy.typing import NDArray
from torch import nn

from lightning_speedkit.memory.checkpoint_budget_candidates import candidate_paths, units_of
from lightning_speedkit.memory.checkpoint_budget_model import ModuleProfile, PeakModel
from lightning_speedkit.memory.checkpoint_budget_peak import measure_peak_bytes
from lightning_speedkit.memory.checkpoint_budget_search import choice_table, walk_units
from lightning_speedkit.memory.checkpoint_budget_state import as_found, parameters_as_found
from lightning_speedkit.memory.checkpoint_budget_trace import time_forwards, trace_run
from lightning_speedkit.memory.recomputation import plain_class, recomputed_class

__all__ = ["CheckpointPlan", "budget_bytes", "checked_budget", "plan_checkpoints"]

_TIMED_RUNS = 5
_MOST_TRIALS = 16  # sets that are measured before only those that are predicted to be safe are
_SHOWN = 12  # paths in a description
_OPTIMISM = 0.02  # of the peak: a set that is predicted so much above the budget is measured too
_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


@dataclass(frozen=True, slots=True)
class CheckpointPlan:
    """A set of modules to checkpoint, and what was measured of it.

    Attributes:
        paths: The modules to recompute, for ``checkpoint_modules``; empty if the budget needs none.
        peak_bytes: The measured peak of the step with them.
        plain_peak_bytes: That of the step without.
        budget_bytes: The budget.
        recompute_seconds: The measured seconds of their forwards, which is about the time that a step takes longer.
        step_seconds: The measured seconds of a forward and backward without them.
        profile: What was measured of each candidate.
    """

    paths: tuple[str, ...]
    peak_bytes: int
    plain_peak_bytes: int
    budget_bytes: int
    recompute_seconds: float
    step_seconds: float
    profile: tuple[ModuleProfile, ...]

    def describe(self) -> str:
        """The choice in a sentence or two."""
        before = f"the step peaks at {self.plain_peak_bytes:,} bytes"
        if not self.paths:
            return f"nothing is recomputed: {before}, and {self.budget_bytes:,} are allowed."
        extra = self.recompute_seconds / self.step_seconds if self.step_seconds else 0.0
        shown = ", ".join(self.paths[:_SHOWN])
        shown += f", and {len(self.paths) - _SHOWN} more, see plan.paths" if len(self.paths) > _SHOWN else ""
        return (
            f"{len(self.paths)} of {len(self.profile)} candidates are recomputed: {shown}. Without, {before}; with it "
            f"at {self.peak_bytes:,}, of {self.budget_bytes:,} allowed, and it takes about {extra:.0%} longer."
        )


def plan_checkpoints(
    model: nn.Module, run: Callable[[], Any], budget: str | float, candidates: str | Sequence[str] = "auto"
) -> CheckpointPlan:
    """Finds the modules to checkpoint for a memory budget; puts back what the runs change in the model.

    These are parameters, also those that the run itself writes to, gradients, buffers, and the random states of Python,
    numpy and torch. Other attributes that the run changes, such as counters and lists of losses, stay changed.

    Args:
        model: The model in training mode, in eager mode, with nothing of it checkpointed. Its parameters are on the
            device that is measured.
        run: Does the forward and backward of one batch, and no optimizer step; it is called some ten to twenty times.
            On several ranks it exchanges nothing between them: under DDP it runs inside ``no_sync()``.
        budget: The most bytes of activations, as ``"4GB"`` or ``"512MiB"``, or as a fraction such as 0.4 of the peak
            without checkpointing.
        candidates: The modules to choose among, as for ``checkpoint_modules``, nested ones too; ``"auto"`` takes the
            repeated blocks, the modules that hold several of them, those inside them, and those beside them.

    Raises:
        ValueError: If the budget cannot be kept (the message says the least that can), or is not a budget; if there
            are no candidates; if something in the model is checkpointed already.
        TypeError: If the budget is neither text nor a number.
        RuntimeError: If the run exchanges tensors with other ranks, which may take different numbers of trial steps.

    >>> block = lambda: nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 8))
    >>> model, batch = nn.Sequential(block(), block(), block()), torch.randn(512, 8)
    >>> plan = plan_checkpoints(model, lambda: model(batch).sum().backward(), 0.7)
    >>> plan.paths, plan.peak_bytes <= 0.7 * plan.plain_peak_bytes
    (('0', '1'), True)
    """
    checked_budget(budget)
    with parameters_as_found(model):
        return _plan(model, run, budget, candidate_paths(model, candidates))


def _plan(model: nn.Module, run: Callable[[], Any], budget: str | float, paths: Sequence[str]) -> CheckpointPlan:
    trial = _Trial(model, run)
    modules = {path: model.get_submodule(path) for path in paths}
    with as_found(model, trial.device):
        peaks = PeakModel(trace_run(model, run, modules))  # first: it refuses a run that would wait for other ranks
    plain = trial.peak_bytes(())
    limit = budget_bytes(budget, plain)
    step_seconds, seconds = trial.seconds({path: modules[path] for path in peaks.paths})
    profile = {path: peaks.profile(path, seconds[path]) for path in peaks.paths}
    units = units_of(model, profile)
    table = choice_table(units, {path: place for place, path in enumerate(peaks.paths)})
    shared = {unit.path: unit.seconds for unit in walk_units(units)}
    cost = table @ numpy.array([shared[path] for path in peaks.paths])
    predicted = peaks.peaks(table)
    predicted += plain - predicted[~table.any(axis=1)]  # buffers inside kernels, which an allocator counts

    sets = [peaks.named(choice) for choice in table]
    best, peak = _first_within(trial, limit, sets, cost, predicted)
    if peak > limit:
        raise ValueError(_out_of_reach(budget, limit, peak, plain, best))
    extra = float(sum(shared[path] for path in best))
    return CheckpointPlan(best, peak, plain, limit, extra, step_seconds, tuple(profile.values()))


def _out_of_reach(budget: str | float, limit: int, peak: int, plain: int, best: Sequence[str]) -> str:
    told = f"budget={budget!r} is {limit:,} bytes, and the least that can be reached is {peak:,}, "
    if not best:
        return (
            f"{told}without recomputing anything: no candidate holds enough of what the step keeps. Use a smaller "
            f"batch, allow more, or name other candidates: larger modules, or those that hold the large activations."
        )
    return (
        f"{told}with these modules recomputed: {', '.join(best)}. Without, the step peaks at {plain:,} bytes. Allow "
        f"more, use a smaller batch, or name other candidates: blocks that hold most may be made of smaller modules."
    )


def checked_budget(budget: str | float) -> str | float:
    """The budget itself, or what is wrong with it.

    >>> checked_budget("4GB"), checked_budget(0.4)
    ('4GB', 0.4)
    """
    if isinstance(budget, bool) or not isinstance(budget, (str, int, float)):
        raise TypeError(f"budget is bytes such as '4GB', or a fraction of the peak such as 0.4; got {budget!r}.")
    if isinstance(budget, str):
        _parsed(budget)
    elif not 0 < budget <= 1:
        raise ValueError(
            f"budget={budget!r} must be above 0 and at most 1, a fraction of the peak without checkpointing. "
            f"For an amount of memory write text with a unit, such as '4GB' or '512MiB'."
        )
    return budget


def budget_bytes(budget: str | float, plain_peak_bytes: int) -> int:
    """The budget in bytes; a fraction is of the given peak.

    >>> budget_bytes("1.5KiB", 0), budget_bytes("2MB", 0), budget_bytes(0.25, 1000)
    (1536, 2000000, 250)
    """
    checked = checked_budget(budget)
    return _parsed(checked) if isinstance(checked, str) else math.floor(checked * plain_peak_bytes)


def _parsed(text: str) -> int:
    if percent := re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*%\s*", text):
        raise ValueError(
            f"budget={text!r}: a part of the peak without checkpointing is a number; write {float(percent[1]) / 100:g}."
        )
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]+)\s*", text)
    factor = _UNITS.get(found[2].upper()) if found else None
    if found is None or factor is None or not float(found[1]) > 0:
        raise ValueError(
            f"budget={text!r} is not an amount of memory: write a number above 0 and one of "
            f"B, KB, MB, GB, TB (powers of 1000), KiB, MiB, GiB, TiB (powers of 1024), such as '4GB'."
        )
    return int(float(found[1]) * factor)


class _Trial:
    """Runs the batch with some modules checkpointed, and leaves the model as it found it."""

    def __init__(self, model: nn.Module, run: Callable[[], Any]) -> None:
        self._model, self._run = model, run
        self._warm: set[str] = set()  # those that have run checkpointed: they keep what dropout drew from then on
        self.device = next((p.device for p in model.parameters() if p.requires_grad), torch.device("cpu"))

    def peak_bytes(self, paths: Sequence[str]) -> int:
        modules = [self._model.get_submodule(path) for path in paths]
        gc.collect()
        try:
            for module in modules:
                module.__class__ = recomputed_class(type(module))
            if not self._warm.issuperset(paths):
                with as_found(self._model, self.device):
                    self._run()
                self._warm.update(paths)
            with as_found(self._model, self.device):
                return measure_peak_bytes(self._model, self._run, self.device)
        finally:
            for module in modules:
                module.__class__ = plain_class(type(module))

    def seconds(self, modules: Mapping[str, nn.Module]) -> tuple[float, dict[str, float]]:
        """The median seconds of the run, and of all forwards of each module."""
        runs = []
        for _ in range(_TIMED_RUNS):
            with as_found(self._model, self.device):
                runs.append(time_forwards(self._run, modules, self.device))
        middle = {path: statistics.median(seconds[path] for _, seconds in runs) for path in modules}
        return statistics.median(step for step, _ in runs), middle


def _first_within(
    trial: _Trial,
    limit: int,
    sets: Sequence[tuple[str, ...]],
    cost: NDArray[numpy.float64],
    predicted: NDArray[numpy.float64],
) -> tuple[tuple[str, ...], int]:
    """The cheapest set that is measured to be within the limit; if none is, the one with the lowest peak."""
    ceiling = limit + _OPTIMISM * predicted.max()
    trials = 0
    for row in numpy.lexsort((predicted, cost)):
        if predicted[row] >= ceiling:  # what is predicted to be higher than what failed is not tried
            continue
        peak = trial.peak_bytes(sets[row])
        if peak <= limit:
            return sets[row], peak
        trials += 1
        ceiling = min(predicted[row], limit if trials >= _MOST_TRIALS else numpy.inf)
    lowest = sets[int(predicted.argmin())]
    return lowest, trial.peak_bytes(lowest)
