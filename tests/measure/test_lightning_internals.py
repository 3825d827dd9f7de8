"""Each private attribute of Lightning still is what the kit takes it for. A failure here means: read the new Lightning,
then change ``lightning_internals.py``."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint, StochasticWeightAveraging
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric

from lightning_speedkit.measure.lightning_internals import (
    batch_on_device,
    change_train_dataloaders,
    epochs_done,
    follow_windows,
    forget_metric_attributes,
    forget_static_graph_flush,
    is_accumulating,
    logs_this_step,
    loss_divisor,
    read_optimizers,
    recount_batches,
    skips_backward,
    trial_batches,
    uncount_step,
)


class _Norm(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(1)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.norm(batch).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class _Watch(Callback):
    """What the readers say in each hook of a batch."""

    def __init__(self) -> None:
        self.accumulating: dict[str, list[bool]] = {"start": [], "backward": [], "end": []}
        self.skips: list[bool] = []
        self.steps: list[int] = []

    def on_train_batch_start(self, trainer: Any, *rest: Any) -> None:
        self.accumulating["start"].append(is_accumulating(trainer))

    def on_before_backward(self, trainer: Any, *rest: Any) -> None:
        self.accumulating["backward"].append(is_accumulating(trainer))

    def on_train_batch_end(self, trainer: Any, *rest: Any) -> None:
        self.accumulating["end"].append(is_accumulating(trainer))
        self.steps.append(trainer.global_step)
        self.skips.append(skips_backward(trainer))


def _fit(*callbacks: Callback, module: LightningModule | None = None, **options: Any) -> None:
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        callbacks=list(callbacks),
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        **options,
    )
    trainer.fit(module or _Norm(), DataLoader(torch.arange(10.0).reshape(5, 2, 1), batch_size=None))  # type: ignore[arg-type]


def test_is_accumulating_says_whether_a_step_follows() -> None:
    watch = _Watch()
    _fit(watch, max_epochs=2, accumulate_grad_batches=2)
    expected = [True, False, True, False, False] * 2  # 5 batches, and the last one of an epoch steps
    assert watch.accumulating == {"start": expected, "backward": expected, "end": expected}
    assert watch.steps == [0, 1, 1, 2, 3, 3, 4, 4, 5, 6]


def test_skips_backward_is_true_in_the_epoch_that_weight_averaging_adds() -> None:
    watch = _Watch()
    _fit(watch, StochasticWeightAveraging(0.1, swa_epoch_start=1), max_epochs=2)
    assert watch.skips == [False] * 10 + [True] * 5


def test_the_static_graph_flush_starts_as_not_done_and_is_forgotten() -> None:
    strategy = DDPStrategy(static_graph=True)
    assert strategy._pl_static_graph_delay_done is False
    strategy._pl_static_graph_delay_done = True
    forget_static_graph_flush(strategy)
    assert strategy._pl_static_graph_delay_done is False


def test_a_lightning_without_the_flush_is_told() -> None:
    strategy = DDPStrategy.__new__(DDPStrategy)
    with pytest.raises(AttributeError, match="no DDPStrategy"):
        forget_static_graph_flush(strategy)


class _LogsMetric(_Norm):
    def __init__(self) -> None:
        super().__init__()
        self.mean = MeanMetric()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.mean.update(batch)
        self.log("mean", self.mean, on_step=False, on_epoch=True)
        return super().training_step(batch, batch_idx)


class _Copies(Callback):
    """Copies the module while it knows its metrics."""

    def __init__(self) -> None:
        self.known: Any = None
        self.copy: LightningModule | None = None

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.known = dict(pl_module._metric_attributes)
        self.copy = copy.deepcopy(pl_module)


def test_metrics_are_known_by_their_ids_and_a_copy_forgets_them() -> None:
    module, copies = _LogsMetric(), _Copies()
    assert module._metric_attributes is None
    _fit(copies, max_epochs=1, module=module)
    assert copies.known == {id(module.mean): "mean"}
    twin = copies.copy
    assert twin is not None
    assert twin._metric_attributes == copies.known
    with pytest.raises(MisconfigurationException, match="Could not find the `LightningModule` attribute"):
        _fit(max_epochs=1, module=twin)
    forget_metric_attributes(twin)
    assert twin._metric_attributes is None
    _fit(max_epochs=1, module=twin)


def test_a_lightning_without_the_names_of_metrics_is_told() -> None:
    with pytest.raises(AttributeError, match=r"no LightningModule\._metric_attributes"):
        forget_metric_attributes(nn.Module())  # type: ignore[arg-type]


class _Changes(Callback):
    """Gives the run another loader, and keeps what it was asked about."""

    def __init__(self, other: Any) -> None:
        self.other = other
        self.asked: list[Any] = []
        self.undo: Any = None

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        def change(given: Any) -> Any:
            self.asked.append(given)
            return self.other(given)

        self.undo = change_train_dataloaders(trainer, change)


class _FromHook(_Norm):
    def train_dataloader(self) -> Any:
        return DataLoader(torch.arange(4.0).reshape(2, 2, 1), batch_size=None)  # type: ignore[arg-type]


def test_the_training_loaders_can_be_changed_each_time_they_are_asked_for() -> None:
    changes = _Changes(lambda given: DataLoader(torch.rand(3, 2, 1), batch_size=None))  # type: ignore[arg-type]
    steps = _Watch()
    _fit(changes, steps, max_epochs=2, module=_FromHook())
    (given,) = changes.asked
    assert isinstance(given, DataLoader)
    assert len(steps.steps) == 6
    reloaded = _Changes(lambda given: given)
    _fit(reloaded, max_epochs=3, module=_FromHook(), reload_dataloaders_every_n_epochs=1)
    assert len(reloaded.asked) == 3


def test_a_loader_that_was_made_there_can_be_made_anew_by_lightning() -> None:
    """Lightning records how a loader was made, and what was set on it, while it asks for the loaders."""

    class Own(DataLoader[Any]):
        mark = 0

    def change(given: DataLoader[Any]) -> Own:
        own = Own(given.dataset, batch_size=None, shuffle=True)
        own.mark = 7
        return own

    class Looks(Callback):
        loader: Any = None

        def on_train_start(self, trainer: Any, *rest: Any) -> None:
            Looks.loader = trainer.train_dataloader

    _fit(_Changes(change), Looks(), max_epochs=1, overfit_batches=2)  # makes it anew, without shuffling
    assert type(Looks.loader) is Own
    assert Looks.loader.mark == 7
    assert isinstance(Looks.loader.sampler, torch.utils.data.SequentialSampler)


def test_a_change_of_the_training_loaders_is_undone() -> None:
    trainer = Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    source = trainer.fit_loop._data_source
    source.instance = "given"  # type: ignore[assignment]
    first = change_train_dataloaders(trainer, lambda given: f"{given} first")
    second = change_train_dataloaders(trainer, lambda given: f"{given} second")
    assert source.dataloader() == "given first second"
    second()
    assert source.dataloader() == "given first"
    first()
    first()
    assert source.dataloader() == "given"
    assert "dataloader" not in vars(source)


def test_a_lightning_without_a_source_of_loaders_is_told() -> None:
    trainer = Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    trainer.fit_loop._data_source = object()  # type: ignore[assignment]
    with pytest.raises(AttributeError, match=r"no _DataLoaderSource\.dataloader"):
        change_train_dataloaders(trainer, lambda given: given)


class _Restored(LightningDataModule):
    """Asks when it is restored, and says that other batches were done if it is told to."""

    def __init__(self, batches: int | None = None) -> None:
        super().__init__()
        self.batches = batches
        self.done: int | None = None

    def train_dataloader(self) -> Any:
        return DataLoader(torch.randn(12, 1), batch_size=2)

    def state_dict(self) -> dict[str, Any]:
        return {"something": 1}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        assert self.trainer is not None
        self.done = epochs_done(self.trainer)
        if self.batches is not None:
            recount_batches(self.trainer, self.batches)


@pytest.mark.parametrize(("batches", "left"), [(None, 2), (4, 2), (1, 5), (5, 1)])
def test_a_restored_run_has_the_batches_left_that_were_told(tmp_path: Any, batches: int | None, left: int) -> None:
    """6 batches an epoch; the checkpoint is of the second epoch, after 4 of them."""
    save = ModelCheckpoint(tmp_path, filename="a", every_n_train_steps=10)
    quiet: dict[str, Any] = {"accelerator": "cpu", "devices": 1, "logger": False, "enable_progress_bar": False}
    Trainer(max_steps=10, callbacks=[save], **quiet).fit(_Norm(), datamodule=_Restored())
    watch, data = _Watch(), _Restored(batches)
    trainer = Trainer(max_epochs=2, callbacks=[watch], enable_checkpointing=False, **quiet)
    trainer.fit(_Norm(), datamodule=data, ckpt_path=tmp_path / "a.ckpt")
    assert data.done == 1
    assert len(watch.steps) == left


def test_optimizers_are_read_in_every_form_that_lightning_takes() -> None:
    one = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)
    line = torch.optim.lr_scheduler.ConstantLR(one)
    config = {"scheduler": line, "interval": "step"}
    forms: list[tuple[Any, tuple[list[Any], list[Any]]]] = [
        (None, ([], [])),
        (one, ([one], [])),
        ([one, one], ([one, one], [])),
        ({"optimizer": one}, ([one], [])),
        ({"optimizer": one, "lr_scheduler": config}, ([one], [config])),
        (([one], [line]), ([one], [line])),
        (({"optimizer": one, "lr_scheduler": config},), ([one], [config])),
    ]
    for configured, expected in forms:
        assert read_optimizers(configured) == expected


class _Rules:
    """Windows of the batches 0, 1 | 2 | 3, 4, 5, whatever ``accumulate_grad_batches`` says."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self.counts_steps = True
        self.held = True

    def hold(self) -> bool:
        return self.held

    def opens(self) -> bool:
        return self.trainer.fit_loop.batch_idx in (0, 2, 3)

    def closes(self) -> bool:
        return self.trainer.fit_loop.batch_idx in (1, 2, 5)

    def is_open(self) -> bool:
        return self.trainer.fit_loop.batch_idx in (0, 3, 4)

    def steps_in(self, batches: int, epochs: int) -> int:
        return batches * 100 + epochs


