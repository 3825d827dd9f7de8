"""Checkpointing under a memory budget against the best of all sets of the same blocks.

For each budget, a fraction of the plain peak: the peak of the planned set by the plan's own count, and by the record of
the CPU's allocator that ``torch.profiler`` keeps; the recomputation that the plan takes, over that of the best set; and
the extra time of a step with the plan, over that with the best set, from medians of alternating steps. If both have as
many blocks of each shape, they do the same work, and that ratio is 1 by definition.

What is exhausted: all 4,096 sets of the twelve blocks, by what the allocator recorded at the borders of the blocks in
two runs, one without checkpointing and one with all blocks checkpointed. What a block holds after its forward, and its
peaks in forward and backward beyond what the blocks before it hold, follow from these, and from them the peak of every
set. Nothing of the plan's own model is in it. Costs are the median seconds of the blocks' forwards, blocks of one shape
together, so that sets with as many blocks of each shape cost the same. In the order of cost, the lowest peaks among
sets of one cost that may be within the budget by two hundredths are then measured with the whole batch; the first that
is within it is the best.

At the end, for each budget: "met" if the planned set's peak by the allocator is within the budget, and its extra time
no more than a twentieth above that of the best set. A budget that no set keeps is no failure: then the line says
"impossible", and the least peak of all sets, measured with the whole batch for those of the lowest reckoned peaks.

    python -m benchmarks.checkpoint_budget [--rounds 1] [--smoke]
"""

from __future__ import annotations

import gc
import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile, record_function

from benchmarks.harness import Variant, benchmark_arguments, run_benchmark
from lightning_speedkit.memory import checkpoint_modules, uncheckpoint_modules
from lightning_speedkit.memory.checkpoint_budget import plan_checkpoints

__all__ = ["Inverted", "allocated_peak", "best_set", "least_peak", "measure", "peaks_of_all_sets", "verdicts"]

_FUNCTION = "benchmarks.checkpoint_budget:measure"
_BUDGETS = (0.8, 0.6, 0.4, 0.3, 0.2)
_NEAR = 1.02  # of the budget: a set whose reckoned peak is below is measured
_TRIES = 3  # sets of one cost, and of all, that are measured: those of the lowest reckoned peaks
_MARK = "border "
_LEAST = "least peak of all sets over plain, allocator"


class Inverted(nn.Module):
    """An inverted residual block: widens, convolves each channel by itself, narrows."""

    def __init__(self, inputs: int, outputs: int, stride: int = 1) -> None:
        super().__init__()
        wide = 4 * inputs
        self.layers = nn.Sequential(
            *(nn.Conv2d(inputs, wide, 1, bias=False), nn.BatchNorm2d(wide), nn.ReLU()),
            *(nn.Conv2d(wide, wide, 3, stride, 1, groups=wide, bias=False), nn.BatchNorm2d(wide), nn.ReLU()),
            *(nn.Conv2d(wide, outputs, 1, bias=False), nn.BatchNorm2d(outputs)),
        )
        self.residual = inputs == outputs and stride == 1

    def forward(self, x: Tensor) -> Tensor:
        narrow: Tensor = self.layers(x)
        return x + narrow if self.residual else narrow


def _transformer(depth: int, batch: int) -> tuple[nn.Module, Tensor, Tensor]:
    layer = nn.TransformerEncoderLayer(128, 4, 512, dropout=0.1, batch_first=True)
    model = nn.Sequential(
        nn.TransformerEncoder(layer, depth, enable_nested_tensor=False), nn.Linear(128, 16), nn.Flatten(0, 1)
    )
    return model, torch.randn(batch, 64, 128), torch.randint(16, (batch * 64,))


def _convolutional(depth: int, batch: int) -> tuple[nn.Module, Tensor, Tensor]:
    first, second = depth * 2 // 3, max(1, depth // 6)
    blocks = [Inverted(8, 8) for _ in range(first)]
    blocks += [Inverted(8, 16, 2), *(Inverted(16, 16) for _ in range(second - 1))]
    blocks += [Inverted(16, 32, 2), *(Inverted(32, 32) for _ in range(depth - first - second - 1))]
    stem = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU())
    model = nn.Sequential(stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))
    return model, torch.randn(batch, 3, 64, 64), torch.randint(10, (batch,))


