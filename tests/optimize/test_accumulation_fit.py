"""What the callback changes in a Trainer during a fit, and that nothing of it is left."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.plugins import Precision
from torch import Tensor

from lightning_speedkit.measure.lightning_hooks import BATCH_HOOKS
from lightning_speedkit.measure.lightning_internals import is_accumulating
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
        self.passed_over = {name for name in BATCH_HOOKS if getattr(self.ours, name) is None}


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
    unused = {"on_train_batch_start", "on_before_zero_grad", "on_before_backward", "on_after_backward"}
    assert sees.passed_over == (unused if log_loss else {*unused, "on_train_batch_end"})
    assert all(callable(getattr(ours, name)) for name in sees.passed_over)
    assert "backward" not in vars(run.precision_plugin)
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

        def on_train_batch_start(self, *arguments: Any) -> None:
            super().on_train_batch_start(*arguments)
            Counts.calls += 100

        def on_before_zero_grad(self, *arguments: Any) -> None:
            super().on_before_zero_grad(*arguments)
            Counts.calls += 1000

    assert steps(batches_of(1, 3, 2, 4, 1, 2), Counts(4)) == pytest.approx([5.5, 12.0], rel=1e-14)
    assert Counts.calls == 2666


@pytest.mark.parametrize(
    ("arguments", "hooks"),
    [
        ({"schedule": 4}, []),
        ({"schedule": {0: 1, 1: 4}}, []),
        ({"schedule": 4, "unit": "step"}, []),
        ({"schedule": {0: 1, 1: 4}, "unit": "step"}, ["on_train_batch_start"]),
        ({"schedule": {1: 4}, "unit": "step"}, ["on_train_batch_start"]),
        ({"target_batch": 4}, ["on_train_batch_start"]),
        ({"schedule": 1}, ["on_train_batch_start", "on_before_zero_grad"]),
    ],
    ids=str,
)
def test_other_callbacks_see_the_factor_and_the_step_as_a_batch_starts(
    arguments: dict[str, Any], hooks: list[str]
) -> None:
    ours = AccumulationScheduler(**arguments)

    class Asks(Callback):
        factors: list[int]
        answers: list[bool]

        def on_train_epoch_start(self, *_: Any) -> None:
            self.factors, self.answers = [], []

        def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
            self.passed_over = {name for name in BATCH_HOOKS if getattr(ours, name) is None}
            self.factors.append(trainer.accumulate_grad_batches)
            self.answers.append(not is_accumulating(trainer))

        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            assert self.answers[-1] is not is_accumulating(trainer)
            assert "target_batch" in arguments or self.factors[-1] == trainer.accumulate_grad_batches

    asks = Asks()
    steps(ONE_TO_SIX, ours, asks, max_epochs=2)
    assert [name for name in BATCH_HOOKS[:2] if name not in asks.passed_over] == hooks
    assert asks.answers == ([True] * 6 if arguments == {"schedule": 1} else [False, False, False, True, False, True])


@pytest.mark.parametrize("kind", ["plain", "own backward", "patched", "plugin", "vector"])
def test_a_parameter_whose_gradient_is_the_root_of_the_backward_pass_is_not_shared(kind: str) -> None:
    # autograd takes the gradient that a backward pass starts from for that of the one weight, and adds to it
    class Sums(Line):
        def __init__(self) -> None:
            super().__init__()
            self.w = torch.nn.Parameter(torch.ones(1, dtype=torch.float64))

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            return self.w * 1 if kind == "vector" else self.w.sum()

    class Own(Sums):
        def backward(self, loss: Tensor) -> None:
            super().backward(loss)

    class Plugin(Precision):
        def backward(self, tensor: Tensor, model: Any, *rest: Any, **options: Any) -> None:
            super().backward(tensor, model, *rest, **options)

    model = Own() if kind == "own backward" else Sums()
    if kind == "patched":
        model.backward = lambda loss: loss.backward()  # type: ignore[method-assign]
    options = {"plugins": [Plugin()]} if kind == "plugin" else {}
    data = [torch.ones(size, dtype=torch.float64) for size in (2, 2, 2, 2, 1, 3)]
    assert steps(data, AccumulationScheduler(2), model=model, **options) == [1.0, 1.0, 1.0]


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