class _InWindows(Callback):
    """Follows the windows, and keeps what happens in them."""

    def __init__(self, stop_after: int | None = None) -> None:
        self.stop_after = stop_after
        self.cleared: list[int] = []
        self.stepped: list[int] = []
        self.losses: list[float] = []
        self.rates: list[float] = []
        self.estimated: Any = None
        self.undo: Any = None

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self.rules = _Rules(trainer)
        self.undo = follow_windows(trainer, self.rules)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.estimated = trainer.estimated_stepping_batches

    def on_before_zero_grad(self, trainer: Any, *rest: Any) -> None:
        self.cleared.append(trainer.fit_loop.batch_idx)

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self.stepped.append(trainer.fit_loop.batch_idx)
        self.rates.append(optimizer.param_groups[0]["lr"])

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(outputs["loss"].item())
        if batch_idx == self.stop_after:
            trainer.should_stop = True


class _Scheduled(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(()))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return (self.w * batch).mean()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
        rate = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.0 if step else 1e-30)
        return [optimizer], [{"scheduler": rate, "interval": "step", "frequency": 2}]


def _in_windows(watch: _InWindows, batches: int = 6, **options: Any) -> Trainer:
    quiet = {
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
    }
    trainer = Trainer(accelerator="cpu", callbacks=[watch], accumulate_grad_batches=4, **{**quiet, **options})
    data = torch.arange(1.0, 1.0 + batches).reshape(-1, 1)
    trainer.fit(_Scheduled(), DataLoader(data, batch_size=None))  # type: ignore[arg-type]
    return trainer


