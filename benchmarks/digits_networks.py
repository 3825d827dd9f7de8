"""The digits of the package as tensors, and how networks are trained on them and timed, for several benchmarks."""

from __future__ import annotations

import statistics
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import nn

__all__ = ["accuracy", "digits", "median_seconds", "train_epoch"]


def digits(split: str, limit: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """The images of a split, float32 from 0 to 1 of shape (N, 1, 8, 8), and their labels; the first ``limit`` ones."""
    import torch

    from lightning_speedkit.demo.digits import load_digits, split_indices

    images, labels = load_digits()
    indices = split_indices(split)[:limit]
    return torch.from_numpy(images[indices]).float().unsqueeze(1) / 16, torch.from_numpy(labels[indices]).long()


def train_epoch(
    model: nn.Module, optimizer: torch.optim.Optimizer, images: torch.Tensor, labels: torch.Tensor, batch_size: int
) -> None:
    """Once through the images, in a random order of torch's."""
    import torch

    model.train()
    for indices in torch.randperm(len(images)).split(batch_size):
        loss = torch.nn.functional.cross_entropy(model(images[indices]), labels[indices])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def accuracy(scores: torch.Tensor, labels: torch.Tensor) -> float:
    """The share of rows whose largest score is that of the label."""
    return float((scores.argmax(dim=1) == labels).float().mean())


def median_seconds(model: Any, batch: torch.Tensor, calls: int) -> float:
    """The median over ``calls`` calls, or over as many as fit into four seconds."""
    for _ in range(max(3, calls // 20)):
        model(batch)
    seconds: list[float] = []
    end = time.perf_counter() + 4.0
    while len(seconds) < calls and (len(seconds) < 5 or time.perf_counter() < end):
        start = time.perf_counter()
        model(batch)
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)
