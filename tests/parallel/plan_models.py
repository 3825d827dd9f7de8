"""Models, data and a plain loop for the tests of the model parallel plan."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

SAMPLES, BATCH = 56, 8  # 7 batches per epoch: with accumulation 3 the last window has one
EPOCHS = {1: 3, 3: 7}  # 21 steps each


class Block(nn.Module):
    def __init__(self, width: int = 6, hidden: int = 8) -> None:
        super().__init__()
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))  # type: ignore[no-any-return]


class Attention(nn.Module):
    def __init__(self, width: int = 8, heads: int = 4) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(width, width), nn.Linear(width, width)
        self.value, self.out = nn.Linear(width, width), nn.Linear(width, width)
        self.heads = heads

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = (
            layer(x).view(batch, length, self.heads, -1).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, -1))  # type: ignore[no-any-return]


class Net(LightningModule):
    """Blocks, a parameter of the module itself, and ``self(x)`` within the step."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.inlet = nn.Linear(3, 6)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.scale = nn.Parameter(torch.full((5,), 1.2))
        self.outlet = nn.Linear(6, 5)
        self.head = nn.Linear(5, 1)
        self.shift: Tensor
        self.register_buffer("shift", torch.full((5,), 0.1))
        self.rate, self.momentum = 0.02, 0.9

    def forward(self, x: Tensor) -> Tensor:
        x = self.inlet(x)
        for block in self.blocks:
            x = block(x)
        return self.head(torch.tanh(self.outlet(x)) * self.scale + self.shift)  # type: ignore[no-any-return]

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        loss = nn.functional.mse_loss(self(batch[0]), batch[1])
        self.log("loss", loss, sync_dist=True)
        return {"loss": loss}

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("checked", nn.functional.mse_loss(self(batch[0]), batch[1]), sync_dist=True)

    test_step = validation_step

    def predict_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        return self(batch[0])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.rate, momentum=self.momentum)


class Words(LightningModule):
    """A small language model: embedding, attention, multilayer perceptrons, torch's own encoder layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.embed = nn.Embedding(12, 8, padding_idx=0)
        self.attend = Attention()
        self.norm = nn.LayerNorm(8)
        self.block = Block(8, 12)
        self.encode = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.outlet = nn.Linear(8, 12)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        x = x + self.attend(self.norm(x))
        return self.outlet(self.encode(self.block(x)))  # type: ignore[no-any-return]

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return words_loss(self(batch[0]), batch[1])

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("checked", words_loss(self(batch[0]), batch[1]), sync_dist=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


def words_loss(found: Tensor, expected: Tensor) -> Tensor:
    return nn.functional.cross_entropy(found.flatten(0, 1), expected.flatten())


def words() -> tuple[Tensor, Tensor]:
    x = torch.randint(0, 11, (SAMPLES, 6), generator=torch.Generator().manual_seed(5))
    return x[:, :-1], x[:, 1:]


def words_loader(replica: int = 0, replicas: int = 1) -> DataLoader[Any]:
    x, y = words()
    return DataLoader(TensorDataset(x[replica::replicas], y[replica::replicas]), batch_size=BATCH // replicas)


def plain_words(model: Any = None, factor: int = 1, clip: float | None = None) -> list[Tensor]:
    model, (x, y) = model or Words(), words()
    optimizer = model.configure_optimizers()
    rows = [slice(start, start + BATCH) for start in range(0, SAMPLES, BATCH)]
    for _ in range(EPOCHS[factor]):
        for start in range(0, len(rows), factor):
            optimizer.zero_grad()
            for taken in rows[start : start + factor]:
                (words_loss(model(x[taken]), y[taken]) / factor).backward()  # type: ignore[no-untyped-call]
            if clip:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
    return weights_of(model)


def data() -> tuple[Tensor, Tensor]:
    x = torch.randn(SAMPLES, 3, generator=torch.Generator().manual_seed(2))
    return x, x.sum(1, keepdim=True)


def loader(replica: int = 0, replicas: int = 1) -> DataLoader[Any]:
    x, y = data()
    return DataLoader(TensorDataset(x[replica::replicas], y[replica::replicas]), batch_size=BATCH // replicas)


def trainer_of(strategy: Any, **options: Any) -> Trainer:
    quiet: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": 2,
        "max_epochs": 3,
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
        "use_distributed_sampler": False,
    }
    return Trainer(strategy=strategy, **{**quiet, **options})


def weights_of(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def plain(
    model: Any = None, factor: int = 1, epochs: int | None = None, clip: float | None = None, value: float | None = None
) -> list[Tensor]:
    """One process, whole batches; divides by the factor also in the short window, as Lightning does."""
    model, (x, y) = model or Net(), data()
    dtype = next(model.parameters()).dtype
    x, y = x.to(dtype), y.to(dtype)
    optimizer = model.configure_optimizers()
    rows = [slice(start, start + BATCH) for start in range(0, SAMPLES, BATCH)]
    for _ in range(epochs or EPOCHS[factor]):
        for start in range(0, len(rows), factor):
            optimizer.zero_grad()
            for taken in rows[start : start + factor]:
                (nn.functional.mse_loss(model(x[taken]), y[taken]) / factor).backward()  # type: ignore[no-untyped-call]
            if clip:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            if value:
                nn.utils.clip_grad_value_(model.parameters(), value)
            optimizer.step()
    return weights_of(model)


def close(found: list[Tensor], expected: list[Tensor], most: float = 1e-6) -> None:
    for a, b in zip(found, expected, strict=True):
        assert a.shape == b.shape
        assert float((a - b).norm() / b.norm()) <= most, (a, b)
