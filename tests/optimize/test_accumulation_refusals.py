"""What the callback does not do, it says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Callback, GradientAccumulationScheduler
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy, Strategy
from lightning.pytorch.strategies.xla import XLAStrategy
from torch import Tensor

from lightning_speedkit.optimize import AccumulationScheduler
from tests.optimize.line import Line, loader, steps, trainer


@pytest.mark.parametrize(
    ("schedule", "error", "message"),
    [
        ({}, ValueError, "sets no factor"),
        (0, ValueError, "factor 0 must be 1 or more"),
        (-2, ValueError, "factor -2 must be 1 or more"),
        ({0: 0}, ValueError, "factor 0 must be 1 or more"),
        ({4: 2, 0: 1}, ValueError, "starts must increase"),
        ({-1: 2}, ValueError, "start -1 must be 0 or more"),
        (2.0, TypeError, "factor 2.0 must be a whole number"),
        (True, TypeError, "factor True must be a whole number"),
        ("4", TypeError, "factor '4' must be a whole number"),
        (None, TypeError, "factor None must be a whole number"),
        ({"0": 4}, TypeError, "start '0' must be a whole number"),
        ({0: 4.5}, TypeError, "factor 4.5 must be a whole number"),
        ({False: 4}, TypeError, "start False must be a whole number"),
    ],
)
def test_a_schedule_that_makes_no_sense(schedule: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        AccumulationScheduler(schedule)


def test_unknown_units_and_counts() -> None:
    with pytest.raises(ValueError, match="unit='batch' is unknown; use 'epoch' or 'step'"):
        AccumulationScheduler(4, unit="batch")
    with pytest.raises(ValueError, match=r"count='tokens' is unknown\. Did you mean 'labels'"):
        AccumulationScheduler(4, count="tokens")


@pytest.mark.parametrize("argument", [{"labels": 1.5}, {"labels": True}, {"ignore_index": "x"}, {"log_loss": 5}])
def test_arguments_of_the_wrong_kind(argument: dict[str, Any]) -> None:
    ((name, value),) = argument.items()
    with pytest.raises(TypeError, match=f"{name}={value!r} must be"):
        AccumulationScheduler(4, **argument)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"schedule": 4, "target_batch": 8}, "target_batch=8 and schedule=4 both say how long a window is"),
        ({"target_batch": 8, "count": "batches"}, "target_batch=8 and count='batches' both say"),
        ({"target_batch": 0}, "target_batch=0: the factor 0 must be 1 or more"),
        ({"target_batch": {3: 4, 1: 2}}, "target_batch=.* must increase"),
    ],
)
def test_targets_that_make_no_sense(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AccumulationScheduler(**arguments)


class _Manual(Line):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class _Newton(Line):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters())


class _OwnIterator(Line):
    def training_step(self, dataloader_iter: Any) -> Tensor:  # type: ignore[override]
        return super().training_step(next(dataloader_iter)[0], 0)


@pytest.mark.parametrize(
    ("callbacks", "model", "options", "message"),
    [
        ([], _Manual(), {}, "automatic_optimization = False"),
        ([], _Newton(), {}, "LBFGS"),
        ([], _OwnIterator(), {}, "dataloader_iter"),
        ([], Line(), {"accumulate_grad_batches": 2}, r"accumulate_grad_batches=2\) and AccumulationScheduler"),
        ([AccumulationScheduler(2)], Line(), {}, "AccumulationScheduler and AccumulationScheduler set the same"),
        ([GradientAccumulationScheduler({0: 2})], Line(), {}, "GradientAccumulationScheduler set the same"),
    ],
    ids=["manual", "lbfgs", "dataloader_iter", "trainer", "twice", "lightning's"],
)
def test_combinations_that_cannot_work(
    callbacks: list[Callback], model: Line, options: dict[str, Any], message: str
) -> None:
    run = trainer(AccumulationScheduler(4), *callbacks, **options)
    with pytest.raises(MisconfigurationException, match=message):
        run.fit(model, loader([torch.ones(1)]))
    assert run.accumulate_grad_batches == options.get("accumulate_grad_batches", 1)


class _Ascent(torch.optim.SGD):
    """Evaluates its closure twice: there, and where the first gradient leads (SAM)."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        assert closure is not None
        weight = self.param_groups[0]["params"][0]
        with torch.enable_grad():
            closure()
        there = weight.grad.clone()
        with torch.no_grad():
            weight += there
        with torch.enable_grad():
            loss = closure()
        with torch.no_grad():
            weight -= there
        super().step()
        return loss


