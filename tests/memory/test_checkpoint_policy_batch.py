"""A memory budget in a fit: the plan comes from the first batch, and nothing else about the fit changes."""

from __future__ import annotations

from collections import deque
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric

from lightning_speedkit.memory import ActivationCheckpointing
from lightning_speedkit.memory.batch_size import BatchSizeSearch
from lightning_speedkit.memory.recomputation import Recomputed
from tests.memory.scarce import quick_collections
from tests.two_ranks import on_two_ranks


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 64), nn.BatchNorm1d(64), nn.Tanh(), nn.Dropout(0.2), nn.Linear(64, 8))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.body(x)
        return result


class Module(pl.LightningModule):
    """Counts its batches, gathers losses, updates a metric, logs, and takes its batch apart."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.network = nn.Sequential(*(Block() for _ in range(4)), nn.Linear(8, 1))
        self.mean = MeanMetric()
        self.seen = 0
        self.losses: list[Tensor] = []

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        x, y = batch.pop("x"), batch.pop("y")
        x.mul_(0.5)
        self.seen += 1
        loss = nn.functional.mse_loss(self.network(x), y)
        self.losses.append(loss.detach())
        self.mean.update(loss.detach())
        self.log("loss", loss, on_step=False, on_epoch=True, batch_size=128)
        self.log_dict({"mean": self.mean}, on_step=False, on_epoch=True, batch_size=128)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)

    def train_dataloader(self) -> Any:
        generator = torch.Generator().manual_seed(2)
        data = TensorDataset(torch.randn(512, 8, generator=generator), torch.randn(512, 1, generator=generator))
        return DataLoader(data, batch_size=128, generator=torch.Generator(), collate_fn=_as_dict)


def _as_dict(samples: list[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    x, y = zip(*samples, strict=True)
    return {"x": torch.stack(x), "y": torch.stack(y)}


class Spy(Callback):
    def __init__(self) -> None:
        self.in_batch: set[tuple[str, ...]] = set()
        self.plans: list[Any] = []

    def on_before_zero_grad(self, trainer: Any, pl_module: pl.LightningModule, optimizer: Any) -> None:
        self.in_batch.add(_checkpointed(pl_module))
        self.plans += [one.plan for one in trainer.callbacks if isinstance(one, ActivationCheckpointing)]


def _checkpointed(model: nn.Module) -> tuple[str, ...]:
    return tuple(path for path, module in model.named_modules() if isinstance(module, Recomputed))


def _fit(module: Module, *callbacks: Callback, **arguments: Any) -> dict[str, Any]:
    torch.manual_seed(1)
    defaults: dict[str, Any] = {"accelerator": "cpu", "devices": 1, "max_epochs": 2, "logger": False}
    quiet = {"enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = pl.Trainer(**{**defaults, **quiet, **arguments}, callbacks=list(callbacks))
    trainer.fit(module)
    logged = {name: value.item() for name, value in trainer.callback_metrics.items()}
    weights = {name: value.clone() for name, value in module.state_dict().items()}
    return {"logged": logged, "weights": weights, "seen": module.seen, "losses": module.losses}


def _same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return (
        one["logged"] == other["logged"]
        and one["seen"] == other["seen"] == 8
        and torch.equal(torch.stack(one["losses"]), torch.stack(other["losses"]))
        and all(torch.equal(value, other["weights"][name]) for name, value in one["weights"].items())
    )


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_fit_under_a_budget_is_the_same_and_keeps_it(accumulate: int, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="lightning.pytorch.utilities.rank_zero")
    spy, module = Spy(), Module()
    callback = ActivationCheckpointing(budget=0.6)
    told = _fit(module, callback, spy, accumulate_grad_batches=accumulate)
    assert _same(_fit(Module(), accumulate_grad_batches=accumulate), told)
    (paths,) = spy.in_batch
    plan = spy.plans[0]
    assert paths == plan.paths != ()
    assert all(path.startswith("network.") for path in paths)
    assert plan.peak_bytes <= 0.6 * plan.plain_peak_bytes
    assert all(other is plan for other in spy.plans)  # found once
    assert (_checkpointed(module), callback.plan, callback.paths) == ((), plan, ())  # the plan can be read afterwards
    told = [record.getMessage() for record in caplog.records if "ActivationCheckpointing" in record.getMessage()]
    assert told == [f"ActivationCheckpointing(budget=0.6): {plan.describe()}"]
    assert f"recomputed: {', '.join(paths)}. Without, the step peaks at {plan.plain_peak_bytes:,} bytes" in told[0]


def test_a_budget_that_everything_is_within_checkpoints_nothing() -> None:
    spy = Spy()
    assert _same(_fit(Module(), ActivationCheckpointing(budget="1GB"), spy), _fit(Module()))
    assert spy.in_batch == {()}


def test_a_second_fit_plans_anew() -> None:
    callback, spies = ActivationCheckpointing("Block", budget=0.6), [Spy(), Spy()]
    for spy in spies:
        _fit(Module(), callback, spy)
    plans = [spy.plans[0] for spy in spies]
    assert plans[0] is not plans[1]
    for spy, plan in zip(spies, plans, strict=True):  # they may differ, since seconds do
        assert spy.in_batch == {plan.paths} != {()}
        assert plan.peak_bytes <= 0.6 * plan.plain_peak_bytes


class Stateful(Module):
    """Also averages its weights, and counts in a tensor that is no buffer, in a nested list and in a deque."""

    def __init__(self) -> None:
        super().__init__()
        self.average = nn.Linear(8, 1).requires_grad_(False)
        self.count, self.nested, self.recent = torch.zeros(1), {"steps": [0]}, deque[int]()

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        self.average.weight.data.lerp_(torch.ones(1, 8), 0.1)
        self.count += 1
        self.nested["steps"][0] += 1
        self.recent.append(batch_idx)
        return super().training_step(batch, batch_idx)


def test_what_the_step_writes_elsewhere_is_as_without_a_budget() -> None:
    plain, planned = Stateful(), Stateful()
    assert _same(_fit(plain), _fit(planned, ActivationCheckpointing("Block", budget=0.6)))
    for module in (plain, planned):
        assert (module.count.item(), module.nested, list(module.recent)) == (8, {"steps": [8]}, [0, 1, 2, 3] * 2)


class Sized(Module):
    """Lets the size of its batches be set, and notes where how many samples ran through checkpointed blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.batch_size = 4
        self.ran: list[tuple[int, bool]] = []

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        self.ran.append((len(batch["x"]), _checkpointed(self) != ()))
        return super().training_step(batch, batch_idx)

    def train_dataloader(self) -> Any:
        data = TensorDataset(torch.randn(64, 8), torch.randn(64, 1))
        return DataLoader(data, batch_size=self.batch_size, collate_fn=_as_dict)


