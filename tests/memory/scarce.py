"""A run whose memory is scarce where a test says, for the tests of the search for a batch size."""

from __future__ import annotations

import gc
import math
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy
import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric

from lightning_speedkit.memory.batch_size import BatchSizeSearch


@contextmanager
def quick_collections() -> Iterator[None]:
    """A search collects garbage; what is there before it is left out, which takes some 0.2 s each time otherwise."""
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


class _NoRoom(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, most: float) -> Tensor:
        ctx.most = most
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        need(len(gradient), ctx.most)
        return gradient, None


def need(samples: float, most: float) -> None:
    if samples > most:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")


class Net(LightningModule):
    """Dropout, BatchNorm, a metric, a list, logging, two generators' numbers and a schedule; fits ``most`` samples."""

    def __init__(self, most: float = math.inf, where: str = "forward", lr: float = 0.02) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.body = nn.Sequential(nn.Linear(2, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2))
        self.head, self.mean, self.losses, self.sizes = nn.Linear(8, 1), MeanMetric(), [], set()
        self.most, self.where, self.lr, self.trained = most, where, lr, 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        self.trained = len(x)
        noise = random.random() + float(numpy.random.rand())
        self.sizes.add(len(x))
        hidden = _NoRoom.apply(self.body(x), self.most if self.where == "backward" else math.inf)  # type: ignore[no-untyped-call]
        loss = (self.head(hidden) - y).square().mean() + noise
        if self.where == "forward":
            need(len(x), self.most)
        self.mean.update(loss)
        self.log("loss", loss)
        self.log_dict({"mean": self.mean}, on_epoch=True, on_step=False)
        self.losses.append(loss.item())
        return {"loss": loss}

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        assert not self.training
        assert not torch.is_grad_enabled()
        if self.where == "validation":
            need(self.trained, self.most)
        self.log("val", (self.head(self.body(batch[0])) - batch[1]).square().mean(), sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = _Adam(self, self.parameters(), lr=self.lr)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]


class _Adam(torch.optim.AdamW):
    def __init__(self, net: Net, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.net = net

    def step(self, closure: Any = None) -> Any:
        result = super().step(closure)
        if self.net.where == "step":  # only where the state is there
            need(self.net.trained if self.state else 0, self.net.most)
        return result


class Steps(Net):
    """Lets Lightning make its loaders before the search."""

    def configure_optimizers(self) -> Any:
        assert self.trainer.estimated_stepping_batches > 0
        return super().configure_optimizers()


def dataset(samples: int = 60) -> TensorDataset:
    x = torch.randn(samples, 2, generator=torch.Generator().manual_seed(1))
    return TensorDataset(x, x.sum(1, keepdim=True) + 2.0)


def new_trainer(*callbacks: Callback, **options: Any) -> Trainer:
    quiet = {"accelerator": "cpu", "logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    quiet |= {"enable_model_summary": False, "num_sanity_val_steps": 0, "max_epochs": 2}
    return Trainer(callbacks=list(callbacks), **{**quiet, **options})


def fit(search: BatchSizeSearch | None, net: Net, given: Any = None, **options: Any) -> tuple[Any, Trainer]:
    loaders = (DataLoader(dataset(), batch_size=4, shuffle=True), DataLoader(dataset(20), batch_size=5))
    torch.manual_seed(9)
    random.seed(9)
    numpy.random.seed(9)
    run = new_trainer(*([search] if search else []), **options)
    with quick_collections():
        run.fit(net, *(loaders if given is None else (given,) if not isinstance(given, tuple) else given))
    state = {
        "weights": net.state_dict(),
        "losses": net.losses,
        "optimizer": run.optimizers[0].state_dict(),
        "schedule": run.lr_scheduler_configs[0].scheduler.state_dict(),
        "step": (run.global_step, run.current_epoch, run.callback_metrics),
        "random": (torch.get_rng_state(), random.getstate(), numpy.random.get_state()[1].tolist()),  # type: ignore[index, union-attr]
    }
    return state, run


def same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


class Data(LightningDataModule):
    def __init__(self, batch_size: int = 4, fail: bool = False) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.asked: list[int] = []

    def train_dataloader(self) -> Any:
        self.asked.append(self.hparams["batch_size"])
        return DataLoader(dataset(), batch_size=self.hparams["batch_size"], shuffle=True)

    def val_dataloader(self) -> Any:
        return DataLoader(dataset(20), batch_size=self.hparams["batch_size"])