class _Doubtful(torch.optim.SGD):
    """Evaluates once more only if the loss is above 1, as a line search does."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        assert closure is not None
        with torch.enable_grad():
            if closure() > 1:
                closure()
        return super().step()


class _Square(Line):
    """The gradient is ``2 * w * mean(x)``: it depends on where it is taken."""

    def __init__(self, kind: type[torch.optim.SGD]) -> None:
        super().__init__()
        self.kind = kind

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return (self.w.square() * batch).mean()

    def configure_optimizers(self) -> Any:
        return self.kind(self.parameters(), lr=0.01)


@pytest.mark.parametrize("schedule", [2, 4, {0: 1, 9: 2}], ids=str)
@pytest.mark.parametrize("kind", [_Ascent, _Doubtful])
def test_an_optimizer_that_evaluates_a_micro_batch_again(kind: type[torch.optim.SGD], schedule: Any) -> None:
    run = trainer(AccumulationScheduler(schedule))
    with pytest.raises(MisconfigurationException, match=f"{kind.__name__}, which evaluates .* or a schedule of 1"):
        run.fit(_Square(kind), loader([torch.full((1,), float(x)) for x in (1, 2, 3, 8, 9)]))
    assert run.accumulate_grad_batches == 1


def test_it_is_left_alone_without_accumulation() -> None:
    model, weight = _Square(_Ascent), 1.0
    trainer(AccumulationScheduler(1)).fit(model, loader([torch.full((1,), float(x)) for x in (1, 2, 3)]))
    for x in (1, 2, 3):
        there = weight + 2 * weight * x
        weight -= 0.01 * 2 * there * x
    assert model.w.item() == pytest.approx(weight, rel=1e-14)


class _Foreign(Strategy):
    """A strategy of somebody else."""


_Foreign.__abstractmethods__ = frozenset()  # type: ignore[attr-defined]


@pytest.mark.parametrize("kind", [DeepSpeedStrategy, FSDPStrategy, XLAStrategy, _Foreign])
def test_strategies_that_keep_gradients_to_themselves(kind: type[Strategy], monkeypatch: pytest.MonkeyPatch) -> None:
    run, model = trainer(AccumulationScheduler(4)), Line()
    # None of these starts on this machine, so the Trainer is told to have one.
    monkeypatch.setattr(Trainer, "strategy", property(lambda _: kind.__new__(kind)))
    with pytest.raises(MisconfigurationException, match=f"does not work with {kind.__name__}"):
        run.callbacks[0].setup(run, model, "fit")  # type: ignore[attr-defined]
    run.callbacks[0].setup(run, model, "validate")  # type: ignore[attr-defined]
    assert run.accumulate_grad_batches == 1


@pytest.mark.parametrize(
    ("batch", "found"), [((torch.ones(2), torch.ones(3)), "2 and 3"), ({"text": "only"}, "no tensor")]
)
def test_a_batch_whose_samples_cannot_be_told(batch: Any, found: str) -> None:
    class _AnyBatch(Line):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return self.w * 2.0

    with pytest.raises(ValueError, match=rf"{found}.*Override count_samples.*count='batches'"):
        steps([batch], AccumulationScheduler(4), model=_AnyBatch())
    assert steps([batch], AccumulationScheduler(4, count="batches"), model=_AnyBatch()) == [2.0]
    assert steps([batch], AccumulationScheduler(1), model=_AnyBatch()) == [2.0]  # nothing to weigh: nothing to know


def test_labels_that_are_not_in_the_batch_are_told() -> None:
    with pytest.raises(ValueError, match=r"a dict of the batch has no 'labels'; it has 'x', 'label'. Did you mean"):
        steps([{"x": torch.ones(2), "label": torch.ones(2)}], AccumulationScheduler(2, count="labels"))


def test_lbfgs_with_a_scaler_is_refused_without_accumulation_too() -> None:
    plugin = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))
    with pytest.raises(MisconfigurationException, match=r"LBFGS does not work with precision '16-mixed'.*Use 'bf16-"):
        steps([torch.ones(2)], AccumulationScheduler(1), model=_Newton(dtype=torch.float32), plugins=[plugin])
