"""Another optimizer and schedule for a module that stays as it is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import LearningRateMonitor
from lightning.pytorch.plugins import MixedPrecision
from torch import nn

from lightning_speedkit.optimize.optimizer_choice import OptimizerChoice, ScheduleChoice
from lightning_speedkit.optimize.schedule_free import ScheduleFreeAdamW
from tests.conformance.models import Classifier, classifier, loader, quiet_trainer


class _Own(Classifier):
    """Returns what it is told, and keeps the rates of each step."""

    def __init__(self, configured: Any) -> None:
        torch.manual_seed(1)
        super().__init__()
        self.configured = configured
        self.rates: list[float] = []

    def configure_optimizers(self) -> Any:
        return self.configured(self)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.rates.append(round(optimizer.param_groups[-1]["lr"], 9))


def _adamw(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=0.01)


def _sgd(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.5)


def _with_step_lr(module: nn.Module) -> Any:
    optimizer = _adamw(module)
    return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]


def _fit(model: Classifier, *callbacks: Callback, **arguments: Any) -> Any:
    trainer = quiet_trainer(list(callbacks), **{"max_epochs": 1, **arguments})
    torch.manual_seed(3)
    trainer.fit(model, loader())
    return trainer


def test_the_run_is_that_of_a_module_that_was_edited() -> None:
    def edited(module: nn.Module) -> Any:
        weights = [p for p in module.parameters() if p.ndim == 2]
        others = [p for p in module.parameters() if p.ndim < 2]
        groups = [{"params": weights, "weight_decay": 0.2}, {"params": others, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, lr=0.03, fused=True)
        line = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda k: 1 - (k + 1) / 7)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": line, "interval": "step"}}

    expected, model = _Own(edited), _Own(_sgd)
    _fit(expected)
    choice = OptimizerChoice("adamw", lr=0.03, weight_decay=0.2)
    _fit(model, ScheduleChoice("linear", warmup=0), choice)  # in either order
    torch.testing.assert_close(model.losses, expected.losses, rtol=1e-6, atol=1e-7)
    assert model.rates == expected.rates
    assert len(set(model.rates)) == 6


def test_the_same_optimizer_as_the_modules_own_is_bit_identical_and_the_module_is_left_as_it_was() -> None:
    plain, model = _Own(_adamw), _Own(_adamw)
    _fit(plain)
    choice = OptimizerChoice("adamw", decay_all=True, options={"fused": False})
    _fit(model, choice, ScheduleChoice("constant"))
    torch.testing.assert_close(model.losses, plain.losses, rtol=0, atol=0)
    torch.testing.assert_close(model.state_dict(), plain.state_dict(), rtol=0, atol=0)
    assert "configure_optimizers" not in vars(model)


def test_a_method_that_was_put_on_the_module_is_put_back_also_after_an_exception() -> None:
    class Stops(Callback):
        def on_train_batch_end(self, *_: Any) -> None:
            raise ZeroDivisionError

    for callback in (OptimizerChoice("adam"), ScheduleChoice("linear")):
        model = classifier()
        mine = lambda model=model: torch.optim.Adam(model.parameters(), lr=0.01)  # noqa: E731
        model.configure_optimizers = mine  # type: ignore[method-assign]
        with pytest.raises(ZeroDivisionError):
            _fit(model, callback, Stops())
        assert vars(model)["configure_optimizers"] is mine


def test_schedule_free_needs_no_second_callback_and_names_show_in_the_monitor(tmp_path: Any) -> None:
    from lightning.pytorch.loggers import CSVLogger

    model = _Own(_adamw)
    monitor = LearningRateMonitor()
    trainer = _fit(model, OptimizerChoice("schedule-free"), monitor, logger=CSVLogger(tmp_path), log_every_n_steps=1)
    assert isinstance(trainer.optimizers[0], ScheduleFreeAdamW)
    assert not trainer.optimizers[0].is_training
    assert set(monitor.lrs) == {"lr-ScheduleFreeAdamW/decay", "lr-ScheduleFreeAdamW/no_decay"}


def test_a_schedule_alone_keeps_the_optimizer_and_replaces_another_only_if_told() -> None:
    model = _Own(_with_step_lr)
    with pytest.raises(MisconfigurationException, match="Two schedules at once: _Own has one of its own, StepLR"):
        _fit(model, ScheduleChoice("linear"))
    with pytest.raises(MisconfigurationException, match=r"add ScheduleChoice\(..., replace=True\)"):
        _fit(model, OptimizerChoice("adam"))
    trainer = _fit(model, ScheduleChoice("linear", warmup=3, final=0.5, replace=True))
    assert type(trainer.optimizers[0]) is torch.optim.AdamW
    # 6 steps, 3 of them warming up: from 1 at the third to a half at the seventh
    assert model.rates == pytest.approx([0.01 * s for s in (1 / 3, 2 / 3, 1, 0.875, 0.75, 0.625)])


def _rising(module: nn.Module) -> Any:
    optimizer = _adamw(module)
    rise = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: step / 100)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": rise, "interval": "step"}}


def _one_cycle(module: nn.Module) -> Any:
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.7)
    return [optimizer], [torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.4, total_steps=6)]


def test_the_peak_is_that_of_the_replaced_schedule_and_not_its_rate_at_the_first_step() -> None:
    model = _Own(_rising)
    with pytest.raises(MisconfigurationException, match="_Own has one of its own, LambdaLR"):
        _fit(model, OptimizerChoice("adamw"))
    _fit(model, OptimizerChoice("adamw"), ScheduleChoice("constant", replace=True))
    assert model.rates == [0.01] * 6
    plateau = ScheduleChoice("reduce-on-plateau", monitor="val_loss", replace=True)
    model = _Own(_rising)
    trainer = quiet_trainer([plateau], max_epochs=1)
    trainer.fit(model, loader(), loader())
    assert model.rates == [0.01] * 6
    model = _Own(_one_cycle)
    trainer = _fit(model, ScheduleChoice("constant", replace=True))
    assert model.rates == [0.4] * 6
    assert trainer.optimizers[0].param_groups[0]["momentum"] == 0.7


def test_wrong_combinations_name_the_way_out() -> None:
    scaled = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))
    lbfgs = _Own(lambda module: torch.optim.LBFGS(module.parameters()))
    with pytest.raises(MisconfigurationException, match=r"LBFGS does not work with precision '16-mixed': .* Use 'bf16"):
        _fit(lbfgs, ScheduleChoice("linear"), plugins=[scaled])
    cases = [
        (_adamw, [OptimizerChoice(), OptimizerChoice("adam")], "Two optimizers at once: there are 2 OptimizerChoice"),
        (_adamw, [ScheduleChoice(), ScheduleChoice("linear")], "Two schedules at once: there are 2 ScheduleChoice"),
        (_sgd, [OptimizerChoice("adamw")], r"SGD is none for 'adamw'. Pass lr: OptimizerChoice\('adamw', lr="),
        (lambda _: None, [OptimizerChoice("adamw", lr=0.1)], "returns 0 optimizers"),
        (_adamw, [OptimizerChoice("schedule-free"), ScheduleChoice("linear")], "Two schedules at once"),
        (
            lambda _: torch.optim.Adam([nn.Parameter(torch.ones(1))], lr=0.1),
            [OptimizerChoice("adamw")],
            "trains 1 tensors that are no parameters of _Own",
        ),
    ]
    for own, callbacks, message in cases:
        with pytest.raises(MisconfigurationException, match=message):
            quiet_trainer(callbacks, max_epochs=1).fit(_Own(own), loader())


@pytest.mark.parametrize(
    ("made", "error", "message"),
    [
        (lambda: OptimizerChoice("adamww"), ValueError, r"no optimizer 'adamww'. Did you mean 'adamw'"),
        (lambda: OptimizerChoice(lr="1e-3"), TypeError, "lr='1e-3' must be a number"),
        (lambda: OptimizerChoice(weight_decay=-1.0), ValueError, "weight_decay=-1.0 must be 0 or more"),
        (lambda: OptimizerChoice(layers=["a"]), ValueError, "no effect without a layer_decay"),
        (lambda: OptimizerChoice(options={"momentum": 0.9}), ValueError, "no option of adamw 'momentum'"),
        (lambda: ScheduleChoice("cosine"), ValueError, r"no schedule 'cosine'. Did you mean 'warmup-cosine'"),
        (lambda: ScheduleChoice(["linear"]), TypeError, "name of the schedule is text"),
        (lambda: ScheduleChoice(replace="no"), TypeError, "replace='no' must be true or false; got str"),
        (lambda: ScheduleChoice("linear", warmup="500"), TypeError, "warmup='500' must be a number"),
        (lambda: ScheduleChoice("linear", warmup=500, total_steps=100), ValueError, "the peak is never reached"),
        (lambda: ScheduleChoice("linear", options={"decay": 0.1}), ValueError, "no option of linear 'decay'"),
    ],
)
def test_what_is_wrong_by_itself_is_refused_before_there_is_a_trainer(
    made: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        made()


@pytest.mark.parametrize("kind", [OptimizerChoice, ScheduleChoice])
def test_one_object_in_a_run_inside_its_run_is_refused_and_the_outer_one_is_undone(kind: Any) -> None:
    callback, model = kind(), _Own(_adamw)
    own, chosen = model.configure_optimizers, []

    class Nests(Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            with pytest.raises(MisconfigurationException, match=f"This {kind.__name__} is in use by another Trainer"):
                _fit(_Own(_adamw), callback)
            chosen.append("configure_optimizers" in vars(model))

    _fit(model, callback, Nests())
    assert chosen == [True]
    assert model.configure_optimizers == own
    _fit(_Own(_adamw), callback)
