"""One step of a schedule with a single stage, against the gradient of the whole batch."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from lightning_speedkit.parallel.pipeline_layers import PipelinedLayers, Stage
from lightning_speedkit.parallel.pipeline_run import ScheduledStep


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    """A process group of this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _chain() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))


class Net(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net: nn.Module = _chain()
        self.told: dict[str, float] = {}

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
        self.log("loss", loss)
        self.log("rows", float(len(batch[0])), reduce_fx="sum")
        return loss

    def log(self, name: str, value: Any, batch_size: int | None = None, reduce_fx: Any = "mean") -> None:  # type: ignore[override]
        self.told[name] = float(value)


def _step(net: Net, batch: Any, microbatches: int = 3) -> tuple[Tensor, dict[str, Tensor]]:
    whole = net.net
    names = [name for name, _ in whole.named_children()]
    stage = Stage(list(whole.children()), contextlib.nullcontext)
    layers = PipelinedLayers(whole, names, {0: stage}, 1, dist.group.WORLD)
    net.net = layers
    step = ScheduledStep(net, layers, {0: stage}, 1, "1f1b", microbatches, dist.group.WORLD)
    found: dict[str, Tensor] = {}
    numbers = {parameter: name for name, parameter in layers.named_parameters()}

    def deliver(gradients: Mapping[nn.Parameter, Tensor], scale: Tensor) -> None:
        found.update({numbers[p]: gradient * scale for p, gradient in gradients.items()})

    loss = step.run(batch, (0,), contextlib.nullcontext, deliver)
    (loss / 2).backward()  # type: ignore[no-untyped-call]
    return loss.detach(), found


@pytest.mark.parametrize("samples", [2, 6, 7])
def test_loss_gradients_and_logged_values_are_those_of_the_whole_batch(samples: int) -> None:
    x = torch.randn(samples, 3, generator=torch.Generator().manual_seed(4))
    batch, plain, net = (x, x.sum(1, keepdim=True)), _chain(), Net()
    expected = nn.functional.mse_loss(plain(batch[0]), batch[1])
    (expected / 2).backward()  # type: ignore[no-untyped-call]
    loss, gradients = _step(net, batch)
    torch.testing.assert_close(loss, expected.detach())
    torch.testing.assert_close(gradients, {name: p.grad for name, p in plain.named_parameters()})
    assert net.told["loss"] == pytest.approx(float(expected))
    assert net.told["rows"] == samples
    assert all(p.grad is None for p in net.parameters())


class Twice(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.net(batch[0]).mean() + self.net(batch[0]).mean()


class Never(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return batch[0].mean()


class Skips(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.net(batch[0])


class LogsText(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        out = self.net(batch[0])
        self.log("name", "text")
        return out.mean()


class Wide(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.net(batch[0].repeat(2, 1)).mean()


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Twice, "calls the pipelined layers 2 times"),
        (Never, "does not call the pipelined layers"),
        (Skips, "returned NoneType without a loss"),
        (LogsText, r"self.log\('name', ...\) in training_step got a str"),
        (Wide, "one row for each of the 2 samples"),
    ],
)
def test_a_step_that_a_schedule_would_run_wrongly_is_refused(kind: type[Net], message: str) -> None:
    with pytest.raises(MisconfigurationException, match=message):
        _step(kind(), (torch.ones(6, 3), torch.ones(6, 1)))
