"""A step that cannot run without data says so."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn

from lightning_speedkit.memory import estimate_memory
from lightning_speedkit.memory.memory_estimate_refusals import telling_what_to_do


class _Step(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.function = nn.Linear(4, 4), function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.layer(x))


STEPS = {
    "item": lambda x: x * x.mean().item(),
    "condition": lambda x: x if x.sum() > 0 else -x,
    "mask": lambda x: x[x > 0],
    "nonzero": lambda x: x.nonzero().float() + x.sum(),
}


@pytest.mark.parametrize("name", STEPS)
def test_values_that_a_step_needs_are_told_and_run_has_them(name: str) -> None:
    model, batch = _Step(STEPS[name]), torch.ones(2, 4)
    with pytest.raises(ValueError, match=r"needs the values of a tensor \(.*method='run'"):
        estimate_memory(model, batch)
    assert estimate_memory(model, batch, method="run").peak_bytes > 0


def test_a_trainer_that_is_asked_for_is_told() -> None:
    class Asks(pl.LightningModule):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return batch.sum() * self.trainer.max_epochs

    with pytest.raises(ValueError, match=r"training_step asks for self.trainer"):
        estimate_memory(Asks(), torch.zeros(2))


def test_other_errors_are_the_users_own(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(RuntimeError, match="must have same reduction dim") as raised:
        estimate_memory(nn.Linear(4, 4), torch.zeros(2, 3))
    assert caplog.text == ""
    assert logging.getLogger("torch._subclasses.fake_tensor").filters == []
    if sys.version_info >= (3, 11):
        assert "a batch of these shapes: [2, 3]" in raised.value.__notes__[0]
    with pytest.raises(KeyError, match="mine"), telling_what_to_do("fake"):
        raise KeyError("mine")
