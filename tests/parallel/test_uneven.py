"""Ranks with different numbers of batches, against one process on the batches of all."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from lightning_speedkit.optimize import AccumulationScheduler
from lightning_speedkit.parallel import SpeedkitDDPStrategy
from lightning_speedkit.parallel.uneven import EvenLoader, take_share
from tests.two_ranks import on_two_ranks

COUNTS = ((5, 3), (2, 5), (4, 0), (0, 3), (4, 4))
FACTORS = (1, 2, 3)
STRATEGIES = ("speedkit_ddp", "speedkit_ddp_static")


class Net(LightningModule):
    def __init__(self, norm: bool = False) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()
        if norm:
            self.net.insert(1, nn.BatchNorm1d(4).double())
        self.seen: list[float] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.seen.append(batch[0].sum().item())
        return nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class Manual(Net):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()


class Stream(IterableDataset[Any]):
    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y

    def __iter__(self) -> Iterator[Any]:
        return iter(zip(self.x, self.y, strict=True))


def _rows(rank: int, batches: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(10, 3, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)[: 2 * batches]
    return x, x.sum(1, keepdim=True)


def _loader(kind: str, rank: int, batches: int) -> DataLoader[Any]:
    rows = _rows(rank, batches)
    return DataLoader(Stream(*rows) if kind == "stream" else TensorDataset(*rows), batch_size=2)


def _trainer(strategy: Any, *callbacks: Callback, **options: Any) -> Trainer:
    quiet: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": 2,
        "max_epochs": 2,
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
    }
    return Trainer(strategy=strategy, callbacks=list(callbacks), use_distributed_sampler=False, **{**quiet, **options})


def _fit(strategy: Any, kind: str, counts: tuple[int, int], model: Net | None = None, **options: Any) -> Net:
    run, model = _trainer(strategy, **options), model or Net()
    run.fit(model, _loader(kind, run.global_rank, counts[run.global_rank]))
    return model


def _weights(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def _refused() -> str:
    run = _trainer("speedkit_ddp", AccumulationScheduler(2))
    try:
        run.fit(Net(), _loader("stream", run.global_rank, 3 - run.global_rank))
    except MisconfigurationException as error:
        return str(error)
    return "none"


def _cases() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for counts, factor in itertools.product(COUNTS, FACTORS):
        for kind in ("stream", "sized"):
            model = _fit("speedkit_ddp", kind, counts, accumulate_grad_batches=factor)
            found[f"speedkit_ddp {kind} {counts} {factor}"] = _weights(model)
        found[f"static {counts} {factor}"] = _weights(
            _fit("speedkit_ddp_static", "stream", counts, accumulate_grad_batches=factor)
        )
    found["manual"] = _weights(_fit("speedkit_ddp", "sized", (5, 3), Manual()))
    found["limit"] = _weights(_fit("speedkit_ddp", "sized", (5, 3), limit_train_batches=4))
    model = _fit("speedkit_ddp", "stream", (1, 4), Net(norm=True), max_epochs=1)
    found["tracked"] = [value for name, value in model.named_buffers() if name.endswith("num_batches_tracked")]
    found["seen"] = model.seen
    found["refused"] = _refused()
    return found


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return on_two_ranks(_cases, timeout=60)


def _plain(counts: tuple[int, int], factor: int, limit: int = 9) -> list[Tensor]:
    """Each micro-batch is all rows of the ranks that have one; windows are divided by the factor, as Lightning does."""
    model, batches = Net(), min(limit, max(counts))
    optimizer: Any = model.configure_optimizers()
    for _, start in itertools.product(range(2), range(0, batches, factor)):
        optimizer.zero_grad()
        for number in range(start, min(start + factor, batches)):
            parts = [_rows(rank, count) for rank, count in enumerate(counts) if number < count]
            x, y = (torch.cat([part[i][2 * number : 2 * number + 2] for part in parts]) for i in range(2))
            (nn.functional.mse_loss(model.net(x), y) / factor).backward()
        optimizer.step()
    return _weights(model)


@pytest.mark.parametrize("factor", FACTORS)
@pytest.mark.parametrize("counts", COUNTS, ids=str)
@pytest.mark.parametrize("case", ["speedkit_ddp stream", "speedkit_ddp sized", "static"])
def test_no_gradient_is_lost(ranks: Any, case: str, counts: tuple[int, int], factor: int) -> None:
    for rank in ranks:
        torch.testing.assert_close(rank[f"{case} {counts} {factor}"], _plain(counts, factor), rtol=1e-9, atol=1e-12)


def test_manual_optimization_and_a_limit(ranks: Any) -> None:
    for rank in ranks:
        torch.testing.assert_close(rank["manual"], _plain((5, 3), 1), rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(rank["limit"], _plain((5, 3), 1, limit=4), rtol=1e-9, atol=1e-12)


def test_a_repeated_batch_leaves_statistics_alone(ranks: Any) -> None:
    first, second = ranks
    assert len(set(first["seen"])) == 1  # its only batch
    assert len(first["seen"]) == len(second["seen"]) == len(set(second["seen"])) == 4
    assert first["tracked"] == [1]


def test_a_callback_that_weighs_losses_is_refused(ranks: Any) -> None:
    assert any("another callback weighs their losses" in rank["refused"] for rank in ranks)


def test_the_loader_has_the_attributes_of_the_one_inside() -> None:
    inner: DataLoader[Any] = _loader("sized", 0, 2)
    flags: Any = None
    loader = EvenLoader(inner, flags, None)
    loader.worker_init_fn = print
    assert inner.worker_init_fn is print
    assert loader.batch_size == 2
    with pytest.raises(TypeError, match="not known"):
        len(loader)
    assert len(EvenLoader(inner, flags, 3)) == 3


def test_several_loaders_and_iterators_are_refused() -> None:
    flags: Any = None
    loader = EvenLoader([1], flags, 1)
    assert take_share([[1], [2]]) == take_share({"a": [1]}) == take_share([1]) == 1
    for several in ([loader, [1]], {"a": loader}):
        with pytest.raises(MisconfigurationException, match="several training loaders"):
            take_share(several)
    with pytest.raises(MisconfigurationException, match="dataloader_iter"):
        take_share(loader)


def test_it_can_be_turned_off() -> None:
    with pytest.raises(TypeError, match="uneven_inputs='join' must be True or False"):
        SpeedkitDDPStrategy(uneven_inputs="join")  # type: ignore[arg-type]
    strategy, loader = SpeedkitDDPStrategy(uneven_inputs=False), [1]
    assert strategy.process_dataloader(loader) is loader
