"""What is named as the origin, for each way in which a number stops being finite; and that looking changes nothing."""

from __future__ import annotations

import contextlib
from typing import Any
from unittest import mock

import pytest
import torch
from lightning.pytorch import Callback
from torch import Tensor, nn
from torchmetrics import MeanMetric

from lightning_speedkit.optimize.non_finite_guard_origin import explain_non_finite, first_non_finite_module
from tests.optimize.line import Line, loader, trainer

NAN = float("nan")


class _Root(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.sqrt()


class _Net(Line):
    def __init__(self, fault: str) -> None:
        super().__init__(dtype=torch.float32)
        torch.manual_seed(2)
        self.fault = fault
        self.first = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
        self.root, self.last, self.mean = _Root(), nn.Linear(4, 1), MeanMetric()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        x = self.first(batch)
        x = self.root(x.square() - 10.0 if self.fault == "module" else x.square() + 1.0)
        x = self.last(x / 0 if self.fault == "between" else x)
        self.mean.update(x.mean())
        self.log("loss", x.mean(), on_step=True)
        loss = x.mean() * self.w
        return loss.log() * 0 - 1 / (loss * 0) if self.fault == "loss" else loss


class _Explains(Callback):
    def __init__(self) -> None:
        self.told: str | None = None

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        torch.manual_seed(3)
        if pl_module.fault == "backward":
            pl_module.first[0].weight.grad[0, 0] = NAN
        if pl_module.fault == "weights":
            pl_module.last.weight.data[0, 1] = NAN
        before = {name: value.clone() for name, value in pl_module.state_dict().items()}
        state, updates = torch.get_rng_state(), pl_module.mean._update_count
        batch = torch.full((5, 3), NAN) if pl_module.fault == "batch" else torch.rand(5, 3)
        state = torch.get_rng_state()
        self.told = explain_non_finite(trainer, pl_module, batch, 0)
        torch.testing.assert_close(pl_module.state_dict(), before, rtol=0, atol=0, equal_nan=True)
        assert torch.equal(torch.get_rng_state(), state)
        assert pl_module.mean._update_count == updates
        assert not any(module._forward_hooks for module in pl_module.modules())


@pytest.mark.filterwarnings("error:You are trying to")
@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ("batch", "it is in the batch"),
        ("weights", "it is in the weights of 'last.weight' already"),
        ("module", "module 'root' (_Root) returned it"),
        ("between", "it went into module 'last' (Linear), computed outside of modules"),
        ("loss", "training_step made it of finite outputs of modules"),
        ("backward", "the backward pass made it; the last parameter with such a gradient is 'first.0.weight'"),
        ("none", None),
    ],
)
def test_the_origin_is_named(fault: str, told: str | None) -> None:
    explains = _Explains()
    trainer(explains).fit(_Net(fault), loader([torch.rand(5, 3)]))
    assert explains.told == told


def test_a_module_that_cannot_run_alone_is_told_by_its_gradients() -> None:
    class Needs(_Net):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            return super().training_step(batch, batch_idx) * (1 + self.trainer.current_epoch)

    explains = _Explains()
    trainer(explains).fit(Needs("backward"), loader([torch.rand(5, 3)]))
    assert explains.told is not None
    assert explains.told.startswith("the backward pass")


@pytest.mark.parametrize(
    ("fault", "rank", "told"),
    [
        ("module", 1, "on rank 1, module 'root' (_Root) returned it"),
        ("loss", 0, "on rank 0, training_step made it of finite outputs of modules"),
        ("backward", 1, None),
        (
            "backward",
            0,
            "another rank, which then names itself, or the backward pass made it; the last parameter with such a "
            "gradient is 'last.weight'",
        ),
    ],
)
def test_with_several_ranks_the_one_that_has_it_names_itself(fault: str, rank: int, told: str | None) -> None:
    net = _Net(fault)
    net.last.weight.grad = torch.full((1, 4), NAN)
    run = mock.Mock(world_size=2, global_rank=rank, accumulate_grad_batches=1)
    run.precision_plugin.train_step_context = contextlib.nullcontext
    assert explain_non_finite(run, net, torch.rand(5, 3), 0) == told


def test_what_fails_because_of_it_does_not_hide_it() -> None:
    net = nn.Sequential(_Root(), nn.Identity())

    def run() -> None:
        net(-torch.ones(2))
        raise ValueError("a check of the user")

    assert first_non_finite_module(net, run) == "module '0' (_Root) returned it"
    net[0] = nn.Identity()
    with pytest.raises(ValueError, match="a check of the user"):
        first_non_finite_module(net, run)
