"""What it costs to watch a training."""

from __future__ import annotations

import copy
import time

from benchmarks.gpu_cases.case_run import CaseRun
from benchmarks.gpu_cases.measuring import median_seconds, wait
from benchmarks.gpu_cases.models import Net, fit, net_and_rows
from lightning_speedkit.measure import RunRecorder

__all__ = ["overhead"]


def overhead(run: CaseRun) -> None:
    """The same losses with a RunRecorder, its seconds against a clock on the wall, and what it adds to a step."""
    steps = run.pick(6, 150)
    net, data = net_and_rows(run, steps)
    recorder, watched, plain = RunRecorder(warmup_steps=2), Net(copy.deepcopy(net)), Net(copy.deepcopy(net))
    wait(run.device)
    start = time.perf_counter()
    fit(run, watched, data, callbacks=[recorder])
    seconds = time.perf_counter() - start
    fit(run, plain, data)
    same = all(bool(a.eq(b)) for a, b in zip(watched.losses, plain.losses, strict=True))
    run.check("losses as without it", same)
    told = recorder.run
    run.check(
        "it has recorded",
        told is not None and told.train.steps == steps - 2,
        "" if told is None else str(told.train.steps),
    )
    if told is not None:
        train = told.train
        run.check(
            "its seconds are within the fit", 0 < train.seconds_wall <= seconds, f"{train.seconds_wall} of {seconds}"
        )
        run.note(train.describe())
        run.number("recorded step ms", 1e3 * train.seconds_per_step)
    fits = {
        "plain": lambda: fit(run, Net(copy.deepcopy(net)), data),
        "watched": lambda: fit(run, Net(copy.deepcopy(net)), data, callbacks=[RunRecorder()]),
    }
    taken = median_seconds(fits, run.device, run.budget_seconds / 2, warmup=0)
    run.number("plain step us", 1e6 * taken["plain"] / steps)
    run.number("added us", 1e6 * (taken["watched"] - taken["plain"]) / steps)
