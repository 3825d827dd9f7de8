"""Memory runs out on one of two gloo processes: nobody hangs, and the weights are those of the run without a fault.

Each case has two processes of its own, and 30 seconds from when they begin.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
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


class _Fails:
    """Finds no memory in its second step, on one rank, before or after it changed the weights."""

    fails = after = False

    def step(self, closure: Any = None) -> Any:
        self.seen: list[bool | None] = getattr(self, "seen", [])  # whether each step took all parameters together
        result = super().step(closure) if self.after else closure()  # type: ignore[misc]
        self.seen.append(self.param_groups[0]["foreach"])  # type: ignore[attr-defined]
        if len(self.seen) == 2 and self.fails:
            raise torch.OutOfMemoryError(MESSAGE)
        return result if self.after else super().step(lambda: result)  # type: ignore[misc]


class FailingSGD(_Fails, torch.optim.SGD):
    pass


class FailingNAdam(_Fails, torch.optim.NAdam):
    """Rounds differently when it takes all parameters together."""


def _optimizer(parameters: Any, fault: str, fails: bool) -> torch.optim.Optimizer:
    if "rounds" in fault:
        found: Any = FailingNAdam(parameters, lr=0.1, foreach=True)
    else:
        found = FailingSGD(parameters, lr=0.1, momentum=0.9)
    found.fails, found.after = fails, "after" in fault
    return found  # type: ignore[no-any-return]


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
    for name, value in FAULTS.get(fault, {}).items() if rank == on else ():
        setattr(model, name, value)
    if fault.startswith("step"):
        model.optimizer = lambda parameters: _optimizer(parameters, fault, rank == on)
    run.fit(model, loader(_data(rank)), loader(batches(4, 3, seed=6)))
    return {
        "weights": weights(model),
        "buffers": [buffer.clone() for buffer in model.buffers()],
        "metrics": {name: value.item() for name, value in run.callback_metrics.items()},
        "size": next((c.micro_batch_size for c in callbacks if isinstance(c, AutoMicroBatch)), None),
        "calls": model.calls,
        "together": getattr(run.optimizers[0], "seen", None),
        "state": [dict(state) for state in run.optimizers[0].state.values()],
    }


class Branches(Scarce):
    """Each rank leaves another layer unused, and both leave a third one."""

    def __init__(self) -> None:
        super().__init__()
        self.zero, self.one, self.two = (nn.Linear(3, 1, dtype=torch.float64) for _ in range(3))

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        branch = self.zero if self.trainer.global_rank == 0 else self.one
        return super().training_step(batch, batch_idx) + branch(batch).square().mean()


class Sparse(Scarce):
    """An embedding with sparse gradients, which have other rows on each rank."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 3, sparse=True, dtype=torch.float64)
        self.optimizer = lambda parameters: torch.optim.SGD(parameters, lr=0.1)

    def loss(self, x: Tensor) -> Tensor:
        return super().loss(self.table(x.abs().mul(2).long().clamp(max=6)).sum(1))


def _window(fault: str) -> dict[str, Any]:
    pair, count = (AutoMicroBatch(grow_after=3), AccumulationScheduler(4)), Count()
    return {**_fit(Scarce(), *pair, count, strategy=SpeedkitDDPStrategy(), fault=fault), "buckets": count.buckets}


def _float16(fault: str) -> dict[str, Any]:
    plugin = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=1024.0))
    return _fit(Scarce(), AutoMicroBatch(), AccumulationScheduler(3), fault=fault, on=0, plugins=[plugin])


def _unused(*callbacks: Callback, **options: Any) -> dict[str, Any]:
    return _fit(Branches(), *callbacks, strategy=DDPStrategy(find_unused_parameters=True), **options)


def _sparse(*callbacks: Callback, **options: Any) -> dict[str, Any]:
    return _fit(Sparse(), *callbacks, **options)


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


def _references() -> dict[str, Any]:
    for strategy in ("speedkit_ddp_static", DDPStrategy(static_graph=True)):
        with pytest.raises(MisconfigurationException, match="static_graph=True"):
            _fit(Scarce(), AutoMicroBatch(), strategy=strategy)
    return {
        "plain": _fit(Logs()),
        "none": _fit(Logs(), AutoMicroBatch(grow_after=None)),
        "unused": _unused(),
        "sparse": _sparse(),
        "sparse none": _sparse(AutoMicroBatch()),
        "sparse window": _sparse(accumulate_grad_batches=3),
    }


