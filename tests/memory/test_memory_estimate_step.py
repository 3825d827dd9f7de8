"""The loss that an estimated step goes back from."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_speedkit.memory.memory_estimate_step import loss_of


class _Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, x: Tensor, scale: float = 1.0) -> dict[str, Any]:
        return {"y": self.layer(x) * scale, "also": [self.layer(x), torch.ones(3)], "name": "x"}


def test_without_a_loss_it_is_the_mean_of_what_can_be_trained() -> None:
    model, x = _Two(), torch.ones(3, 2)
    plain = model.layer(x).mean()
    assert torch.allclose(loss_of(model, x, None), 2 * plain)
    assert torch.allclose(loss_of(model, (x, 3.0), None), 4 * plain)
    assert torch.allclose(loss_of(model, {"x": x, "scale": 2.0}, None), 3 * plain)


def test_a_loss_takes_output_and_target() -> None:
    model, x, y = nn.Linear(2, 2), torch.ones(3, 2), torch.zeros(3, 2)
    assert torch.equal(loss_of(model, (x, y), nn.functional.mse_loss), nn.functional.mse_loss(model(x), y))


class _Steps(nn.Module):
    automatic_optimization = True

    def __init__(self, returned: Any) -> None:
        super().__init__()
        self.returned = returned

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.returned


ONE = torch.ones((), requires_grad=True)


def test_the_step_of_a_lightning_module_returns_a_loss_or_a_dict() -> None:
    assert loss_of(_Steps(ONE), None, None) is ONE
    assert loss_of(_Steps({"loss": ONE, "more": 1}), None, None) is ONE


class _WithoutNumber(nn.Module):
    def training_step(self, batch: Any) -> Any:
        return batch


def test_a_step_need_not_take_the_number_of_the_batch() -> None:
    assert loss_of(_WithoutNumber(), ONE, None) is ONE


@pytest.mark.parametrize(
    ("returned", "got"),
    [
        (None, "NoneType"),
        ({}, "NoneType"),
        (torch.ones(2, requires_grad=True), r"a tensor of shape \(2,\)"),
        (1.0, "float"),
    ],
)
def test_what_is_no_loss_is_told(returned: Any, got: str) -> None:
    with pytest.raises(ValueError, match=f"training_step returned {got}; a scalar that needs a gradient"):
        loss_of(_Steps(returned), None, None)


def test_what_cannot_be_estimated_is_told() -> None:
    manual = _Steps(ONE)
    manual.automatic_optimization = False
    with pytest.raises(ValueError, match="optimizes manually"):
        loss_of(manual, None, None)
    with pytest.raises(ValueError, match="loss belongs to a plain module"):
        loss_of(_Steps(ONE), None, nn.functional.mse_loss)
    with pytest.raises(ValueError, match="No output of the module needs a gradient"):
        loss_of(nn.Identity(), torch.ones(2), None)
