"""The windows of a run in a plain loop, without a Trainer, against big batches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from lightning_speedkit.optimize import accumulation_window
from lightning_speedkit.optimize.accumulation_plan import WindowPlan
from lightning_speedkit.optimize.accumulation_ranks import DataRanks
from lightning_speedkit.optimize.accumulation_run import AccumulationRun


def _net() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1)).double()


def _gradient(model: nn.Module) -> Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def _walk(
    plan: WindowPlan, sizes: list[int], counted: Any = int, shrink: bool = False
) -> tuple[list[Tensor], list[int]]:
    """The gradient and the number of micro-batches of each window of an epoch, and it asserts their mean losses."""
    model, run, steps = _net(), AccumulationRun(plan, DataRanks()), 0
    x = torch.randn(sum(sizes), 2, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    seen, lengths, start = [], [], 0
    run.begin(0, 0)
    for batch, part in enumerate(x.split(sizes)):
        if run.bounds.is_over_at(batch):
            run.begin(run.bounds.next_start(batch), steps)
        run.count(counted(len(part)), batch, steps)
        if run.window is None:
            model.zero_grad()
            run.open(steps)
        is_last = run.bounds.is_last(batch) or batch == len(sizes) - 1
        loss = model(part).square().sum() / max(len(part), 1)
        (loss * run.weight(model.parameters, is_last, shrink)).backward()
        run.add_loss(loss.detach())
        if is_last:
            whole = _net()
            window = x[sum(sizes[:start]) : sum(sizes[: batch + 1])]
            expected = whole(window).square().sum() / max(len(window), 1)
            expected.backward()
            torch.testing.assert_close(_gradient(model), _gradient(whole), rtol=1e-12, atol=1e-14)
            mean = run.mean_loss()
            assert float(mean) == pytest.approx(expected.item(), rel=1e-12)  # type: ignore[arg-type]
            seen.append(_gradient(model))
            lengths.append(batch + 1 - start)
            start, steps = batch + 1, steps + 1
        else:
            assert run.mean_loss() is None
    return seen, lengths


@settings(deadline=None, max_examples=25)
@given(
    st.lists(st.integers(0, 5), min_size=1, max_size=8).filter(any),
    st.sampled_from([{"schedule": 3}, {"schedule": {0: 1, 1: 3, 2: 2}, "unit": "step"}, {"target": 6}]),
    st.booleans(),
)
def test_every_window_has_the_gradient_of_one_big_batch(sizes: list[int], plan: Any, shrink: bool) -> None:
    _walk(WindowPlan(**plan), sizes, shrink=shrink)


@pytest.mark.parametrize("shrink", [False, True])
@pytest.mark.parametrize("plan", [{"schedule": 3}, {"target": 6}])
def test_numbers_that_stay_on_a_device_give_the_same(plan: Any, shrink: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = [1, 3, 2, 0, 4, 5, 0, 0, 2]
    expected, lengths = _walk(WindowPlan(**plan), sizes, shrink=shrink)
    monkeypatch.setattr(accumulation_window, "_is_free_to_read", lambda tensor: False)
    found, same = _walk(WindowPlan(**plan), sizes, counted=torch.tensor, shrink=shrink)
    assert same == lengths
    for ours, other in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, other, rtol=1e-12, atol=1e-15)


def test_the_lengths_of_windows() -> None:
    assert _walk(WindowPlan({0: 1, 2: 3}, unit="step"), [2] * 9)[1] == [1, 1, 3, 3, 1]
    assert _walk(WindowPlan(target=5), [2, 2, 2, 5, 1, 1])[1] == [3, 1, 2]


class _TwoAlike(DataRanks):
    """Two ranks with the same data, whose backwards average at once."""

    def total(self, number: float | Tensor) -> float | Tensor:
        return torch.as_tensor(2 * number, dtype=torch.float64)


@pytest.mark.parametrize("counted", [int, torch.tensor])
def test_a_first_micro_batch_without_labels_is_no_reference_for_sharded_gradients(counted: Any) -> None:
    ranks = _TwoAlike(size=2, averages_at_once=True)
    run, model = AccumulationRun(WindowPlan(3), ranks), nn.Linear(1, 1, bias=False).double()
    x, references = torch.arange(1.0, 8.0, dtype=torch.float64).reshape(7, 1), []
    parts = list(x.split([0, 2, 1, 4]))
    for batch, part in enumerate(parts):
        if batch in (0, 3):
            model.zero_grad()
            run.begin(batch, 0)
            run.open(0)
        run.count(counted(len(part)), batch, 0)
        window = run.window
        assert window is not None
        weight = run.weight(model.parameters, is_last=batch in (2, 3))
        references.append(float(window.reference))
        (model(part).sum() / max(len(part), 1) * weight).backward()
        if batch == 2:
            assert model.weight.grad.item() == pytest.approx(2)  # type: ignore[union-attr]  # of 1, 2, 3
    assert model.weight.grad.item() == pytest.approx(5.5)  # type: ignore[union-attr]  # of 4, 5, 6, 7
    assert references == [0, 2, 2, 2]  # asked for until it is known, and then kept for all windows