_MODELS = {
    "transformer": (_transformer, "TransformerEncoderLayer"),
    "convolutional": (_convolutional, "Inverted"),
}


def measure(name: str, depth: int, batch: int, steps: int, budgets: Sequence[float] = _BUDGETS) -> dict[str, float]:
    """Plan for each budget, search all sets, and time the steps of both in alternating order."""
    make, blocks = _MODELS[name]
    torch.manual_seed(0)
    model, x, y = make(depth, batch)
    run = _step(model, x, y)
    checkpoint_modules(model, blocks)
    paths = uncheckpoint_modules(model)
    run()  # after which the gradients are there and are only added to
    seconds = _seconds_of_blocks(model, paths, run, steps)
    plain = allocated_peak(run)
    table, reckoned = peaks_of_all_sets(model, paths, run)
    known: dict[tuple[str, ...], float] = {(): 1.0}

    def fraction(chosen: tuple[str, ...]) -> float:
        if chosen not in known:
            with _checkpointed(model, chosen):
                known[chosen] = allocated_peak(run) / plain
        return known[chosen]

    metrics = {"sets": len(table), _LEAST: least_peak(paths, table, reckoned, fraction)}
    for budget in budgets:
        at = f"{budget:.0%}"
        best = best_set(seconds, table, reckoned / plain, fraction, budget)
        try:
            plan = plan_checkpoints(model, run, budget, blocks)
        except ValueError:  # no set is within the budget
            metrics |= {f"{at}: plan found": 0.0, f"{at}: best set found": float(best is not None)}
            continue
        cost = sum(seconds[path] for path in plan.paths)
        metrics |= {
            f"{at}: plan found": 1.0,
            f"{at}: best set found": float(best is not None),
            f"{at}: peak of plan over plain": plan.peak_bytes / plan.plain_peak_bytes,
            f"{at}: peak of plan over plain, allocator": fraction(plan.paths),
            f"{at}: blocks recomputed": len(plan.paths),
        }
        if best is not None:
            least = sum(seconds[path] for path in best)
            same = abs(cost - least) < 1e-9
            sets = {"none": (), "planned": plan.paths} | ({} if same else {"best": best})
            timed = _alternately(model, run, sets, steps)
            extra = {which: taken - timed["none"] for which, taken in timed.items()}
            metrics |= {
                f"{at}: blocks recomputed, best set": len(best),
                f"{at}: recomputation over the best's": cost / least if least else 1.0,
                f"{at}: extra time over the best's": 1.0 if same else extra["planned"] / extra["best"],
                f"{at}: step over plain": timed["planned"] / timed["none"],
            }
    return metrics


def verdicts(metrics: Mapping[str, float], budgets: Sequence[float] = _BUDGETS) -> list[str]:
    """For each budget whether it was kept, at a cost near that of the best set."""
    lines = []
    for budget in budgets:
        at = f"{budget:.0%}"
        if not metrics[f"{at}: plan found"]:
            possible = metrics[f"{at}: best set found"] or metrics[_LEAST] <= budget
            least = f"least is {metrics[_LEAST]:.1%} of plain"
            lines.append(f"{at}: NOT MET, no plan, but {least}" if possible else f"{at}: impossible: {least}, no plan")
            continue
        peak = metrics[f"{at}: peak of plan over plain, allocator"]
        extra = metrics.get(f"{at}: extra time over the best's", 1.0)
        kept, near = peak <= budget, extra <= 1.05
        told = f"peak {peak:.1%} of plain, extra time {extra:.2f} of the best set's"
        lines.append(f"{at}: {'met' if kept and near else 'NOT MET'}, {told}")
    return lines


