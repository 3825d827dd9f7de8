"""States on the host, with a stand-in for torchao: there is no GPU to try it on."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn

from lightning_speedkit.errors import MissingExtraError
from lightning_speedkit.optimize import GradientClipping, NonFiniteGuard, build_optimizer
from lightning_speedkit.optimize import optimizer as optimizer_module
from lightning_speedkit.optimize.offloaded_adamw import OFFLOADED, refuse_late_changes
from lightning_speedkit.optimize.optimizers_for import fitting_options
from tests.optimize.line import trainer


class _CPUOffloadOptimizer(torch.optim.AdamW):
    """Has the signature of torchao's."""

    def __init__(
        self,
        params: Any,
        optimizer_class: Any = torch.optim.AdamW,
        *,
        offload_gradients: bool = False,
        minimal_size: int = 4096,
        **kwargs: Any,
    ) -> None:
        self.minimal_size = minimal_size
        super().__init__(params, **kwargs)


@pytest.fixture
def torchao(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("torchao.optim")
    module.CPUOffloadOptimizer = _CPUOffloadOptimizer  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torchao", ModuleType("torchao"))
    monkeypatch.setitem(sys.modules, "torchao.optim", module)


def test_it_gets_the_groups_and_the_options(torchao: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimizer_module, "check_devices", lambda _: None)  # as if the weights were on a GPU
    options = {"betas": [0.8, 0.9], "minimal_size": 7}
    built = build_optimizer(OFFLOADED, nn.Linear(2, 3), 0.1, options=options)
    assert isinstance(built, _CPUOffloadOptimizer)
    assert [(g["lr"], g["weight_decay"], g["betas"]) for g in built.param_groups] == [
        (0.1, 0.01, (0.8, 0.9)),
        (0.1, 0.0, (0.8, 0.9)),
    ]
    assert built.minimal_size == 7
    with pytest.raises(ValueError, match="'offload_gradients'"):  # gradients that accumulate would be lost
        build_optimizer(OFFLOADED, nn.Linear(2, 3), 0.1, options={"offload_gradients": True})


def test_weights_on_the_host_are_refused(torchao: None) -> None:
    with pytest.raises(ValueError, match=r"for weights on a CUDA or XPU device, and some are on 'cpu'\. Use 'adamw'"):
        build_optimizer(OFFLOADED, nn.Linear(2, 3), 0.1)


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimizer_module, "check_devices", lambda _: None)
    for module in ("torchao", "torchao.optim"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MissingExtraError, match="'adamw-cpu-offload' needs torchao"):
        build_optimizer(OFFLOADED, nn.Linear(2, 3), 0.1)


@pytest.mark.parametrize(
    ("callbacks", "options", "named"),
    [
        ([GradientClipping()], {}, "GradientClipping"),
        ([NonFiniteGuard()], {}, "NonFiniteGuard"),
        ([], {"gradient_clip_val": 0.5}, r"gradient_clip_val=0.5"),
    ],
)
def test_what_changes_gradients_later_is_refused(callbacks: Any, options: Any, named: str) -> None:
    with pytest.raises(MisconfigurationException, match=rf"copies each gradient .*{named}"):
        fitting_options(trainer(*callbacks, **options), OFFLOADED, None)
    refuse_late_changes(trainer())
