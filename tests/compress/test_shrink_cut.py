from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.strategies import DDPStrategy
from torch import nn

from lightning_speedkit.compress.shrink_cut import apply_plan, given_gradients, gradients_of, wrap_again
from lightning_speedkit.compress.shrink_resize import original_sizes
from tests.compress.shrink_models import Residual, plan_of, randomised


def test_the_first_sizes_are_kept_over_several_cuts() -> None:
    model = randomised(Residual())
    for ratio in (0.25, 0.5):
        plan = plan_of(model, ratio)
        apply_plan(model, plan)
    assert original_sizes(model)["inner.weight"] == [12, 8, 3, 3]
    assert "on_save_checkpoint" not in vars(model)  # it is no LightningModule


def test_gradients_are_given_only_for_taylor() -> None:
    layer = nn.Linear(2, 1)
    assert given_gradients(gradients_of(layer), "magnitude") is None
    with pytest.raises(MisconfigurationException, match="run a backward pass first"):
        given_gradients(gradients_of(layer), "taylor")
    layer(torch.ones(1, 2)).sum().backward()
    told = given_gradients(gradients_of(layer), "taylor")
    assert told is not None
    assert torch.equal(told["weight"], torch.ones(1, 2))


def test_only_ddp_is_wrapped_again_and_around_the_module_itself() -> None:
    class Recorder(DDPStrategy):
        def configure_ddp(self) -> None:
            wrapped.append(self.model)

    wrapped: list[object] = []
    module = nn.Linear(2, 1)
    wrap_again(SimpleNamespace(strategy=Recorder(), lightning_module=module))  # type: ignore[arg-type]
    assert wrapped == [module]
    wrap_again(SimpleNamespace(strategy=object(), lightning_module=module))  # type: ignore[arg-type]
