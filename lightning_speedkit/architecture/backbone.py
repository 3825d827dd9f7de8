"""Measures efficient image networks on your device, and ranks those that a budget allows.

What it does: builds each candidate of timm and torchvision with random weights, counts its parameters and FLOPs, and
measures its latency, peak memory and training throughput on images of the task's shape. When it helps: before a
project decides for a network; FLOPs alone predict time badly. What it costs: about the seconds given. What it does not
tell: how well a network learns. Costs say nothing of accuracy.

Source: paired, alternating measurement as in the kit's benchmarks; FLOPs by ``torch.utils.flop_counter``; that FLOPs
are no measure of speed: Ma et al., ShuffleNet V2, arXiv 1807.11164, guideline and figure 1.
"""

from __future__ import annotations

import contextlib
import math
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress

from lightning_speedkit.architecture.backbone_build import build_backbone, checked_names, checked_task
from lightning_speedkit.architecture.backbone_costs import Measured, count_parameters
from lightning_speedkit.architecture.backbone_limits import checked_budget, checked_objective
from lightning_speedkit.architecture.backbone_table import Backbone, BackboneTable
from lightning_speedkit.measure.hardware import read_hardware
from lightning_speedkit.measure.out_of_memory import is_out_of_memory, release_memory
from lightning_speedkit.measure.own_random_numbers import own_random_numbers
from lightning_speedkit.measure.versions import read_versions

__all__ = ["pick_backbone"]

_LEAST_ROUNDS = 3


def pick_backbone(
    task_shape: Sequence[int] = (3, 64, 64),
    num_classes: int = 10,
    budget: Mapping[str, float] | None = None,
    candidates: Sequence[str] | None = None,
    *,
    device: str = "auto",
    batch_size: int = 32,
    objective: str = "latency",
    seconds: float = 60.0,
    progress: bool = True,
) -> BackboneTable:
    """Which of the candidates is the cheapest on this device within the budget; all of them with their costs.

    Candidates that fail are kept in the table with the error. One with more parameters or FLOPs than allowed is not
    measured further. The others are timed in turns, forwards in one round and backwards in the next, on as many
    threads as torch has, under the autocast that is on, and with torch's settings as they are; random state, grad mode
    and threads are left as found. Nothing is downloaded.

    Args:
        task_shape: Channels, height and width of an image.
        num_classes: How many classes the images are of.
        budget: Limits, any of ``max_parameters``, ``max_flops`` (of one image), ``max_latency_ms`` (one image),
            ``max_batch_latency_ms``, ``max_inference_memory_mib``, ``max_training_memory_mib`` (both with a batch), and
            ``min_training_samples_per_second``.
        candidates: Names such as ``"timm:mobilenetv3_small_100"`` and ``"torchvision:efficientnet_b0"``, and families:
            ``"mobilenet"``, ``"efficientnet"``, ``"regnet"``, ``"convnext"``, ``"vit"``, ``"resnet"``; all families if
            not given.
        device: ``"auto"``, ``"cpu"``, ``"gpu"``, ``"cuda"``, ``"mps"`` or ``"xpu"``.
        batch_size: Images in a batch.
        objective: What the order is by: ``"latency"`` (one image), ``"batch-latency"``, ``"memory"`` (of training),
            ``"inference-memory"``, ``"training"`` (throughput), ``"parameters"`` or ``"flops"``.
        seconds: About how long to measure, above 0. Half of it is for a first look at each; candidates that it does not
            reach are named so in the table. Then follow three rounds at least, also if they take longer.
        progress: Whether to show a bar on the standard error stream, if that is a terminal.

    Returns:
        The table. If no candidate meets the budget there is a warning, and ``table.best`` raises; the first row is the
        nearest then.

    Raises:
        ValueError: An argument is not one of those allowed, a network is unknown, or no candidate could be measured.
        TypeError: ``candidates`` is no list of names, or ``budget`` no dict.
        MissingExtraError: timm or torchvision, which a candidate needs, is not installed.

    >>> table = pick_backbone((1, 16, 16), 10, {"max_parameters": 2e6}, ["torchvision:mobilenet_v3_small"],
    ...                       device="cpu", batch_size=4, seconds=0.1)
    >>> table.best.parameters, table.best.latency_ms > 0
    (1527818, True)
    """
    shape, num_classes = checked_task(task_shape, num_classes)
    limits, objective = checked_budget(budget), checked_objective(objective)
    _check_numbers(batch_size, seconds)
    names = checked_names(candidates)
    hardware = read_hardware(device)
    place = torch.device(hardware.accelerator)
    rows: dict[str, dict[str, Any]] = {name: {} for name in names}
    running: dict[str, Measured] = {}
    start = time.perf_counter()
    with (
        _shown(len(names), progress) as show,
        own_random_numbers(place),
        torch.inference_mode(False),
        torch.enable_grad(),
    ):
        for number, name in enumerate(names):
            show(name)
            row = rows[name]
            if number and time.perf_counter() - start > seconds / 2:
                row["error"] = f"not reached in {seconds / 2:g} seconds, half of those given"
                continue
            torch.manual_seed(0)
            with _kept_error(row, place):
                one = Measured(build_backbone(name, shape, num_classes), shape, num_classes, batch_size, place)
                if _first_look(one, row, limits):
                    running[name] = one
        rounds = _time_all(running, rows, start + seconds, show)
    found = [Backbone(name=name, task_shape=shape, num_classes=num_classes, **row) for name, row in rows.items()]
    if all(row.error is not None for row in found):
        told = " ".join(f"{row.name}: {(row.error or '').rstrip('.')}." for row in found)
        raise ValueError(f"No candidate could be measured. {told}")
    table = BackboneTable(
        rows=tuple(found),
        objective=objective,
        budget=limits,
        device=hardware.accelerator,
        device_name=hardware.device_name,
        threads=torch.get_num_threads(),
        batch_size=batch_size,
        rounds=rounds,
        versions=read_versions(),
    )
    nearest = table.rows[0]
    if nearest.error is None and nearest.excess(limits):
        told = f"No candidate meets the budget. The nearest is {nearest.name}: {table.note(nearest)}."
        warnings.warn(told, stacklevel=2)
    return table