class Tried(BatchSizeSearch):
    """Notes what ran in its trials, which a module forgets after each."""

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.ran: list[tuple[int, bool]] = []
        hook = pl_module.network.register_forward_pre_hook(  # type: ignore[operator, union-attr]
            lambda network, inputs: self.ran.append((len(inputs[0]), _checkpointed(network) != ()))
        )
        super().on_fit_start(trainer, pl_module)
        hook.remove()


@pytest.mark.parametrize("order", [1, -1])
def test_beside_a_search_for_the_batch_size_the_plan_is_for_the_size_found(order: int) -> None:
    for options, in_trials in (({"budget": 0.6}, False), ({}, True)):
        module, search, spy = Sized(), Tried(start=16, limit=32, steps=2), Spy()
        with quick_collections():
            _fit(module, *[search, ActivationCheckpointing("Block", **options), spy][::order], max_epochs=1)
        assert set(search.ran) == {(16, in_trials), (32, in_trials)}
        assert {size for size, _ in module.ran} == {32}
        assert module.ran[-1] == (32, True)
        assert () not in spy.in_batch


def test_a_budget_that_is_too_small_says_the_least_and_stops_the_fit() -> None:
    module = Module()
    with pytest.raises(ValueError, match="the least that can be reached is"):
        _fit(module, ActivationCheckpointing(budget="100B"))
    assert _checkpointed(module) == ()


class Manual(Module):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class NoLoss(Module):
    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:  # type: ignore[override]
        return None


@pytest.mark.parametrize(("module", "message"), [(Manual, "manual optimization"), (NoLoss, "gave no loss")])
def test_a_fit_that_cannot_be_tried_is_refused(module: type[Module], message: str) -> None:
    with pytest.raises(MisconfigurationException, match=message):
        _fit(module(), ActivationCheckpointing(budget=0.5))


@pytest.mark.parametrize(
    "arguments", [{"budget": 0}, {"budget": 1.5}, {"budget": "lots"}, {"budget": 0.5, "policy": "selective"}]
)
def test_a_wrong_budget_is_refused_at_once(arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="budget="):
        ActivationCheckpointing(**arguments)
    with pytest.raises(ValueError, match=r"goes with policy='full' and every=1"):
        ActivationCheckpointing(budget=0.5, every=2)


def _on_a_rank() -> tuple[bool, bool, str]:
    spy = Spy()
    arguments: dict[str, Any] = {"devices": 2, "accumulate_grad_batches": 2, "use_distributed_sampler": True}
    ddp: dict[str, Any] = {"process_group_backend": "gloo"}
    plain = _fit(Module(), strategy=DDPStrategy(**ddp), **arguments)
    told = _fit(Module(), ActivationCheckpointing(budget=0.6), spy, strategy=DDPStrategy(**ddp), **arguments)
    same = all(torch.equal(value, told["weights"][name]) for name, value in plain["weights"].items())
    try:
        _fit(Module(), ActivationCheckpointing(budget=0.6), strategy=DDPStrategy(static_graph=True, **ddp), **arguments)
    except MisconfigurationException as error:
        return same, spy.in_batch != {()}, str(error)
    return same, True, "nothing was raised"


def test_on_two_ranks() -> None:
    for same, checkpointed, error in on_two_ranks(_on_a_rank):
        assert same
        assert checkpointed
        assert "a static graph of DDP" in error
