"""What the guards refuse."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy

from lightning_speedkit.optimize.non_finite_guard import NonFiniteGuard
from lightning_speedkit.optimize.skipped_steps_refusals import checked_limit, refuse_guard
from lightning_speedkit.optimize.spike_guard import SpikeGuard
from tests.optimize.line import Line, batches_of, loader, trainer


@pytest.mark.parametrize(("value", "error"), [(0, ValueError), (-1, ValueError), (1.5, TypeError), (True, TypeError)])
def test_limits(value: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="most="):
        checked_limit("most", value)
    assert checked_limit("most", 3) == 3


class _Manual(Line):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class _LBFGS(Line):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters())


@pytest.mark.parametrize("guard", [NonFiniteGuard, SpikeGuard])
@pytest.mark.parametrize(
    ("model", "count", "words"),
    [(_Manual, 1, "automatic_optimization = False"), (Line, 2, "Two .*Guard callbacks"), (_LBFGS, 1, "LBFGS")],
)
def test_combinations_that_cannot_be_are_told(guard: Any, model: Any, count: int, words: str) -> None:
    others = [type("Other", (guard,), {})() for _ in range(count - 1)]
    with pytest.raises(MisconfigurationException, match=words):
        trainer(guard(), *others).fit(model(), loader(batches_of(1, 1)))


@pytest.mark.parametrize("strategy", [DeepSpeedStrategy, FSDPStrategy])
def test_strategies_with_gradients_of_their_own_are_refused(strategy: Any) -> None:
    run = mock.Mock(callbacks=[], strategy=strategy.__new__(strategy))
    with pytest.raises(MisconfigurationException, match=strategy.__name__):
        refuse_guard(NonFiniteGuard(), run, Line())
