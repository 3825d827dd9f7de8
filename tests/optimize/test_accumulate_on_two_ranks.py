"""The callback on two gloo processes, against a plain loop over the union of what the ranks saw."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.utils.data import DataLoader

from lightning_speedkit.optimize import AccumulationScheduler
from lightning_speedkit.parallel import SpeedkitDDPStrategy
from tests.optimize.line import Line, Stream, trainer
from tests.two_ranks import on_two_ranks

STRATEGIES = ("ddp", "speedkit_ddp", "speedkit_ddp_static")
UNEQUAL = ([1, 3, 2, 4, 1, 2], [2, 2, 5, 1, 3, 1])
EMPTY = ([0, 3, 0, 0, 1, 2], [2, 0, 0, 0, 3, 1])
GROWING = ([1, 3, 40, 2, 1, 50], [2, 50, 1, 60, 3, 1])
EPOCHS = 2


class Net(Line):
    """Two layers in double precision; the mean over a batch of no samples is 0."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.net = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1)).to(dtype)
        del self.w

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.net(batch).square().sum() / max(len(batch), 1)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class Count(Callback):
    """Counts what is sent: buckets of gradients, single numbers, and waits for each other."""

    def __init__(self) -> None:
        self.buckets = self.numbers = self.barriers = 0
        self._found = torch.distributed.all_reduce, torch.distributed.barrier

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        def hook(group, bucket):  # type: ignore[no-untyped-def]  # torch refuses other annotations than its own
            self.buckets += 1
            return allreduce_hook(group, bucket)

        trainer.strategy.model.register_comm_hook(None, hook)
        all_reduce, barrier = self._found

        def counted(tensor: Tensor, *arguments: Any, **options: Any) -> Any:
            self.numbers += tensor.ndim == 0
            return all_reduce(tensor, *arguments, **options)

        def waited(*arguments: Any, **options: Any) -> None:
            self.barriers += 1
            barrier(*arguments, **options)

        torch.distributed.all_reduce, torch.distributed.barrier = counted, waited

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        torch.distributed.all_reduce, torch.distributed.barrier = self._found


