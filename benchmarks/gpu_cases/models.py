"""The models of the cases, in plain torch: a ResNet-50, a stack of transformer blocks, and a Trainer around either."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from benchmarks.gpu_cases.case_run import CaseRun

__all__ = ["Block", "Net", "ResNet", "Transformer", "fit", "images", "net_and_rows", "resnet", "tokens", "transformer"]


class Bottleneck(nn.Module):
    """1x1, 3x3, 1x1 convolutions with BatchNorm around a shortcut (He et al., 2016; the stride is in the 3x3)."""

    def __init__(self, wide: int, narrow: int, stride: int) -> None:
        super().__init__()
        out = 4 * narrow
        self.inside = nn.Sequential(
            *(nn.Conv2d(wide, narrow, 1, bias=False), nn.BatchNorm2d(narrow), nn.ReLU()),
            *(nn.Conv2d(narrow, narrow, 3, stride, 1, bias=False), nn.BatchNorm2d(narrow), nn.ReLU()),
            *(nn.Conv2d(narrow, out, 1, bias=False), nn.BatchNorm2d(out)),
        )
        same = stride == 1 and wide == out
        short = nn.Sequential(nn.Conv2d(wide, out, 1, stride, bias=False), nn.BatchNorm2d(out))
        self.shortcut: nn.Module = nn.Identity() if same else short

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.relu(self.inside(x) + self.shortcut(x))


class ResNet(nn.Module):
    """ResNet-50 with depths (3, 4, 6, 3) and width 64: 25.6 million weights for 1000 classes."""

    def __init__(self, depths: tuple[int, ...] = (3, 4, 6, 3), width: int = 64, classes: int = 1000) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width), nn.ReLU(), nn.MaxPool2d(3, 2, 1)
        )
        blocks, wide = [], width
        for stage, depth in enumerate(depths):
            narrow = width << stage
            for number in range(depth):
                blocks.append(Bottleneck(wide, narrow, 2 if stage and number == 0 else 1))
                wide = 4 * narrow
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(wide, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(x)).mean((2, 3)))


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.before(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.dropout(self.out(mixed.transpose(1, 2).reshape(batch, length, width)))
        return x + self.dropout(self.down(nn.functional.gelu(self.up(self.between(x)))))


class Transformer(nn.Module):
    """A language model without an embedding: rows of ``width`` numbers in, as many out."""

    def __init__(self, width: int = 1024, layers: int = 12, heads: int = 16, dropout: float = 0.0) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(width, heads, dropout) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def resnet(run: CaseRun) -> ResNet:
    """A ResNet-50 on the device; a small one in tiny mode. Seeded."""
    torch.manual_seed(0)
    return ResNet(*run.pick(((1, 1), 8, 10), ((3, 4, 6, 3), 64, 1000))).to(run.device)


def images(run: CaseRun, count: int = 64) -> tuple[Tensor, Tensor]:
    """Images of 224 by 224 pixels with labels, on the device; 2 small ones in tiny mode."""
    count, size, classes = run.pick((2, 32, 10), (count // 4 if run.is_small else count, 224, 1000))
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(count, 3, size, size, generator=draw)
    return x.to(run.device), torch.randint(classes, (count,), generator=draw).to(run.device)


def transformer(run: CaseRun, layers: int = 12, dropout: float = 0.0) -> Transformer:
    """A stack of blocks of width 1024 on the device; two small ones in tiny mode. Seeded."""
    torch.manual_seed(0)
    layers = max(2, layers // 3) if run.is_small else layers
    width, layers, heads = run.pick((32, 2, 2), (1024, layers, 16))
    return Transformer(width, layers, heads, dropout).to(run.device)


def tokens(run: CaseRun, rows: int = 8, length: int = 1024) -> Tensor:
    """An input of the transformer, on the device."""
    shape = run.pick((2, 16, 32), (max(1, rows // 4) if run.is_small else rows, length, 1024))
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(run.device)


class Net(pl.LightningModule):
    """A LightningModule around a network: mean squared output, and the losses of all batches in ``losses``."""

    def __init__(self, net: nn.Module, configure: Callable[[nn.Module], Any] | None = None) -> None:
        super().__init__()
        self.net = net
        self.losses: list[Tensor] = []
        self._configure = configure

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.net(batch[0]).float().square().mean()
        self.log("loss", loss)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        loss = outputs["loss"] if isinstance(outputs, dict) else outputs
        self.losses.append(torch.tensor(torch.nan) if loss is None else loss.detach())

    def configure_optimizers(self) -> Any:
        if self._configure is not None:
            return self._configure(self)
        return torch.optim.AdamW(self.parameters(), lr=1e-4, fused=True)


def net_and_rows(
    run: CaseRun, steps: int, rows: int = 8, width: int = 512, tiny: int = 8
) -> tuple[nn.Module, Dataset[Any]]:
    """A small MLP (seeded, on the CPU, for a Trainer) and its data for so many steps of ``rows`` rows."""
    torch.manual_seed(0)
    width = run.pick(tiny, width)
    net = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.LayerNorm(2 * width), nn.Linear(2 * width, width))
    return net, TensorDataset(torch.randn(steps * rows, width, generator=torch.Generator().manual_seed(2)))


def fit(run: CaseRun, module: pl.LightningModule, data: Any, rows: int = 8, **arguments: Any) -> pl.Trainer:
    """Train for one epoch on the device of the case, in silence."""
    quiet: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    quiet |= {"enable_model_summary": False, "max_epochs": 1, "accelerator": run.device.type, "devices": 1}
    loader = data if isinstance(data, (DataLoader, pl.LightningDataModule)) else DataLoader(data, rows)
    loggers = [logging.getLogger(name) for name in ("lightning.pytorch", "lightning.fabric")]
    levels = [(logger, logger.level) for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.WARNING)
    try:
        trainer = pl.Trainer(**{**quiet, **arguments})
        trainer.fit(module, loader)
    finally:
        for logger, level in levels:
            logger.setLevel(level)
    return trainer
