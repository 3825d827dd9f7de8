"""Which optimizers an estimate steps with."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lightning_speedkit.memory.memory_estimate_optimizer import make_optimizers


@pytest.mark.parametrize(
    ("name", "cls"),
    [("adamw", torch.optim.AdamW), ("AdamW", torch.optim.AdamW), ("sgd", torch.optim.SGD), ("auto", torch.optim.AdamW)],
)
def test_a_name_is_a_class_of_torch(name: str, cls: type) -> None:
    (made,) = make_optimizers(nn.Linear(2, 2), name)
    assert type(made) is cls


def test_momentum_frozen_and_none() -> None:
    model = nn.Linear(2, 2)
    model.bias.requires_grad_(False)
    (made,) = make_optimizers(model, "sgd-momentum")
    assert made.defaults["momentum"] == 0.9
    assert made.param_groups[0]["params"] == [model.weight]
    assert make_optimizers(model, "none") == []
    model.weight.requires_grad_(False)
    assert make_optimizers(model, "adamw") == []


class _Configured(nn.Module):
    def __init__(self, form: str) -> None:
        super().__init__()
        self.layer, self.form = nn.Linear(2, 2), form

    def configure_optimizers(self) -> Any:
        one, other = torch.optim.SGD([self.layer.weight]), torch.optim.Adam([self.layer.bias])
        schedule = torch.optim.lr_scheduler.StepLR(one, 1)
        return {
            "one": one,
            "list": [one, other],
            "lists": ([one, other], [schedule]),
            "dict": {"optimizer": one, "lr_scheduler": schedule},
            "dicts": ({"optimizer": one}, {"optimizer": other}),
            "none": None,
        }[self.form]


@pytest.mark.parametrize(
    ("form", "count"), [("one", 1), ("list", 2), ("lists", 2), ("dict", 1), ("dicts", 2), ("none", 0)]
)
def test_every_form_that_lightning_takes(form: str, count: int) -> None:
    made = make_optimizers(_Configured(form), "auto")
    assert [type(one) for one in made] == [torch.optim.SGD, torch.optim.Adam][:count]


def test_a_configuration_that_needs_a_trainer_is_told() -> None:
    model = _Configured("one")

    def needs_trainer() -> Any:
        raise RuntimeError("is not attached to a `Trainer`.")

    model.configure_optimizers = needs_trainer  # type: ignore[method-assign]
    with pytest.raises(ValueError, match=r"cannot run without a trainer: .* Name an optimizer, for example 'adamw'"):
        make_optimizers(model, "auto")
    assert len(make_optimizers(model, "adamw")) == 1


def test_what_is_neither_a_name_nor_a_function_is_told() -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(TypeError, match=r"a function from parameters to an optimizer; got SGD\. .* give 'none'"):
        make_optimizers(model, torch.optim.SGD(model.parameters()))  # type: ignore[arg-type]
