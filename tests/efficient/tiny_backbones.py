"""Small networks under names of torchvision, and a clock that only they move: every time is known beforehand."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torchvision.models import _api

__all__ = ["Clock", "Tiny", "registered"]


class Clock:
    """``time.perf_counter`` of the kit while it is on. Forwards add to it, and their names to ``calls``."""

    def __init__(self) -> None:
        self.now = 0.0
        self.calls: list[tuple[str, int, bool]] = []

    def __call__(self) -> float:
        return self.now


class Tiny(nn.Module):
    """One product of flattened images; a forward takes ``seconds`` for each image, three times as many in training."""

    def __init__(
        self, name: str, clock: Clock, seconds: float, num_classes: int, wide: int = 1, size: int = 48
    ) -> None:
        super().__init__()
        self.name, self.clock, self.seconds = name, clock, seconds
        self.first = nn.Linear(size, wide)
        self.last = nn.Linear(wide, num_classes)
        self.dtype: torch.dtype | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.clock.now += self.seconds * len(x) * (3 if self.training else 1)
        self.clock.calls.append((self.name, len(x), self.training))
        out: Tensor = self.last(self.first(x.flatten(1)))
        self.dtype = out.dtype
        return out


@contextmanager
def registered(**builders: Callable[[int], nn.Module]) -> Iterator[None]:
    """Networks under these names, each made by a function of the number of classes."""

    def entry(make: Callable[[int], nn.Module]) -> Callable[..., nn.Module]:
        def build(weights: Any = None, num_classes: int = 1000) -> nn.Module:
            return make(num_classes)

        return build

    with patch.dict(_api.BUILTIN_MODELS, {name: entry(make) for name, make in builders.items()}):
        yield
