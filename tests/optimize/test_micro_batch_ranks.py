"""Memory runs out on one of two gloo processes: nobody hangs, and the weights are those of the run without a fault."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from lightning_speedkit.optimize.accumulate import AccumulationScheduler
from lightning_speedkit.optimize.micro_batch import AutoMicroBatch
from lightning_speedkit.parallel import SpeedkitDDPStrategy
from tests.optimize.line import trainer
from tests.optimize.scarce_memory import MESSAGE, Scarce, batches, loader, plain, weights
from tests.two_ranks import on_two_ranks

SIZES = ([6, 6, 4, 6, 6, 3], [6, 2, 6, 5, 6, 4])
FAULTS: dict[str, dict[str, float]] = {
    "none": {},
    "forward": {"forward_most": 2},
    "backward": {"backward_most": 2},
    "validation": {"validation_most": 1},
    "step": {},
}


class Logs(Scarce):
    """Logs over ranks inside the step, which waits for the other rank, and has a buffer that DDP broadcasts."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros(1))

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        self.steps += 1
        self.log("mean", batch.mean(), on_step=True, on_epoch=True, sync_dist=True)
        return super().training_step(batch, batch_idx)


class FailingSGD(torch.optim.SGD):
    """Finds no memory in its second step, before or after it changed the weights."""

    steps, after = 0, False

    def step(self, closure: Any = None) -> Any:
        result = super().step(closure) if self.after else closure()
        self.steps += 1
        if self.steps == 2:
            raise torch.OutOfMemoryError(MESSAGE)
        return result if self.after else super().step(lambda: result)


class Count(Callback):
    """Counts the buckets of gradients that are sent."""

    buckets = 0

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        def hook(group, bucket):  # type: ignore[no-untyped-def]  # torch refuses other annotations than its own
            self.buckets += 1
            return allreduce_hook(group, bucket)

        trainer.strategy.model.register_comm_hook(None, hook)


def _data(rank: int) -> list[Tensor]:
    return batches(*SIZES[0], seed=4) if rank == 0 else batches(*SIZES[1], seed=5)


def _fit(
    model: Scarce, *callbacks: Callback, strategy: Any = "ddp", fault: str = "none", on: int = 1, **options: Any
) -> dict[str, Any]:
    own = {"num_sanity_val_steps": 0, "use_distributed_sampler": False, "max_epochs": 2}  # each rank has its batches
    run = trainer(*callbacks, strategy=strategy, devices=2, **{**own, **options})
    rank = run.global_rank
    if rank == on:
        for name, value in FAULTS[fault].items():
            setattr(model, name, value)
        if fault == "step":
            model.optimizer = lambda parameters: FailingSGD(parameters, lr=0.1, momentum=0.9)
    run.fit(model, loader(_data(rank)), loader(batches(4, 3, seed=6)))
    return {
        "weights": weights(model),
        "buffers": [buffer.clone() for buffer in model.buffers()],
        "metrics": {name: value.item() for name, value in run.callback_metrics.items()},
        "size": next((c.micro_batch_size for c in callbacks if isinstance(c, AutoMicroBatch)), None),
        "calls": model.calls,
    }


class Branches(Scarce):
    """Each rank leaves another layer unused, and both leave a third one."""

    def __init__(self) -> None:
        super().__init__()
        self.zero, self.one, self.two = (nn.Linear(3, 1, dtype=torch.float64) for _ in range(3))

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        branch = self.zero if self.trainer.global_rank == 0 else self.one
        return super().training_step(batch, batch_idx) + branch(batch).square().mean()


def _runs() -> dict[str, Any]:
    found: dict[str, Any] = {"plain": _fit(Logs())}
    for fault in FAULTS:
        found[fault] = _fit(Logs(), AutoMicroBatch(grow_after=None), fault=fault)
    FailingSGD.after = True
    found["step after"] = _fit(Logs(), AutoMicroBatch(), fault="step", on=0)
    for fault in ("forward", "backward"):
        count = Count()
        strategy = SpeedkitDDPStrategy()
        pair = (AutoMicroBatch(grow_after=3), AccumulationScheduler(4))
        found[f"window {fault}"] = _fit(Scarce(), *pair, count, strategy=strategy, fault=fault)
        found[f"window {fault}"]["buckets"] = count.buckets
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        plugins = [MixedPrecision("16-mixed", "cpu", scaler)]
        pair = (AutoMicroBatch(), AccumulationScheduler(3))
        found[f"float16 {fault}"] = _fit(Scarce(), *pair, fault=fault, on=0, plugins=plugins)
        unused = DDPStrategy(find_unused_parameters=True)
        found[f"unused {fault}"] = _fit(Branches(), AutoMicroBatch(), fault=fault, strategy=unused)
    found["unused"] = _fit(Branches(), strategy=DDPStrategy(find_unused_parameters=True))
    for strategy in ("speedkit_ddp_static", DDPStrategy(static_graph=True)):
        with pytest.raises(MisconfigurationException, match="static_graph=True"):
            _fit(Scarce(), AutoMicroBatch(), strategy=strategy)
    return found