def best_set(
    seconds: Mapping[str, float],
    table: NDArray[numpy.bool_],
    reckoned: NDArray[numpy.float64],
    fraction: Callable[[tuple[str, ...]], float],
    budget: float,
) -> tuple[str, ...] | None:
    """The set of least total seconds that is measured to be within the budget, among all rows of the table."""
    cost = (table @ numpy.array(list(seconds.values()))).round(9)
    tried: dict[float, int] = {}
    for row in numpy.lexsort((reckoned, cost)):
        if reckoned[row] > _NEAR * budget or tried.get(cost[row], 0) >= _TRIES:
            continue
        tried[cost[row]] = tried.get(cost[row], 0) + 1
        chosen = tuple(path for path, taken in zip(seconds, table[row], strict=True) if taken)
        if fraction(chosen) <= budget:
            return chosen
    return None


def least_peak(
    paths: Sequence[str],
    table: NDArray[numpy.bool_],
    reckoned: NDArray[numpy.float64],
    fraction: Callable[[tuple[str, ...]], float],
) -> float:
    """The least that is measured, among the sets of the lowest reckoned peaks, the smallest sets first."""
    rows = numpy.lexsort((table.sum(axis=1), reckoned))[:_TRIES]
    return min(fraction(tuple(path for path, taken in zip(paths, table[row], strict=True) if taken)) for row in rows)


def peaks_of_all_sets(
    model: nn.Module, paths: Sequence[str], run: Callable[[], Any]
) -> tuple[NDArray[numpy.bool_], NDArray[numpy.float64]]:
    """All sets as rows of booleans, and the peak of each in bytes, from two recorded runs."""
    plain = _bytes_of_blocks(model, paths, run)
    with _checkpointed(model, paths):
        checkpointed = _bytes_of_blocks(model, paths, run)
    table = (numpy.arange(2 ** len(paths))[:, None] >> numpy.arange(len(paths))) % 2 == 1
    held = numpy.where(table, checkpointed.held, plain.held)
    before = numpy.cumsum(held, axis=1) - held  # of the blocks that run earlier
    inside = numpy.where(table, checkpointed.peak, plain.peak) + before
    head = held.sum(axis=1) + plain.head
    return table, plain.stem + numpy.maximum(inside.max(axis=1), head)


@dataclass
class _Bytes:
    """Of each block what it holds between forward and backward, and its peak in both beyond what was there."""

    held: NDArray[numpy.float64]
    peak: NDArray[numpy.float64]
    stem: float  # before the first block
    head: float  # after the last, beyond what was there


def _bytes_of_blocks(model: nn.Module, paths: Sequence[str], run: Callable[[], Any]) -> _Bytes:
    hooks = []
    for place, path in enumerate(paths):

        def after(_: nn.Module, __: Any, out: Tensor, place: int = place) -> None:
            _mark(f"end {place}")
            out.register_hook(lambda _: _mark(f"backward {place}"))

        block = model.get_submodule(path)
        hooks.append(block.register_forward_pre_hook(lambda *_, place=place: _mark(f"start {place}")))
        hooks.append(block.register_forward_hook(after))
    changes, marks = _record(run)
    for hook in hooks:
        hook.remove()
    times = numpy.array([time for time, _ in changes])
    alive = numpy.cumsum([change for _, change in changes])

    def at(time: int) -> float:
        place = int(numpy.searchsorted(times, time))
        return float(alive[place - 1]) if place else 0.0

    def most(start: int, stop: int) -> float:
        inside = alive[numpy.searchsorted(times, start) : numpy.searchsorted(times, stop)]
        return float(inside.max(initial=at(start)))

    last = len(paths) - 1
    starts = [marks[f"start {place}"] for place in range(last + 1)] + [marks[f"end {last}"]]
    backwards = [int(times[-1]) + 1] + [marks[f"backward {place}"] for place in range(last + 1)]
    levels = numpy.array([at(time) for time in starts])
    forward = [most(*border) - at(border[0]) for border in itertools.pairwise(starts)]
    backward = [most(backwards[place + 1], backwards[place]) - levels[place] for place in range(last + 1)]
    head = most(starts[-1], backwards[-1]) - levels[-1]
    return _Bytes(numpy.diff(levels), numpy.maximum(forward, backward), levels[0], head)