def test_lightning_follows_other_windows_than_its_own() -> None:
    watch = _InWindows()
    trainer = _in_windows(watch, max_epochs=2)
    assert watch.cleared == [0, 2, 3] * 2
    assert watch.stepped == [1, 2, 5] * 2
    assert watch.losses == [1, 2, 3, 4, 5, 6] * 2  # not divided by 4
    assert watch.rates == [1e-30, 1e-30, 0.0, 0.0, 0.0, 0.0]  # the frequency of 2 counts steps, over epochs
    assert (trainer.global_step, watch.estimated) == (6, 602)
    assert trainer.accumulate_grad_batches == 4


@pytest.mark.parametrize(("stop_after", "batches_done"), [(0, 2), (1, 2), (3, 6)])
def test_a_stop_waits_for_the_end_of_a_window(stop_after: int, batches_done: int) -> None:
    watch = _InWindows(stop_after)
    _in_windows(watch, max_epochs=2)
    assert len(watch.losses) == batches_done


def test_the_end_of_an_epoch_steps_and_limits_the_estimate() -> None:
    watch = _InWindows()
    trainer = _in_windows(watch, batches=5, max_epochs=1, max_steps=400)
    assert watch.stepped == [1, 2, 4]
    assert watch.estimated == 400
    endless = _InWindows()
    _in_windows(endless, max_epochs=-1, max_steps=3)
    assert endless.estimated == 3
    assert trainer.global_step == 3


