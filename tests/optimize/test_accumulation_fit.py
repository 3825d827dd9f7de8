"""What the callback changes in a Trainer during a fit, and that nothing of it is left."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from lightning_speedkit.optimize import AccumulationScheduler
from tests.optimize.line import Line, batches_of, loader, steps, trainer

ONE_TO_SIX = batches_of(1, 1, 1, 1, 1, 1)


class _Sees(Callback):
    """Keeps what hooks see of each loss, and which hooks of ours are passed over."""

    def __init__(self, ours: AccumulationScheduler) -> None:
        self.ours = ours
        self.losses: list[float] = []
        self.passed_over: set[str] = set()

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Tensor) -> None:
        self.losses.append(loss.item())
        hooks = ("on_train_batch_start", "on_before_backward", "on_after_backward", "on_train_batch_end")
        self.passed_over = {name for name in hooks if getattr(self.ours, name) is None}


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("log_loss", [None, "loss"])
def test_the_trainer_and_the_callback_are_left_as_they_were(log_loss: str | None, fails: bool) -> None:
    class Fails(Line):
        def on_train_epoch_end(self) -> None:
            if fails:
                raise RuntimeError("on purpose")

    ours = AccumulationScheduler(4, log_loss=log_loss)
    sees = _Sees(ours)
    run, model = trainer(ours, sees), Fails(lr=0.0)
    if fails:
        with pytest.raises(RuntimeError, match="on purpose"):
            run.fit(model, loader(ONE_TO_SIX))
    else:
        run.fit(model, loader(ONE_TO_SIX))
    assert model.optimizer.seen == [2.5, 5.5]
    assert sees.losses == [1, 2, 3, 4, 5, 6]  # whole, whatever their weights
    unused = {"on_before_backward", "on_after_backward"}
    assert sees.passed_over == (unused if log_loss else {*unused, "on_train_batch_end"})
    assert all(callable(getattr(ours, name)) for name in sees.passed_over)
    assert "pre_backward" not in vars(run.precision_plugin)
    run.accumulate_grad_batches = 3
    run.validate(model, loader(ONE_TO_SIX), verbose=False)
    assert run.accumulate_grad_batches == 3  # later runs that are no fits leave the factor alone
    copy.deepcopy(ours)


def test_hooks_of_a_subclass_are_called() -> None:
    class Counts(AccumulationScheduler):
        calls = 0

        def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
            Counts.calls += 1

        def on_train_batch_end(self, *arguments: Any) -> None:
            super().on_train_batch_end(*arguments)
            Counts.calls += 10

    assert steps(ONE_TO_SIX, Counts(4)) == [2.5, 5.5]
    assert Counts.calls == 66


def test_a_module_with_a_backward_of_its_own() -> None:
    class Own(Line):
        def backward(self, loss: Tensor) -> None:
            super().backward(loss * 2)

    assert steps(batches_of(1, 3, 2, 4, 1, 2), AccumulationScheduler(4), model=Own()) == pytest.approx([11, 24])


def test_a_loss_that_is_a_parameter() -> None:
    class Itself(Line):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            return self.w

    found = steps([torch.ones(2, dtype=torch.float64)] * 3, AccumulationScheduler(3), model=Itself())
    assert found == pytest.approx([1.0], rel=1e-15)
