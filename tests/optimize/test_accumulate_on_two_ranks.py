"""The callback on two gloo processes, against a plain loop over the union of what the ranks saw."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
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


class Fused(Net):
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01, fused=True)


class Sharded(Net):
    """Its parameters are divided over the ranks, by FSDP2."""

    def configure_model(self) -> None:
        if self.device_mesh is not None and not isinstance(self.net[0].weight, DTensor):
            fully_shard(self.net, mesh=self.device_mesh["data_parallel"])


def _sharding() -> ModelParallelStrategy:
    return ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1, save_distributed_checkpoint=False)


class Save(Callback):
    """Saves after the second micro-batch of the second epoch."""

    def __init__(self, path: str) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if (trainer.current_epoch, batch_idx) == (1, 1):
            trainer.save_checkpoint(self.path)


def _resumed(model: Net, path: str, strategy: Any, **options: Any) -> list[Tensor]:
    """From the third micro-batch of the second epoch on."""
    run = trainer(AccumulationScheduler(4), strategy=strategy, devices=2, max_epochs=EPOCHS, **options)
    rest = _micro_batches(UNEQUAL, run.global_rank)[2:]
    run.fit(model, DataLoader(Stream(rest), batch_size=None), ckpt_path=path, weights_only=True)
    return _whole(model)


def _whole(model: Line) -> list[Tensor]:
    parameters = [p.detach() for p in model.parameters()]
    return [p.full_tensor() if isinstance(p, DTensor) else p.clone() for p in parameters]


def _resuming(folder: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for strategy in STRATEGIES:
        path = f"{folder}/{strategy}.ckpt"
        _fit(Net(), UNEQUAL, AccumulationScheduler(4), Save(path), strategy=strategy)
        found[f"resumed {strategy}"] = _resumed(Net(), path, strategy)
    return found


def _sharded(folder: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for factor in (1, 3):
        model = Sharded()
        _fit(model, UNEQUAL, AccumulationScheduler(factor), strategy=_sharding())
        found[f"sharded {factor}"] = _whole(model)
    path = f"{folder}/sharded.ckpt"
    _fit(Sharded(), UNEQUAL, AccumulationScheduler(4), Save(path), strategy=_sharding())
    found["resumed sharded"] = _resumed(Sharded(), path, _sharding())
    return found


def _runs(folder: str) -> dict[str, Any]:
    """Everything in one start of two processes, which is what takes the time."""
    found: dict[str, Any] = _resuming(folder) | _sharded(folder)
    found["target"] = _fit(Net(), UNEQUAL, AccumulationScheduler(target_batch=7))
    found["by steps"] = _fit(Net(), UNEQUAL, AccumulationScheduler({0: 1, 2: 3}, unit="step"))
    found["fused"] = _fit(Fused(), UNEQUAL, AccumulationScheduler(4))
    half = SpeedkitDDPStrategy(comm_hook="fp16")
    found["fp16 hook"] = _fit(Net(), UNEQUAL, AccumulationScheduler(4), strategy=half)
    logs = AccumulationScheduler(4, log_loss="window")
    found["loss"] = []
    _fit(Net(), UNEQUAL, logs, Logged(found["loss"]))
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


class Logged(Callback):
    """Keeps the mean loss of each window."""

    def __init__(self, seen: list[float]) -> None:
        self.seen = seen

    def on_train_batch_end(self, trainer: Any, *rest: Any) -> None:
        if trainer.global_step > len(self.seen):
            self.seen.append(trainer.callback_metrics["window"].item())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def runs(folder: Path) -> list[dict[str, Any]]:
    return on_two_ranks(_runs, str(folder))


def _plain(
    sizes: tuple[list[int], list[int]],
    windows: int | list[list[int]],
    clip: float | None = None,
    by: str = "samples",
    model: Net | None = None,
    losses: list[float] | None = None,
) -> Any:
    """One process, one batch per step: all samples of the window of both ranks.

    ``windows`` is a factor, or for each epoch the numbers of micro-batches in its windows.
    """
    model, ranks = model or Net(), [_micro_batches(sizes, rank) for rank in range(2)]
    optimizer = model.configure_optimizers()
    for epoch in range(EPOCHS):
        start = 0
        while start < len(sizes[0]):
            factor = windows if isinstance(windows, int) else windows[epoch].pop(0)
            window = [batch for rank in ranks for batch in rank[start : start + factor]]
            start += factor
            optimizer.zero_grad()
            if by == "samples":
                loss = model.training_step(torch.cat(window), 0)
                loss.backward()
                if losses is not None:
                    losses.append(loss.item())
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


def test_a_window_ends_when_all_ranks_together_reach_the_target(runs: Any) -> None:
    # samples of both ranks: 3 5 | 7 | 5 4 | 3, where the windows have 8, 7, 9 and 3
    _assert_equal_on_both(runs, "target", _plain(UNEQUAL, [[2, 1, 2, 1], [2, 1, 2, 1]]))


def test_the_factor_changes_at_a_step_on_all_ranks(runs: Any) -> None:
    _assert_equal_on_both(runs, "by steps", _plain(UNEQUAL, [[1, 1, 3, 1], [3, 3]]))


def test_a_fused_optimizer(runs: Any) -> None:
    _assert_equal_on_both(runs, "fused", _plain(UNEQUAL, 4, model=Fused()))


def test_a_hook_that_sends_half_precision(runs: Any) -> None:
    expected = _plain(UNEQUAL, 4)
    for rank in runs:
        torch.testing.assert_close(rank["fp16 hook"], expected, rtol=0.0, atol=2e-3)
        assert not torch.allclose(rank["fp16 hook"][0], expected[0], rtol=0.0, atol=1e-9)  # it was in use


def test_the_mean_loss_is_that_of_all_ranks(runs: Any) -> None:
    losses: list[float] = []
    _plain(UNEQUAL, 4, losses=losses)
    for rank in runs:
        assert rank["loss"] == pytest.approx(losses, rel=1e-12)


@pytest.mark.parametrize("factor", [1, 3])
def test_sharded_parameters(runs: Any, factor: int) -> None:
    _assert_equal_on_both(runs, f"sharded {factor}", _plain(UNEQUAL, factor))


@pytest.mark.parametrize("strategy", [*STRATEGIES, "sharded"])
def test_a_run_resumed_inside_a_window_takes_the_same_steps(runs: Any, strategy: str) -> None:
    _assert_equal_on_both(runs, f"resumed {strategy}", _plain(UNEQUAL, 4))


def test_another_number_of_ranks_cannot_finish_a_window(runs: Any, folder: Path) -> None:
    run = trainer(AccumulationScheduler(4), max_epochs=EPOCHS)
    data = DataLoader(Stream(_micro_batches(UNEQUAL, 0)), batch_size=None)
    with pytest.raises(MisconfigurationException, match=r"on 2 rank\(s\), and this run has 1.*Resume it on 2 rank"):
        run.fit(Net(), data, ckpt_path=folder / "ddp.ckpt", weights_only=True)
