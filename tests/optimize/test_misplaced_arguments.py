"""What was given in the wrong place is told where it belongs, and signatures stay as they were."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from lightning_speedkit.optimize import (
    AverageWeights,
    GradientClipping,
    OptimizerChoice,
    ScheduleChoice,
    SpikeGuard,
    build_optimizer,
    build_schedule,
)

NET = nn.Linear(2, 2)
SGD = torch.optim.SGD(NET.parameters(), lr=0.1)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: OptimizerChoice("adamw", betas=[0.9, 0.95]), TypeError, r"OptimizerChoice\(.*options={'betas': ...}"),
        (lambda: OptimizerChoice("sgd-momentum", momentum=0.8), TypeError, r"options={'momentum': ...}"),
        (lambda: OptimizerChoice("adamw", weight_decy=0.1), TypeError, "Did you mean 'weight_decay'"),
        (lambda: OptimizerChoice(1e-3), TypeError, "write lr=0.001"),
        (lambda: build_optimizer("adamw", NET, 0.1, betas=[0.9, 0.95]), TypeError, r"build_optimizer\(.*'betas'"),
        (lambda: ScheduleChoice("reduce-on-plateau", patience=3), TypeError, r"ScheduleChoice\(.*'patience'"),
        (lambda: ScheduleChoice("reduce-on-plateau", options={"monitor": "x"}), ValueError, "monitor is no option"),
        (lambda: ScheduleChoice("linear", options={"warmup": 3}), ValueError, "warmup is no option"),
        (lambda: build_schedule("linear", SGD, 10, decay=0.1), TypeError, r"build_schedule\(.*'decay'"),
        (lambda: build_schedule(SGD, "linear", 10), TypeError, r"name comes first: build_schedule\('linear', opt"),
        (lambda: GradientClipping(1.0), ValueError, r"threshold is limit=1.0"),
        (lambda: GradientClipping("nrom"), ValueError, "Did you mean 'norm'"),
        (lambda: GradientClipping("percentile", 0.9), ValueError, "write limit=90"),
        (lambda: AverageWeights(0.999), ValueError, "write decay=0.999"),
        (lambda: AverageWeights("swa", decay=0.9), ValueError, "decay=0.9 belongs to by='ema'"),
        (lambda: AverageWeights("swa", warmup=False), ValueError, "warmup=False belongs to by='ema'"),
        (lambda: AverageWeights(device="gpu"), ValueError, "device='gpu' is no device.* A GPU is 'cuda'"),
        (lambda: SpikeGuard(3.0), ValueError, "write threshold=3.0"),
        (lambda: SpikeGuard("rolback"), ValueError, "Did you mean 'rollback'"),
    ],
)
def test_a_hint_names_the_place(call: Callable[[], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize("function", [OptimizerChoice, ScheduleChoice, build_optimizer, build_schedule])
def test_the_signature_has_no_keywords_without_a_name(function: Callable[..., Any]) -> None:
    kinds = {parameter.kind for parameter in inspect.signature(function).parameters.values()}
    assert not kinds & {inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL}
