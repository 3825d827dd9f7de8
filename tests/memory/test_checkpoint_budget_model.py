"""The predicted peaks of a traced run: against the measured peaks of the same modules checkpointed."""

from __future__ import annotations

import itertools

import numpy
import torch
from torch import Tensor, nn

from lightning_speedkit.memory import checkpoint_modules, uncheckpoint_modules
from lightning_speedkit.memory.checkpoint_budget_live import LiveBytes, at_each_gradient
from lightning_speedkit.memory.checkpoint_budget_model import PeakModel
from lightning_speedkit.memory.checkpoint_budget_trace import trace_run


class Shared(nn.Module):
    """Calls one block twice, hands one tensor to every block, and holds a result to the end."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (
            nn.Sequential(nn.Linear(32, 48), nn.Tanh(), nn.Linear(48, 32), nn.ReLU()) for _ in range(3)
        )

    def forward(self, x: Tensor) -> Tensor:
        context = torch.sin(x)
        early = y = self.first(x + context)
        for block in (self.second, self.third, self.second):
            y = block(y * context)
        out: Tensor = y + early.detach()
        return out


def test_every_set_of_blocks_is_predicted_within_a_hundredth() -> None:
    model, x = Shared(), torch.randn(64, 32)
    paths = ["first", "second", "third"]

    def run() -> None:
        model(x).square().sum().backward()

    def peak() -> int:
        model.zero_grad()
        live = LiveBytes(trial=True)  # of storages, which is what is predicted
        with at_each_gradient(model, live.leave_out), live:
            run()
        return live.peak

    model.zero_grad()
    peaks = PeakModel(trace_run(model, run, {path: model.get_submodule(path) for path in paths}))
    assert peaks.paths == paths
    table = numpy.array(list(itertools.product([False, True], repeat=3)))
    predicted = peaks.peaks(table)
    for row, expected in zip(table, predicted, strict=True):
        chosen = peaks.named(row)
        if chosen:
            checkpoint_modules(model, list(chosen))
        measured = peak()
        uncheckpoint_modules(model)
        assert abs(measured - expected) <= 0.01 * predicted[0], chosen


def test_a_module_that_saves_nothing_is_no_candidate() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Flatten()), nn.Sequential(nn.Linear(4, 4), nn.Tanh()))
    trace = trace_run(
        model, lambda: model(torch.ones(2, 4)).sum().backward(), {path: model.get_submodule(path) for path in "12"}
    )
    assert PeakModel(trace).paths == ["2"]
