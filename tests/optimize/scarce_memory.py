"""A model that runs out of memory where and when it is told to, and the plain loop that it has to equal."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.optimize.line import trainer

MESSAGE = "CUDA out of memory. Tried to allocate 20.00 MiB."


class Token:
    """Lives as long as the graph that holds it."""


class NoRoom(torch.autograd.Function):
    """Passes its input on, and finds no memory for the gradient of more than so many samples."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, most: float, token: Token) -> Tensor:
        ctx.most, ctx.token = most, token
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        if len(gradient) > ctx.most:
            raise torch.OutOfMemoryError(MESSAGE)
        return gradient, None, None


class Scarce(LightningModule):
    """Two layers in double precision, whose loss is a mean over samples of three numbers.

    ``forward_most``, ``backward_most`` and ``validation_most`` are how many samples fit; a backward pass that fails
    has given the second layer its gradient, and the first one none.
    """

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.first, self.second = nn.Linear(3, 5, dtype=dtype), nn.Linear(5, 1, dtype=dtype)
        self.forward_most = self.backward_most = self.validation_most = float("inf")
        self.calls: list[int] = []  # samples of each forward pass in training
        self.graphs_alive: list[int] = []  # when each of them began
        self._tokens: list[weakref.ref[Token]] = []
        self.optimizer: Callable[[Any], Any] = lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9)

    def loss(self, x: Tensor) -> Tensor:
        self._tokens.append(weakref.ref(token := Token()))
        hidden = NoRoom.apply(torch.tanh(self.first(x)), self.backward_most, token)  # type: ignore[no-untyped-call]
        return self.second(hidden).square().sum() / max(len(x), 1)

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        self.graphs_alive.append(sum(token() is not None for token in self._tokens))
        self.calls.append(len(batch))
        loss = self.loss(batch)
        if len(batch) > self.forward_most:
            raise torch.OutOfMemoryError(MESSAGE)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        loss = self.loss(batch)
        self.log("val", loss, sync_dist=True)
        if len(batch) > self.validation_most:
            raise RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`")

    def configure_optimizers(self) -> Any:
        return self.optimizer(self.parameters())


def batches(*sizes: int, seed: int = 4, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    x = torch.randn(sum(sizes), 3, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return list(x.to(dtype).split(list(sizes)))


def loader(data: Sequence[Tensor]) -> DataLoader[Tensor]:
    return DataLoader(list(data), batch_size=None)  # type: ignore[arg-type]


def weights(model: nn.Module) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def plain(windows: Sequence[Sequence[Tensor]], epochs: int = 1, clip: float | None = None) -> list[Tensor]:
    """One step for each window, of the mean loss over all of its samples."""
    model = Scarce()
    optimizer = model.configure_optimizers()
    for _ in range(epochs):
        for window in windows:
            optimizer.zero_grad()
            model.loss(torch.cat(list(window))).backward()
            if clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
    return weights(model)


def fit(model: Scarce, data: list[Tensor], *callbacks: Callback, validate: bool = False, **options: Any) -> Scarce:
    torch.manual_seed(3)
    run = trainer(*callbacks, num_sanity_val_steps=0, **options)
    run.fit(model, loader(data), loader(batches(6, 4, dtype=model.first.weight.dtype)) if validate else None)
    model.metrics = {name: value.item() for name, value in run.callback_metrics.items()}  # type: ignore[assignment]
    return model
