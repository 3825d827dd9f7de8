"""What surrounds the trials: what refuses them, what is off meanwhile, and that all of it is back after an error."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy, SingleDeviceStrategy
from torch import nn

from lightning_speedkit.memory.batch_size import BatchSizeSearch
from lightning_speedkit.memory.batch_size_run import refuse, trials
from tests.memory.scarce import Data, Net, new_trainer


class _Fails(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if len(batch[0]) == 8:
            raise ZeroDivisionError
        return super().training_step(batch, batch_idx)


def test_after_an_exception_all_is_as_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    net, data, search = _Fails(), Data(), BatchSizeSearch()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    run = new_trainer(search, logger=[CSVLogger("logs")])
    state, callbacks, loggers = torch.get_rng_state(), run.callbacks, run.loggers  # type: ignore[attr-defined]
    with pytest.raises(ZeroDivisionError):
        run.fit(net, data)
    torch.testing.assert_close(net.state_dict(), before, rtol=0, atol=0)
    torch.testing.assert_close(torch.get_rng_state(), state, rtol=0, atol=0)
    assert (net.losses, net.sizes, data.hparams["batch_size"]) == ([], set(), 4)
    assert (run.callbacks, run.loggers) == (callbacks, loggers)  # type: ignore[attr-defined]
    assert not {"log", "log_dict"} & vars(net).keys()
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


class _TakesTheLoader(BoringModel):
    def training_step(self, dataloader_iter: Any) -> Any:  # type: ignore[override]
        return None


class AutoMicroBatch(Callback):
    """Of this name."""


def _of(strategy: Any, ranks: int = 1, *callbacks: Any) -> Any:
    return SimpleNamespace(strategy=strategy, world_size=ranks, callbacks=[*callbacks])


@pytest.mark.parametrize(
    ("trainer", "module", "message"),
    [
        (_of(SingleDeviceStrategy()), _TakesTheLoader(), r"_TakesTheLoader\.training_step takes the dataloader_iter"),
        (_of(SingleDeviceStrategy(), 1, AutoMicroBatch()), BoringModel(), "beside AutoMicroBatch would find"),
        (_of(FSDPStrategy()), BoringModel(), "does not work with FSDPStrategy: it supports one device and DDP"),
        (_of(DDPStrategy(), 2), nn.Sequential(nn.SyncBatchNorm(2)), "does not work with SyncBatchNorm"),
    ],
)
def test_what_cannot_be_tried_is_refused(trainer: Any, module: Any, message: str) -> None:
    if not isinstance(module, LightningModule):
        module.training_step = lambda batch, batch_idx: None
    with pytest.raises(MisconfigurationException, match=message):
        refuse(trainer, module)


def test_what_can_be_tried_is_not_refused() -> None:
    module: Any = BoringModel()
    module.norm = nn.SyncBatchNorm(2)
    refuse(_of(SingleDeviceStrategy()), module)  # alone there is nobody to wait for
    del module.norm
    refuse(_of(DDPStrategy(), 2), module)


class _Tries(Callback):
    """Changes everything inside the trials."""

    def __init__(self) -> None:
        self.inside: dict[str, Any] = {}

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        before = torch.get_rng_state()
        with trials(trainer, pl_module) as (_, ranks), torch.no_grad():
            self.inside = {
                "callbacks": trainer.callbacks,
                "loggers": list(trainer.loggers),
                "log": pl_module.log("a", 1),
            }
            self.inside["alone"] = ranks.largest([3.0])
            self.inside["model"] = trainer.strategy.model
            pl_module.head.weight.zero_()
            pl_module.losses.append(1.0)
            trainer.optimizers[0].param_groups[0]["lr"] = 7.0
            torch.rand(5)
            pl_module.eval()
        self.inside["random as before"] = torch.equal(torch.get_rng_state(), before)


def test_inside_callbacks_and_loggers_are_off_and_after_it_all_is_as_found(tmp_path: Path) -> None:
    net, tries = Net(), _Tries()
    weight = net.head.weight.clone()
    run = new_trainer(tries, logger=[CSVLogger(tmp_path)], max_epochs=1, max_steps=0)
    callbacks, loggers = list(run.callbacks), list(run.loggers)  # type: ignore[attr-defined]
    run.fit(net, Data())
    assert (tries.inside["callbacks"], tries.inside["log"], tries.inside["alone"]) == ([], None, [3.0])
    assert [type(logger) for logger in tries.inside["loggers"]] == [DummyLogger]
    assert tries.inside["model"] is net
    assert (run.callbacks, run.loggers) == (callbacks, loggers)  # type: ignore[attr-defined]
    assert torch.equal(net.head.weight, weight)
    assert tries.inside["random as before"]
    assert (net.losses, net.training, run.optimizers[0].param_groups[0]["lr"]) == ([], True, 0.02)
    assert not {"log", "log_dict"} & vars(net).keys()
