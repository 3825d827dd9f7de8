"""LeakMonitor in a Trainer: leaks planted here, and runs that only look like one."""

from __future__ import annotations

import gc
import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.loggers import Logger
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_speedkit.errors import SpeedkitError
from lightning_speedkit.memory.leak_monitor import LeakMonitor
from tests.conformance.models import classifier, loader, quiet_trainer

_Fault = Callable[["Net", Tensor, Tensor], None]


class Net(BoringModel):
    def __init__(self, fault: _Fault) -> None:
        super().__init__()
        self.fault, self.kept = fault, []
        self.steps = 0

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        output = self.layer(batch)
        loss = output.square().mean()
        self.fault(self, output, loss)
        self.steps += 1
        return loss

    def train_dataloader(self) -> Any:
        return DataLoader(torch.randn(4, 32).repeat(50, 1), batch_size=1)


def _fit(fault: _Fault, *callbacks: Callback, epochs: int = 1, **options: Any) -> Net:
    net = Net(fault)
    quiet_trainer(list(callbacks), max_epochs=epochs, limit_val_batches=0, **options).fit(net)
    return net


def _keep_loss(net: Net, output: Tensor, loss: Tensor) -> None:
    net.kept.append(loss)


def test_losses_that_keep_their_graphs_are_named_once_with_a_remedy() -> None:
    monitor = LeakMonitor()
    with pytest.warns(UserWarning, match=r"Net\.kept.*from MeanBackward0.*keep `loss\.detach\(\)`") as told:
        _fit(_keep_loss, monitor)
    assert sum("Memory leak" in str(one.message) for one in told) == 1
    (leak,) = monitor.leaks
    assert (leak.kind, leak.where, leak.owner, leak.per_step) == ("container", "host", "Net.kept", 1.0)
    assert leak.bytes_per_step > 512
    Trainer(barebones=True, accelerator="cpu", max_steps=3, callbacks=monitor).fit(Net(_keep_loss))
    assert monitor.leaks == []


def test_a_plain_run_and_one_that_gathers_for_an_epoch_are_none() -> None:
    def gather(net: Net, output: Tensor, loss: Tensor) -> None:
        net.kept = [*(net.kept if net.steps % 200 else []), output.detach()]

    monitor = LeakMonitor()
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        warnings.filterwarnings("ignore", message=".*does not have many workers.*")
        _fit(lambda net, output, loss: None, monitor)
        assert monitor.leaks == []
        _fit(gather, monitor, epochs=2, max_steps=210)
    assert monitor.leaks == []


def test_it_can_end_the_run_and_leaves_nothing_behind() -> None:
    monitor = LeakMonitor(raise_on_leak=True)

    def grow(net: Net, output: Tensor, loss: Tensor) -> None:
        net.kept = [loss + (net.kept[0] if net.kept else 0)]

    with pytest.raises(SpeedkitError, match=r"Memory leak: Net\.kept.*operations in the graph"):
        _fit(grow, monitor)
    assert len(monitor.leaks) == 1
    assert gc.isenabled()


def test_training_is_the_same_to_the_bit_while_it_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    def losses(callbacks: list[Callback]) -> list[Tensor]:
        model = classifier()  # which keeps its losses
        trainer = quiet_trainer(callbacks, max_epochs=40)
        torch.manual_seed(3)
        trainer.fit(model, loader())
        return model.losses

    monitor = LeakMonitor(warmup_steps=0)
    torch.testing.assert_close(losses([monitor]), losses([]), rtol=0, atol=0)
    assert [leak.owner for leak in monitor.leaks] == ["Classifier.losses"]


class _Recorder(Logger):
    name, version = "recorder", 0

    def __init__(self) -> None:
        super().__init__()
        self.metrics: list[dict[str, float]] = []

    def log_hyperparams(self, *arguments: Any, **options: Any) -> None:
        pass

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.metrics.append(metrics)


def test_slopes_are_logged() -> None:
    logger = _Recorder()
    net = Net(lambda net, output, loss: None)
    quiet_trainer([LeakMonitor()], max_steps=120, limit_val_batches=0, logger=logger).fit(net)
    told = [one for one in logger.metrics if "leak_monitor/host_bytes_per_step" in one]
    assert len(told) == 2
    assert all(set(one) == {"leak_monitor/host_bytes_per_step", "leak_monitor/device_bytes_per_step"} for one in told)


def test_a_logger_that_fails_is_told_of_once_per_run_and_the_run_goes_on() -> None:
    class Fails(_Recorder):
        def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
            raise OSError("no space")

    monitor, good = LeakMonitor(), _Recorder()
    for _ in range(2):
        net = Net(lambda net, output, loss: None)
        with pytest.warns(UserWarning, match="LeakMonitor could not log to Fails: OSError") as told:
            quiet_trainer([monitor], max_steps=120, limit_val_batches=0, logger=[Fails(), good]).fit(net)
        assert sum("could not log" in str(one.message) for one in told) == 1
        assert net.steps == 120
    assert len(good.metrics) == 4  # the others are still told


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"warmup_steps": -1}, ValueError, "warmup_steps=-1 must be 0 or more"),
        ({"warmup_steps": 1.5}, TypeError, "whole number of batches"),
        ({"min_bytes_per_step": "1 MB"}, TypeError, "number of bytes"),
        ({"min_bytes_per_step": math.nan}, ValueError, "0 or more"),
        ({"raise_on_leak": "no"}, TypeError, "True or False"),
        ({"trace_allocations": 1}, TypeError, "True or False"),
    ],
)
def test_arguments_are_checked(arguments: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        LeakMonitor(**arguments)
