"""Every combination of ranks, precision, what is counted, sizes of micro-batches, and factor: the gradient of each step
against that of one big batch in a plain loop of the same precision."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.utils.data import DataLoader, IterableDataset

from lightning_speedkit.optimize import AccumulationScheduler
from tests.optimize.line import trainer
from tests.two_ranks import on_two_ranks

# the largest difference to the big batch, relative to the largest entry of its gradient; in 16 bits, twice the distance
# between two neighbouring numbers of the format
BOUNDS = {"double": 1e-12, "float": 1e-6, "bf16-mixed": 2.0**-6, "16-mixed": 2.0**-9}
COUNTS = ("samples", "labels")
SIZES = ("even", "ragged", "short")
FACTORS = (1, 2, 3, 8)
RUNS = list(itertools.product(BOUNDS, COUNTS, SIZES))  # each has an epoch per factor
SCALE = 1024.0

Batch = dict[str, Tensor]
Run = tuple[str, str, str]


class Net(LightningModule):
    """Classifies the places of short rows; keeps the gradient of each step."""

    def __init__(self, precision: str) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
        if precision == "double":
            self.double()
        self.lr = 0.1 if precision == "double" else 0.0  # weights that differ by their rounding would hide the rest
        self.seen: list[Tensor] = []

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self.net(batch["x"]).flatten(0, 1), batch["labels"].flatten())

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.seen.append(torch.cat([p.grad.flatten().clone() for p in self.parameters() if p.grad is not None]))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


class Syncs(Callback):
    """Counts how often gradients are sent."""

    def __init__(self) -> None:
        self.count = 0

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        def hook(group, bucket):  # type: ignore[no-untyped-def]  # torch refuses other annotations than its own
            self.count += 1
            return allreduce_hook(group, bucket)

        if trainer.world_size > 1:
            trainer.strategy.model.register_comm_hook(None, hook)


class Epochs(IterableDataset[Batch]):
    """Other batches in each epoch, and no length."""

    def __init__(self, epochs: list[list[Batch]]) -> None:
        self.epochs = iter(epochs)

    def __iter__(self) -> Iterator[Batch]:
        return iter(next(self.epochs))


def _micro_batches(run: Run, factor: int, rank: int) -> list[Batch]:
    precision, count, sizes = run
    number = 9 if factor == 3 else 8
    ragged = ([1, 3, 2, 4, 5], [2, 5, 1, 1, 3])[rank]
    rows = [4] * (number + 1) if sizes == "short" else [4 if sizes == "even" else ragged[i % 5] for i in range(number)]
    random = torch.Generator().manual_seed(2 * factor + rank)
    dtype = torch.float64 if precision == "double" else torch.float32
    batches = []
    for n in rows:
        labels = torch.randint(0, 3, (n, 3), generator=random)
        if count == "labels":
            labels[torch.rand(n, 3, generator=random) < 0.5] = -100
            labels[0, 0] = 1
        batches.append({"x": torch.randn(n, 3, 4, generator=random, dtype=dtype), "labels": labels})
    return batches


def _fit(ranks: int, run: Run) -> tuple[list[Tensor], int]:
    """The gradient of each step, and the number of synchronisations."""
    precision, count, _ = run
    options: dict[str, Any] = {"precision": "bf16-mixed"} if precision == "bf16-mixed" else {}
    if precision == "16-mixed":
        options["plugins"] = [MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=SCALE))]
    if ranks > 1:
        options |= {"devices": ranks, "strategy": "ddp"}
    model, syncs = Net(precision), Syncs()
    ours = AccumulationScheduler(dict(enumerate(FACTORS)), count=count)
    fit = trainer(ours, syncs, max_epochs=len(FACTORS), **options)
    epochs = [_micro_batches(run, factor, fit.global_rank) for factor in FACTORS]
    fit.fit(model, DataLoader(Epochs(epochs), batch_size=None))
    return model.seen, syncs.count


def _fits(ranks: int) -> list[tuple[list[Tensor], int]]:
    return [_fit(ranks, run) for run in RUNS]


def _plain(ranks: int, run: Run) -> list[tuple[int, Tensor]]:
    """One process, one batch per step: all that the ranks have in a window. Each with the factor of the window."""
    precision, factors = run[0], []
    model = Net(precision)
    optimizer = model.configure_optimizers()
    dtype = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}.get(precision)
    scale = SCALE if precision == "16-mixed" else 1.0
    for factor in FACTORS:
        data = [_micro_batches(run, factor, rank) for rank in range(ranks)]
        for start in range(0, len(data[0]), factor):
            window = [batch for batches in data for batch in batches[start : start + factor]]
            big = {key: torch.cat([batch[key] for batch in window]) for key in ("x", "labels")}
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=dtype or torch.bfloat16, enabled=dtype is not None):
                loss = model.training_step(big, 0)
            (loss * scale).backward()
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.grad /= scale
            model.on_before_optimizer_step(optimizer)
            optimizer.step()
            factors.append(factor)
    return list(zip(factors, model.seen, strict=True))


@pytest.mark.parametrize("ranks", [1, 2])
def test_every_step_has_the_gradient_of_one_big_batch(ranks: int) -> None:
    found = [_fits(1)] if ranks == 1 else on_two_ranks(_fits, 2)
    worst: dict[Any, float] = {}
    for place, run in enumerate(RUNS):
        expected = _plain(ranks, run)
        for rank, fits in enumerate(found):
            seen, syncs = fits[place]
            assert len(seen) == len(expected)
            assert syncs == len(expected) * (ranks > 1), (run, rank)
            for ours, (factor, exact) in zip(seen, expected, strict=True):
                cell, difference = (*run, factor, rank), (ours - exact).abs().max() / exact.abs().max()
                worst[cell] = max(worst.get(cell, 0.0), difference.item())
    assert len(worst) == 96 * ranks
    assert {cell: difference for cell, difference in worst.items() if not difference <= BOUNDS[cell[0]]} == {}
