"""What a network costs on a device: parameters, FLOPs, time of inference and training, and peak memory of both."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lightning_speedkit.architecture.backbone_memory import peak_mib, wait_for
from lightning_speedkit.measure.flops import count_flops

__all__ = ["Measured", "count_parameters"]

_CALLS = 3  # timed calls of one image in a round; of a batch one


def count_parameters(model: nn.Module) -> int:
    """How many numbers are trained or frozen in the model; shared ones count once.

    >>> count_parameters(nn.Linear(3, 2))
    8
    """
    return sum(parameter.numel() for parameter in model.parameters())


@dataclass(slots=True)
class Measured:
    """One network while it is measured. It lies on the host, and is on the device only while it is looked at.

    :meth:`check`, :meth:`flops` and :meth:`memory` come first, then any number of :meth:`round`.
    """

    model: nn.Module
    task_shape: tuple[int, int, int]
    num_classes: int
    batch_size: int
    device: torch.device
    seconds: dict[str, list[float]] = field(default_factory=dict)

    def check(self) -> None:
        """Run it on one image, and raise ValueError if what comes out is not one row of logits."""
        with torch.no_grad():
            output = self.model.eval().to(self.device)(self._images(1))
        if not isinstance(output, Tensor) or output.shape != (1, self.num_classes):
            got = tuple(output.shape) if isinstance(output, Tensor) else type(output).__name__
            raise ValueError(f"its output for one image is {got}, not logits of shape (1, {self.num_classes})")

    def flops(self) -> int:
        """Of one image."""
        self.model.eval()
        return count_flops(lambda: self._infer(self._images(1)))

    def memory(self) -> tuple[float | None, float | None]:
        """The peaks of an inference and of a training step with a batch, in MiB; both are run twice."""
        images, labels = self._images(self.batch_size), self._labels()
        self.model.eval()
        self._infer(images)
        inference = peak_mib(self.model, images, lambda: self._infer(images))
        training = peak_mib(self.model, images, lambda: self._train(images, labels, lambda: None))
        self.model.zero_grad()
        return inference, training

    def round(self) -> None:
        """Time one image, a batch and a training step, each after one of the kind that is not timed."""
        self.model.to(self.device).eval()
        one, images = self._images(1), self._images(self.batch_size)
        self._time("one", lambda: self._infer(one), _CALLS)
        self._time("batch", lambda: self._infer(images), 1)
        marks: list[float] = []

        def mark() -> None:
            wait_for(self.device)
            marks.append(time.perf_counter())

        self._train(images, self._labels(), mark)
        self.seconds.setdefault("training", []).append(marks[-1] - marks[-2])
        self.model.zero_grad()

    def rest(self) -> None:
        """Leave the device to others."""
        self.model.to("cpu")

    def median(self, what: str) -> float:
        """The seconds of ``"one"`` image, a ``"batch"`` or a ``"training"`` step, after a round."""
        return statistics.median(self.seconds[what])

    def _time(self, what: str, run: Callable[[], object], calls: int) -> None:
        run()
        for _ in range(calls):
            wait_for(self.device)
            start = time.perf_counter()
            run()
            wait_for(self.device)
            self.seconds.setdefault(what, []).append(time.perf_counter() - start)

    def _infer(self, images: Tensor) -> None:
        with torch.no_grad():
            self.model(images)

    def _train(self, images: Tensor, labels: Tensor, mark: Callable[[], None]) -> None:
        """Two steps as Lightning takes them, with AdamW, whose rate of 0 leaves the weights; marked at their ends."""
        self.model.train()
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.0, fused=True)
        for _ in range(2):
            loss = nn.functional.cross_entropy(self.model(images), labels)
            optimizer.zero_grad()
            go_back: Callable[[], Any] = loss.backward
            go_back()
            optimizer.step()
            mark()

    def _images(self, count: int) -> Tensor:
        return torch.randn(count, *self.task_shape, device=self.device)

    def _labels(self) -> Tensor:
        return torch.randint(self.num_classes, (self.batch_size,), device=self.device)