def _micro_batches(sizes: tuple[list[int], list[int]], rank: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    x = torch.randn(sum(map(sum, sizes)), 3, dtype=dtype, generator=torch.Generator().manual_seed(4))
    return list(x.split([sum(sizes[0]), sum(sizes[1])])[rank].split(sizes[rank]))


def _fit(
    model: Line, sizes: tuple[list[int], list[int]], *callbacks: Callback, strategy: Any = "ddp", **options: Any
) -> list[Tensor]:
    run = trainer(*callbacks, strategy=strategy, **{"devices": 2, "max_epochs": EPOCHS, **options})
    dtype = next(model.parameters()).dtype
    run.fit(model, DataLoader(Stream(_micro_batches(sizes, run.global_rank, dtype)), batch_size=None))
    return [p.detach().clone() for p in model.parameters()]


def _runs() -> dict[str, Any]:
    """Everything in one start of two processes, which is what takes the time."""
    found: dict[str, Any] = {}
    for strategy in STRATEGIES:
        for factor in (1, 3, 4):
            found[f"unequal {strategy} {factor}"] = _fit(
                Net(), UNEQUAL, AccumulationScheduler(factor), strategy=strategy
            )
        found[f"empty {strategy}"] = _fit(Net(), EMPTY, AccumulationScheduler(3), strategy=strategy)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        found[f"float16 {strategy}"] = _fit(
            Net(),  # in double precision, which autocast leaves alone: the numbers can be compared to many digits
            GROWING,
            AccumulationScheduler(3),
            strategy=strategy,
            plugins=[MixedPrecision("16-mixed", "cpu", scaler)],
        )
        found[f"batches {strategy}"] = _fit(
            Net(), UNEQUAL, AccumulationScheduler(4, count="batches"), strategy=strategy
        )
        counter = Count()
        _fit(Net(), UNEQUAL, AccumulationScheduler(4), counter, strategy=strategy)
        found[f"count {strategy}"] = (counter.buckets, counter.numbers, counter.barriers)
    found["clipped"] = _fit(
        Net(), UNEQUAL, AccumulationScheduler(4), strategy=SpeedkitDDPStrategy(), gradient_clip_val=0.05
    )
    counter = Count()
    _fit(Net(), UNEQUAL, AccumulationScheduler(4, count="batches"), counter)
    found["count batches"] = (counter.buckets, counter.numbers, counter.barriers)
    equal = ([5] * 3 + [7] * 3, [5] * 3 + [7] * 3)
    for factor in (1, 3):
        found[f"equal {factor}"] = _fit(Net(torch.float32), equal, AccumulationScheduler(factor))
        found[f"lightning {factor}"] = _fit(Net(torch.float32), equal, accumulate_grad_batches=factor)
    return found


@pytest.fixture(scope="module")
def runs() -> list[dict[str, Any]]:
    return on_two_ranks(_runs)


def _plain(sizes: tuple[list[int], list[int]], factor: int, clip: float | None = None, by: str = "samples") -> Any:
    """One process, one batch per step: all samples of the window of both ranks."""
    model, ranks = Net(), [_micro_batches(sizes, rank) for rank in range(2)]
    optimizer = model.configure_optimizers()
    for _ in range(EPOCHS):
        for start in range(0, len(sizes[0]), factor):
            window = [batch for rank in ranks for batch in rank[start : start + factor]]
            optimizer.zero_grad()
            if by == "samples":
                model.training_step(torch.cat(window), 0).backward()
            else:
                torch.stack([model.training_step(batch, 0) for batch in window]).mean().backward()
            if clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
    return [p.detach() for p in model.parameters()]


def _assert_equal_on_both(runs: list[dict[str, Any]], name: str, expected: Any, rtol: float = 1e-10) -> None:
    for rank in runs:
        torch.testing.assert_close(rank[name], expected, rtol=rtol, atol=1e-13)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("factor", [1, 3, 4])
def test_unequal_ranks_equal_one_process_on_the_union(runs: Any, strategy: str, factor: int) -> None:
    _assert_equal_on_both(runs, f"unequal {strategy} {factor}", _plain(UNEQUAL, factor))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_ranks_may_have_micro_batches_without_samples(runs: Any, strategy: str) -> None:
    _assert_equal_on_both(runs, f"empty {strategy}", _plain(EMPTY, 3))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_micro_batches_that_grow_under_float16(runs: Any, strategy: str) -> None:
    # Each rank scales its gradients down by itself, also those that a static graph averaged in the first backward.
    _assert_equal_on_both(runs, f"float16 {strategy}", _plain(GROWING, 3))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_batches_weigh_alike_over_ranks_too(runs: Any, strategy: str) -> None:
    _assert_equal_on_both(runs, f"batches {strategy}", _plain(UNEQUAL, 4, by="batches"))


def test_clipping_sees_the_gradient_of_all_ranks(runs: Any) -> None:
    expected = _plain(UNEQUAL, 4, clip=0.05)
    assert not torch.allclose(expected[0], _plain(UNEQUAL, 4)[0])  # the clip does something
    _assert_equal_on_both(runs, "clipped", expected, rtol=1e-4)  # clip_grad_norm_ adds 1e-6 to the norm


@pytest.mark.parametrize(
    ("name", "buckets", "numbers"),
    [
        # 2 epochs of 2 windows; a static graph sends once more, in its first backward. One number per window, and one
        # per fit for the reference.
        ("ddp", 4, 5),
        ("speedkit_ddp", 4, 5),
        ("speedkit_ddp_static", 5, 5),
        ("batches", 4, 0),
    ],
)
def test_gradients_are_sent_once_per_window(runs: Any, name: str, buckets: int, numbers: int) -> None:
    assert [rank[f"count {name}"] for rank in runs] == [(buckets, numbers, 0)] * 2


@pytest.mark.parametrize("factor", [1, 3])
def test_where_lightning_is_right_the_weights_are_the_same_to_the_bit(runs: Any, factor: int) -> None:
    for rank in runs:
        assert all(torch.equal(a, b) for a, b in zip(rank[f"equal {factor}"], rank[f"lightning {factor}"], strict=True))