def _mark(name: str) -> None:
    with record_function(_MARK + name):
        pass


def _record(run: Callable[[], Any]) -> tuple[list[tuple[int, int]], dict[str, int]]:
    """What the CPU's allocator gave out and took back, in order, and when each border was.

    Tensors of an earlier recorded run that only the garbage collector frees would count as taken back in this one.
    """
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as told:
        run()
    events = told.profiler.kineto_results.events()  # type: ignore[union-attr]
    changes = [(event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]"]
    marks = {e.name()[len(_MARK) :]: e.start_ns() for e in events if e.name().startswith(_MARK)}
    return sorted(changes, key=lambda change: change[0]), marks


def allocated_peak(run: Callable[[], Any]) -> int:
    """The most bytes that the CPU's allocator has given out at once in a run, beyond the start."""
    return int(numpy.cumsum([0, *(change for _, change in _record(run)[0])]).max())


def _step(model: nn.Module, x: Tensor, y: Tensor) -> Callable[[], None]:
    def step() -> None:
        nn.functional.cross_entropy(model(x), y).backward()

    return step


@contextmanager
def _checkpointed(model: nn.Module, paths: Sequence[str]) -> Iterator[None]:
    if paths:
        checkpoint_modules(model, list(paths))
    try:
        yield
    finally:
        uncheckpoint_modules(model)


def _seconds_of_blocks(model: nn.Module, paths: Sequence[str], run: Callable[[], Any], steps: int) -> dict[str, float]:
    found: dict[str, list[float]] = {path: [] for path in paths}
    starts: list[float] = []
    hooks = []
    for path in paths:
        block = model.get_submodule(path)
        hooks.append(block.register_forward_pre_hook(lambda *_: starts.append(time.perf_counter())))
        hooks.append(
            block.register_forward_hook(lambda *_, path=path: found[path].append(time.perf_counter() - starts.pop()))
        )
    for _ in range(steps):
        run()
    for hook in hooks:
        hook.remove()
    of_shape: dict[object, list[float]] = {}
    shapes = {path: str([p.shape for p in model.get_submodule(path).parameters()]) for path in paths}
    for path in paths:
        of_shape.setdefault(shapes[path], []).extend(found[path])
    return {path: statistics.median(of_shape[shapes[path]]) for path in paths}


def _alternately(
    model: nn.Module, run: Callable[[], Any], sets: dict[str, tuple[str, ...]], steps: int
) -> dict[str, float]:
    times: dict[str, list[float]] = {name: [] for name in sets}
    for number in range(steps):
        for name in list(sets) if number % 2 else reversed(sets):
            with _checkpointed(model, sets[name]):
                start = time.perf_counter()
                run()
                times[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in times.items()}


def main() -> None:
    """Measure and write the results."""
    options = benchmark_arguments("Checkpointing under a memory budget against exhaustive search.", 1)
    sizes: dict[str, Any] = {"depth": 12, "batch": 8, "steps": 15, "budgets": list(_BUDGETS)}
    if options.smoke:
        sizes = {"depth": 4, "batch": 2, "steps": 1, "budgets": [0.8]}
    content = run_benchmark(
        "checkpoint_budget",
        [Variant(name, _FUNCTION, {"name": name, **sizes}) for name in _MODELS],
        rounds=options.rounds,
        warmup=0,
        timeout=3600,
        forked=options.smoke,
        environment={"KINETO_LOG_LEVEL": "5"},  # the profiler is silent
        results=options.results,
    )
    for name, told in content["summary"].items():
        metrics = {metric: spread["median"] for metric, spread in told["metrics"].items()}
        for line in verdicts(metrics, sizes["budgets"]) if metrics else [f"NOT MET: {told['errors']}"]:
            print(f"{name}, {line}")


if __name__ == "__main__":
    main()