@pytest.fixture(scope="module")
def runs() -> list[dict[str, Any]]:
    return on_two_ranks(_runs, timeout=120)


def _windows(factor: int) -> list[list[Tensor]]:
    zero, one = _data(0), _data(1)
    return [zero[i : i + factor] + one[i : i + factor] for i in range(0, len(zero), factor)]


def test_without_a_fault_all_is_as_without_the_callback_to_the_bit(runs: Any) -> None:
    for rank in runs:
        for what in ("weights", "buffers", "metrics"):
            torch.testing.assert_close(rank["none"][what], rank["plain"][what], rtol=0, atol=0)
        assert rank["none"]["size"] is None


@pytest.mark.parametrize("fault", ["forward", "backward", "validation", "step", "step after"])
def test_a_fault_on_one_rank_changes_nothing_and_hangs_nobody(runs: Any, fault: str) -> None:
    for rank in runs:
        torch.testing.assert_close(rank[fault]["weights"], rank["plain"]["weights"], rtol=1e-9, atol=1e-12)
        for name, value in rank["plain"]["metrics"].items():
            assert rank[fault]["metrics"][name] == pytest.approx(value, rel=1e-6), name
    assert len(runs[1]["forward"]["calls"]) > len(runs[0]["forward"]["calls"])


def test_ranks_agree_on_the_size(runs: Any) -> None:
    for fault, size in (("forward", 1), ("backward", 1), ("validation", None), ("step", None)):
        assert [rank[fault]["size"] for rank in runs] == [size, size], fault
    # the rank that never failed runs its first batch whole, and in pieces after it
    assert runs[0]["backward"]["calls"][:7] == [6] + [1] * 6


@pytest.mark.parametrize("fault", ["forward", "backward"])
def test_windows_of_unequal_batches_are_one_step_and_one_message(runs: Any, fault: str) -> None:
    for rank in runs:
        torch.testing.assert_close(rank[f"window {fault}"]["weights"], plain(_windows(4), 2), rtol=1e-9, atol=1e-12)
        assert rank[f"window {fault}"]["buckets"] == 4  # 2 epochs of 2 windows
        torch.testing.assert_close(rank[f"float16 {fault}"]["weights"], plain(_windows(3), 2), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("fault", ["forward", "backward"])
def test_unused_parameters_are_found_as_in_ddp(runs: Any, fault: str) -> None:
    for rank in runs:
        found, expected = rank[f"unused {fault}"]["weights"], rank["unused"]["weights"]
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


def _hopeless(*callbacks: Callback) -> tuple[str, str, int]:
    """What ended the run of this rank, where one sample of the second batch does not fit on rank 1."""

    class Fails(Scarce):
        def on_train_batch_start(self, batch: Tensor, batch_idx: int) -> None:
            self.backward_most = 0 if self.global_rank == 1 and batch_idx == 1 else float("inf")

    model = Fails()
    run = trainer(AutoMicroBatch(), *callbacks, strategy="ddp", devices=2, use_distributed_sampler=False)
    try:
        run.fit(model, loader(_data(run.global_rank)))
    except RuntimeError as error:
        return type(error).__name__, str(error), model.trainer.fit_loop.batch_idx
    return "", "", -1


def _hopeless_twice() -> list[tuple[str, str, int]]:
    return [_hopeless(), _hopeless(AccumulationScheduler(6))]  # the second one inside a window


def test_a_rank_that_cannot_go_on_says_why_and_the_other_one_stops_too() -> None:
    for (kind, text, last), (failed, why, at) in zip(*on_two_ranks(_hopeless_twice, timeout=90), strict=True):
        assert (failed, kind) == ("OutOfMemoryError", "RuntimeError")
        assert "ran out of memory with 1 sample at once" in why
        assert "Another rank ended during a training step" in text
        assert (last, at) == (1, 1)  # at that batch, and not at the end of a window
