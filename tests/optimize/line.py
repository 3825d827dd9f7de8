"""A model of one weight, whose gradient is the mean of its batch, so that every step can be worked out by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset


class RecordingSGD(torch.optim.SGD):
    """SGD that keeps the gradient of its first parameter at each step."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.seen: list[float] = []

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        result = closure() if closure is not None else None
        gradient = self.param_groups[0]["params"][0].grad
        self.seen.append(float("nan") if gradient is None else gradient.item())
        super().step()
        return result


class Line(LightningModule):
    """``loss = mean(w * x)``, with ``w`` a double that starts at 1; the gradient is ``mean(x)``."""

    def __init__(self, lr: float = 0.01, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.lr = lr
        self.w = nn.Parameter(torch.ones((), dtype=dtype))
        self.losses: list[Tensor] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = (self.w * batch).mean()
        self.losses.append(loss.detach().clone())
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val", (self.w * batch).mean())

    def configure_optimizers(self) -> RecordingSGD:
        self.optimizer = RecordingSGD(self.parameters(), lr=self.lr)
        return self.optimizer


class Stream(IterableDataset[Tensor]):
    """Batches from a stream that does not know its length."""

    def __init__(self, batches: Sequence[Tensor | None]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Tensor | None]:
        return iter(self.batches)


def batches_of(*sizes: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Micro-batches of those sizes; the samples are 1, 2, 3, ..."""
    samples = torch.arange(1.0, sum(sizes) + 1, dtype=dtype)
    return list(samples.split(list(sizes)))


def loader(batches: Sequence[Tensor]) -> DataLoader[Tensor]:
    """A loader that gives exactly these batches and knows how many they are."""
    return DataLoader(list(batches), batch_size=None)  # type: ignore[arg-type]


def trainer(*callbacks: Callback, **options: Any) -> Trainer:
    quiet: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": 1,
        "max_epochs": 1,
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
    }
    return Trainer(callbacks=list(callbacks), **{**quiet, **options})


def steps(data: Any, *callbacks: Callback, model: Line | None = None, **options: Any) -> list[float]:
    """The gradient at each optimizer step of a fit over ``data`` (a loader, or batches)."""
    model = model or Line()
    trainer(*callbacks, **options).fit(model, loader(data) if isinstance(data, list) else data)
    return model.optimizer.seen