def test_rules_that_do_not_hold_leave_lightning_to_itself() -> None:
    class Off(_InWindows):
        def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
            super().setup(trainer, pl_module, stage)
            self.rules.held = False

    watch = Off(stop_after=4)
    _in_windows(watch, max_epochs=2)
    assert (watch.cleared, watch.stepped) == ([0, 4], [3])
    assert watch.losses == [0.25, 0.5, 0.75, 1.0, 1.25]
    assert watch.estimated == 4


def test_lightning_stops_following() -> None:
    watch = _InWindows()
    trainer = Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, max_epochs=1)
    followed = [trainer, trainer.fit_loop.epoch_loop, trainer.fit_loop.epoch_loop.automatic_optimization]
    found = [type(thing) for thing in followed]
    watch.setup(trainer, None, "fit")
    assert [type(thing).__name__ for thing in followed] == [kind.__name__ for kind in found]
    assert all(isinstance(thing, kind) and type(thing) is not kind for thing, kind in zip(followed, found, strict=True))
    watch.undo()
    watch.undo()
    assert [type(thing) for thing in followed] == found


def test_a_lightning_without_what_windows_override_is_told() -> None:
    trainer = Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    trainer.fit_loop.epoch_loop = nn.Identity()  # type: ignore[assignment]
    trainer.fit_loop.epoch_loop.automatic_optimization = object()  # type: ignore[assignment]
    with pytest.raises(AttributeError, match=r"no Identity\.done"):
        follow_windows(trainer, _Rules(trainer))


class _Tries(Callback):
    """Goes through the training batches twice before training, as ``training_step`` would get them."""

    def __init__(self) -> None:
        self.batches: list[list[float]] = []
        self.loaders: list[bool] = []

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        with trial_batches(trainer) as batches:
            for _ in range(2):
                self.batches.append([batch_on_device(trainer, batch).sum().item() for batch in batches])
        self.loaders.append(trainer.train_dataloader is None)


class _Doubles(_Norm):
    def on_before_batch_transfer(self, batch: Tensor, dataloader_idx: int) -> Tensor:
        return batch * 2

    def on_after_batch_transfer(self, batch: Tensor, dataloader_idx: int) -> Tensor:
        return batch + 1


class _AsksForSteps(_Doubles):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        assert self.trainer.estimated_stepping_batches == 3
        return super().configure_optimizers()


@pytest.mark.parametrize("module", [_Doubles, _AsksForSteps])
def test_training_batches_can_be_tried_before_they_are_trained_on(module: type[_Norm]) -> None:
    tries, watch = _Tries(), _Watch()
    _fit(tries, watch, max_epochs=1, module=module(), limit_train_batches=3)
    assert tries.batches == [[4.0, 12.0, 20.0]] * 2  # 0 + 1, 2 + 3 and 4 + 5, twice, and 1 for each of two numbers
    assert tries.loaders == [module is _Doubles]
    assert watch.steps == [1, 2, 3]
    without = _Tries()
    _fit(without, max_epochs=1, module=module() if module is _Doubles else _Doubles(), limit_train_batches=0)
    assert without.batches == [[], []]


def test_what_is_logged_reaches_the_loggers_every_so_many_steps() -> None:
    class Asks(Callback):
        def __init__(self) -> None:
            self.told: list[bool] = []

        def on_train_batch_end(self, trainer: Any, *rest: Any) -> None:
            self.told.append(logs_this_step(trainer))

    asks, never = Asks(), Asks()
    _fit(asks, max_epochs=2, log_every_n_steps=3)
    assert asks.told == [place % 3 == 2 for place in range(10)]  # counted over the whole run
    _fit(never, max_epochs=1, log_every_n_steps=0)
    assert never.told == [False] * 5


def test_a_step_can_be_taken_off_the_counter() -> None:
    class Uncounts(Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx in (1, 4):
                uncount_step(trainer)

    watch = _Watch()
    _fit(Uncounts(), watch, max_epochs=2)
    assert watch.steps == [1, 1, 2, 3, 3, 4, 4, 5, 6, 6]


def test_what_a_loss_was_divided_by() -> None:
    class Asks(_InWindows):
        def __init__(self, follows: bool) -> None:
            super().__init__()
            self.follows, self.told = follows, []  # type: ignore[var-annotated]

        def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
            if self.follows:
                super().setup(trainer, pl_module, stage)

        def on_before_backward(self, trainer: Any, pl_module: Any, loss: Tensor) -> None:
            self.told.append(loss_divisor(trainer))

    for follows, factor in ((False, 4), (True, 1)):
        asks = Asks(follows)
        _in_windows(asks, max_epochs=1)
        assert asks.told == [factor] * 6