def _first_look(one: Measured, row: dict[str, Any], limits: Mapping[str, float]) -> bool:
    """Count and measure what needs no clock; whether it is to be timed."""
    row["parameters"] = count_parameters(one.model)
    try:
        one.check()
        row["flops"] = one.flops()
        if any(row[cost] > limits.get(f"max_{cost}", math.inf) for cost in ("parameters", "flops")):
            return False
        row["inference_memory_mib"], row["training_memory_mib"] = one.memory()
    finally:
        one.rest()
    return True


def _time_all(
    running: dict[str, Measured], rows: dict[str, dict[str, Any]], end: float, show: Callable[[str], None]
) -> int:
    """Rounds until the time is over, three at least; how many. One that fails is timed no more."""
    rounds = 0
    while running and (rounds < _LEAST_ROUNDS or time.perf_counter() < end):
        show(f"round {rounds + 1}")
        for name in list(running) if rounds % 2 == 0 else list(reversed(running)):
            one = running[name]
            with _kept_error(rows[name], one.device):
                try:
                    one.round()
                finally:
                    one.rest()
            if "error" in rows[name]:
                del running[name]
        rounds += 1
    for name, one in running.items():
        rows[name]["latency_ms"] = 1e3 * one.median("one")
        rows[name]["batch_latency_ms"] = 1e3 * one.median("batch")
        rows[name]["training_samples_per_second"] = one.batch_size / one.median("training")
    return rounds


@contextlib.contextmanager
def _kept_error(row: dict[str, Any], device: torch.device) -> Iterator[None]:
    """Whatever a candidate raises becomes its ``error``, so that it does not end the search."""
    full = False
    try:
        yield
    except Exception as error:  # code of other libraries, which may refuse a shape in any way
        full = is_out_of_memory(error)
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        row["error"] = f"out of memory on {device}" if full else f"{type(error).__name__}: {first}"
    if full:
        release_memory(device)


@contextlib.contextmanager
def _shown(total: int, progress: bool) -> Iterator[Callable[[str], None]]:
    """A bar while the block runs: first a step for each candidate, then the rounds by number."""
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not (progress and console.is_terminal)) as bar:
        task = bar.add_task("", total=total)

        def show(what: str) -> None:
            bar.update(task, description=what, advance=0 if what.startswith("round") else 1)

        yield show


def _check_numbers(batch_size: int, seconds: float) -> None:
    if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
        raise ValueError(f"batch_size={batch_size!r} must be a whole number from 1.")
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 < seconds < math.inf:
        raise ValueError(f"seconds={seconds!r} must be a finite number above 0.")
