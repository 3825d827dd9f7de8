"""The schedule ends with the last optimizer step, however many batches a step takes."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor

from lightning_speedkit.optimize.accumulate import AccumulationScheduler
from lightning_speedkit.optimize.optimizer_choice import ScheduleChoice
from lightning_speedkit.optimize.optimizers_for import optimizers_for, total_steps_of
from lightning_speedkit.optimize.schedule_free_switch import ScheduleFreeSwitch
from tests.optimize.line import Line, Stream, batches_of, loader, trainer


class _Scheduled(Line):
    """Line with an optimizer and a schedule by name; keeps the rate of each step."""

    def __init__(self, schedule: str | None = "linear", optimizer: str = "adamw", **settings: Any) -> None:
        super().__init__()
        self.chosen, self.settings = (optimizer, schedule), settings
        self.rates: list[float] = []

    def configure_optimizers(self) -> Any:
        configured = optimizers_for(self, *self.chosen, lr=1.0, schedule_settings=self.settings, monitor="val")
        step = configured["optimizer"].register_step_pre_hook
        step(lambda optimizer, *_: self.rates.append(optimizer.param_groups[0]["lr"]))
        return configured


def _rates(model: _Scheduled, *callbacks: Callback, batches: int = 10, **arguments: Any) -> list[float]:
    trainer(*callbacks, **arguments).fit(model, loader(batches_of(*[1] * batches)))
    return model.rates


@pytest.mark.parametrize("frequency", [1, 2, 3])
def test_with_accumulation_the_rate_changes_every_so_many_optimizer_steps(frequency: int) -> None:
    """10 batches by 4: windows of 4, 4 and 2, so 3 steps an epoch and 6 in all."""
    model = _Scheduled(warmup=0, frequency=frequency)
    rates = _rates(model, AccumulationScheduler(4), max_epochs=2)
    assert rates == pytest.approx([1 - (step - step % frequency + 1) / 7 for step in range(6)])


@pytest.mark.parametrize(
    ("arguments", "steps"),
    [
        ({"max_epochs": 2}, 20),
        ({"max_epochs": 2, "accumulate_grad_batches": 3}, 8),
        ({"max_epochs": 2, "max_steps": 7}, 7),
        ({"max_epochs": -1, "max_steps": 5}, 5),
        ({"max_epochs": 3, "limit_train_batches": 4}, 12),
        ({"fast_dev_run": True}, 1),
    ],
)
def test_the_length_is_the_number_of_steps_that_are_taken(arguments: dict[str, Any], steps: int) -> None:
    arguments = {"limit_val_batches": 0, **arguments}
    rates = _rates(_Scheduled(warmup=0), **arguments)
    assert rates == pytest.approx([1 - (step + 1) / (steps + 1) for step in range(steps)])


def test_a_schedule_of_factors_is_counted_too() -> None:
    rates = _rates(_Scheduled(warmup=0), AccumulationScheduler({0: 1, 1: 4}), batches=6, max_epochs=3)
    assert rates == pytest.approx([1 - (step + 1) / 11 for step in range(10)])  # 6, then 2 and 2


def test_a_stream_needs_a_length_or_an_endless_schedule() -> None:
    stream = Stream(batches_of(1, 1, 1))
    with pytest.raises(MisconfigurationException, match=r"no length, so max_epochs=1 .*\. Set Trainer\(max_steps"):
        trainer().fit(_Scheduled(), stream)
    with pytest.raises(MisconfigurationException, match=r"no end of the run \(max_epochs=-1, max_steps=-1\)"):
        _rates(_Scheduled(), max_epochs=-1)
    with pytest.raises(MisconfigurationException, match=r"this fit takes 0: there are no training batches"):
        _rates(_Scheduled(), limit_train_batches=0)
    with pytest.raises(MisconfigurationException, match=r"this fit takes 0: there are no training batches"):
        _rates(_Scheduled(), batches=0)
    for model in (_Scheduled("inverse-sqrt", warmup=2), _Scheduled("linear", warmup=0, total_steps=3)):
        trainer().fit(model, stream)
        assert len(model.rates) == 3
    assert model.rates == pytest.approx([0.75, 0.5, 0.25])
    with pytest.raises(MisconfigurationException, match="Line is in no Trainer"):
        total_steps_of(Line())


def test_a_rise_that_is_longer_than_the_fit_goes_on_as_in_a_long_one_and_a_warning_says_so() -> None:
    model = _Scheduled("warmup-cosine", warmup=8)
    with pytest.warns(UserWarning, match="rises over warmup=8 optimizer steps, and this fit takes 3: it never"):
        rates = _rates(model, batches=3)
    assert rates == pytest.approx([1 / 8, 2 / 8, 3 / 8])
    for arguments in ({"fast_dev_run": True}, {"max_steps": 0}):
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message=".*it never reaches")
            _rates(_Scheduled(warmup=8), **arguments)


def test_the_plateau_follows_its_metric() -> None:
    model = _Scheduled("reduce-on-plateau", options={"patience": 0, "factor": 0.5, "mode": "max"})
    data = loader(batches_of(1, 1))
    trainer(max_epochs=3).fit(model, data, data)  # the weight falls in each epoch, so the metric does
    assert model.rates == [1.0, 1.0, 1.0, 1.0, 0.5, 0.5]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"check_val_every_n_epoch": 2}, [1.0, 1.0, 1.0, 1.0, 0.5, 0.5, 0.25]),  # after epochs 2, 4 and 6
        ({"check_val_every_n_epoch": None, "val_check_interval": 2}, [1.0, 1.0, 1.0, 0.5, 0.25, 0.125, 0.0625]),
        ({"limit_val_batches": 0}, [1.0, 1.0, 0.5, 0.25, 0.125, 0.0625, 0.03125]),
    ],
)
def test_the_plateau_counts_validations_and_waits_for_the_first(
    arguments: dict[str, Any], expected: list[float]
) -> None:
    class Logged(_Scheduled):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            self.log("train", loss)
            return loss

        def configure_optimizers(self) -> Any:
            configured = super().configure_optimizers()
            if arguments == {"limit_val_batches": 0}:
                configured["lr_scheduler"]["monitor"] = "train"
            return configured

    model = Logged("reduce-on-plateau", options={"patience": 0, "factor": 0.5, "mode": "max", "threshold": 0.0})
    data = loader(batches_of(1))
    trainer(max_epochs=7, **arguments).fit(model, data, data)  # the weight falls, and the metrics do
    assert model.rates == expected


@pytest.mark.parametrize(
    ("precision", "clip", "fused"),
    [("32-true", 1.0, True), ("bf16-mixed", None, True), ("bf16-mixed", 1.0, False)],
)
def test_fused_is_left_out_where_lightning_would_refuse_to_clip(
    precision: Any, clip: float | None, fused: bool
) -> None:
    model = _Scheduled(None)
    fit = trainer(precision=precision, gradient_clip_val=clip)
    fit.fit(model, loader(batches_of(1, 1)))
    assert fit.optimizers[0].param_groups[0]["fused"] is fused


def test_fused_is_left_out_with_a_gradient_scaler() -> None:
    scaled = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))
    fit = trainer(plugins=[scaled])
    fit.fit(_Scheduled(None), loader(batches_of(1, 1)))
    assert fit.optimizers[0].param_groups[0]["fused"] is False


class _Manual(_Scheduled):
    automatic_optimization = False

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        raise AssertionError


def test_wrong_combinations_name_the_way_out() -> None:
    with pytest.raises(MisconfigurationException, match=r"Add ScheduleFreeSwitch\(\) to the callbacks"):
        _rates(_Scheduled(None, "schedule-free"))
    with pytest.raises(MisconfigurationException, match="Two schedules at once: 'linear', and 'schedule-free'"):
        _rates(_Scheduled("linear", "schedule-free"), ScheduleFreeSwitch())
    assert len(_rates(_Scheduled(None, "schedule-free"), ScheduleFreeSwitch())) == 10
    manual = _Manual()
    manual.automatic_optimization = False
    with pytest.raises(MisconfigurationException, match=r"steps no schedule. Build it by build_schedule"):
        _rates(manual)
    with pytest.raises(ValueError, match=r"no schedule 'liner'. Did you mean 'linear'"):
        _rates(_Scheduled("liner"))


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (
            {"optimizer_settings": {"betas": [0.9, 0.95]}},
            ValueError,
            r"no setting of the optimizer 'betas'. .*'options'",
        ),
        ({"optimizer_settings": {"layer_dcay": 0.5}}, ValueError, "Did you mean 'layer_decay'"),
        ({"optimizer_settings": "adamw"}, TypeError, "settings of the optimizer are a mapping, .*; got 'adamw'"),
        (
            {"schedule": "linear", "schedule_settings": {"patience": 3}},
            ValueError,
            "no setting of the schedule 'patience'",
        ),
        ({"schedule": "linear", "schedule_settings": ["warmup"]}, TypeError, "settings of the schedule are a mapping"),
        ({"module": torch.nn.Linear(1, 1)}, TypeError, "A LightningModule is asked for, .*; got Linear"),
        ({"lr": "1e-3"}, TypeError, "lr='1e-3' must be a number"),
    ],
)
def test_bad_settings_are_refused(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        optimizers_for(**{"module": Line(), "lr": 0.1, **arguments})


def test_outside_of_a_fit_the_length_has_to_be_given() -> None:
    with pytest.raises(MisconfigurationException, match=r"is in no Trainer .*schedule_settings={'total_steps'") as told:
        optimizers_for(Line(), schedule="linear", lr=0.1)
    assert "max_steps" not in str(told.value)  # there is no Trainer to set it in
    assert "lr_scheduler" in optimizers_for(Line(), schedule="linear", lr=0.1, schedule_settings={"total_steps": 3})


def test_windows_of_unknown_length_name_total_steps() -> None:
    windows = AccumulationScheduler(target_batch=2, count="builtins:len")
    with pytest.raises(MisconfigurationException, match=r"target_batch.* Or give total_steps to the schedule"):
        _rates(_Scheduled(), windows)


def test_the_default_length_of_a_trainer_is_warned_about_once() -> None:
    stop = {"max_epochs": 1000, "limit_train_batches": 1, "max_time": {"seconds": 0}}
    with pytest.warns(UserWarning, match="as long as max_epochs=1000, 1000 optimizer steps") as told:
        _rates(_Scheduled(), **stop)
    assert sum("max_epochs=1000" in str(one.message) for one in told) == 1


def test_a_plateau_without_its_metric_names_the_argument() -> None:
    with pytest.raises(MisconfigurationException, match=r"metric loss which .*ScheduleChoice\(.*, monitor=...\)"):
        trainer(ScheduleChoice("reduce-on-plateau", monitor="loss")).fit(Line(), loader(batches_of(1)))