CASES: dict[str, Callable[[], Any]] = {
    "references": _references,
    "validation": lambda: _fit(Logs(), AutoMicroBatch(grow_after=None), fault="validation"),
    "step": lambda: _fit(Logs(), AutoMicroBatch(), fault="step"),
    "step after": lambda: _fit(Logs(), AutoMicroBatch(), fault="step after", on=0),
    "step rounds": lambda: _fit(Logs(), AutoMicroBatch(), fault="step rounds"),
    "step rounds last": lambda: _fit(Logs(), AutoMicroBatch(), fault="step rounds", max_steps=2),
    "hopeless": _hopeless,
    "hopeless in a window": lambda: _hopeless(AccumulationScheduler(6)),
}
for fault in ("forward", "backward"):
    CASES[fault] = lambda fault=fault: _fit(Logs(), AutoMicroBatch(grow_after=None), fault=fault)
    CASES[f"window {fault}"] = partial(_window, fault)
    CASES[f"float16 {fault}"] = partial(_float16, fault)
    CASES[f"unused {fault}"] = lambda fault=fault: _unused(AutoMicroBatch(), fault=fault)
    CASES[f"sparse {fault}"] = lambda fault=fault: _sparse(AutoMicroBatch(), fault=fault)
    CASES[f"sparse window {fault}"] = lambda fault=fault: _sparse(
        AutoMicroBatch(), fault=fault, accumulate_grad_batches=3
    )


def run_case(name: str) -> Any:
    return CASES[name]()


@cache
def case(name: str) -> list[Any]:
    """What a case gave on the two ranks; each one is run once."""
    return on_two_ranks(run_case, name, timeout=30.0)


def reference(name: str) -> list[Any]:
    return [rank[name] for rank in case("references")]


def _windows(factor: int) -> list[list[Tensor]]:
    zero, one = _data(0), _data(1)
    return [zero[i : i + factor] + one[i : i + factor] for i in range(0, len(zero), factor)]


def test_without_a_fault_all_is_as_without_the_callback_to_the_bit() -> None:
    for found, expected in zip(reference("none"), reference("plain"), strict=True):
        for what in ("weights", "buffers", "metrics"):
            torch.testing.assert_close(found[what], expected[what], rtol=0, atol=0)
        assert found["size"] is None


@pytest.mark.parametrize(
    ("fault", "size"),
    [("forward", 1), ("backward", 1), ("validation", None), ("step", None), ("step after", None)],
)
def test_a_fault_on_one_rank_changes_nothing_and_hangs_nobody(fault: str, size: int | None) -> None:
    for found, expected in zip(case(fault), reference("plain"), strict=True):
        torch.testing.assert_close(found["weights"], expected["weights"], rtol=1e-9, atol=1e-12)
        for name, value in expected["metrics"].items():
            assert found["metrics"][name] == pytest.approx(value, rel=1e-6), name
        assert found["size"] == size


def test_ranks_agree_after_the_batch_that_failed() -> None:
    assert len(case("forward")[1]["calls"]) > len(case("forward")[0]["calls"])
    # the rank that never failed runs its first batch whole, and in pieces after it
    assert case("backward")[0]["calls"][:7] == [6] + [1] * 6
    # and its third step takes one parameter after the other, as the other rank's does
    assert [rank["together"][:4] for rank in case("step")] == [[None, None, False, False]] * 2


@pytest.mark.parametrize("name", ["step rounds", "step rounds last"])
def test_ranks_stay_equal_to_the_bit_where_a_repeated_step_rounds_differently(name: str) -> None:
    zero, one = case(name)
    for what in ("weights", "state"):
        torch.testing.assert_close(zero[what], one[what], rtol=0, atol=0)


@pytest.mark.parametrize("fault", ["forward", "backward"])
def test_windows_of_unequal_batches_are_one_step_and_one_message(fault: str) -> None:
    for rank in case(f"window {fault}"):
        torch.testing.assert_close(rank["weights"], plain(_windows(4), 2), rtol=1e-9, atol=1e-12)
        assert rank["buckets"] == 4  # 2 epochs of 2 windows
    for rank in case(f"float16 {fault}"):
        torch.testing.assert_close(rank["weights"], plain(_windows(3), 2), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("fault", ["forward", "backward"])
def test_unused_parameters_are_found_as_in_ddp(fault: str) -> None:
    for found, expected in zip(case(f"unused {fault}"), reference("unused"), strict=True):
        torch.testing.assert_close(found["weights"], expected["weights"], rtol=1e-9, atol=1e-12)


def test_sparse_gradients_are_those_of_ddp() -> None:
    for found, expected in zip(reference("sparse none"), reference("sparse"), strict=True):
        torch.testing.assert_close(found["weights"], expected["weights"], rtol=0, atol=0)
    for kind in ("sparse", "sparse window"):
        for fault in ("forward", "backward"):
            for found, expected in zip(case(f"{kind} {fault}"), reference(kind), strict=True):
                torch.testing.assert_close(found["weights"], expected["weights"], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", ["hopeless", "hopeless in a window"])
def test_a_rank_that_cannot_go_on_says_why_and_the_other_one_stops_too(name: str) -> None:
    (kind, text, last), (failed, why, at) = case(name)
    assert (failed, kind) == ("OutOfMemoryError", "RuntimeError")
    assert "ran out of memory with 1 sample at once" in why
    assert "Another rank ended during a training step" in text
    assert (last, at) == (1, 1)  # at that batch, and not at the end of a window
