from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint, StochasticWeightAveraging
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy
from torch import nn
from torch.nn.utils import parametrizations, prune

from lightning_speedkit.compress.shrink import StructuredPruning
from lightning_speedkit.compress.shrink_refusals import refuse_judging, refuse_module, refuse_optimizers, refuse_run


def _trainer(strategy: Any = None, *callbacks: Any) -> Any:
    return SimpleNamespace(
        strategy=strategy,
        callbacks=list(callbacks),
        checkpoint_callbacks=[c for c in callbacks if isinstance(c, ModelCheckpoint)],
        early_stopping_callbacks=[c for c in callbacks if isinstance(c, EarlyStopping)],
    )


def _masked() -> nn.Module:
    layer = nn.Linear(4, 4)
    prune.l1_unstructured(layer, "weight", 0.5)
    return layer


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: torch.compile(nn.Linear(2, 2), backend="eager"), "is compiled for the shapes that it has"),
        (lambda: nn.Sequential(nn.LazyLinear(3)), "'0' is lazy and has no sizes yet: run the model once first"),
        (lambda: nn.Sequential(parametrizations.weight_norm(nn.Linear(2, 2))), "The weight of '0' is computed by"),
        (lambda: _masked(), "The weight of Linear is computed by a parametrization or a pruning mask"),
    ],
)
def test_modules_whose_weights_are_not_their_own(make: Any, message: str) -> None:
    with pytest.raises(MisconfigurationException, match=message):
        refuse_module(make())


def test_compiled_in_place() -> None:
    layer = nn.Linear(2, 2)
    layer.compile(backend="eager")
    with pytest.raises(MisconfigurationException, match="Linear is compiled"):
        refuse_module(layer)


def test_runs_that_would_keep_the_old_shapes() -> None:
    module: Any = nn.Linear(2, 2)
    with pytest.raises(MisconfigurationException, match="FSDPStrategy has spread them over devices"):
        refuse_run(_trainer(FSDPStrategy()), module)
    with pytest.raises(MisconfigurationException, match="ddp_comm_state"):
        refuse_run(_trainer(DDPStrategy(ddp_comm_state=object())), module)
    with pytest.raises(MisconfigurationException, match="StochasticWeightAveraging keeps copies"):
        refuse_run(_trainer(None, StochasticWeightAveraging(0.1)), module)
    refuse_run(_trainer(DDPStrategy()), module)


def test_the_metric_is_the_one_that_is_watched() -> None:
    watched = _trainer(None, ModelCheckpoint(monitor="val_acc", mode="max"), EarlyStopping("val_loss"))
    assert refuse_judging(watched, None, 1) == ("val_acc", "max")
    assert refuse_judging(watched, "val_loss", 1) == ("val_loss", "min")
    assert refuse_judging(_trainer(), "val_f1", 1) == ("val_f1", "max")
    with pytest.raises(MisconfigurationException, match="max_metric_drop needs a metric"):
        refuse_judging(_trainer(), None, 1)
    with pytest.raises(MisconfigurationException, match="before epoch 0 there is none"):
        refuse_judging(watched, None, 0)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"ratio": 1.0}, ValueError, "ratio is the share that goes and must be at least 0 and below 1, got 1.0"),
        ({"head_ratio": -0.1}, ValueError, "head_ratio is the share"),
        ({"ratio": "half"}, TypeError, "ratio must be a number, got 'half'"),
        ({"steps": 0}, ValueError, "steps must be at least 1, got 0"),
        ({"start_epoch": -1}, ValueError, "start_epoch must be at least 0, got -1"),
        ({"round_to": 2.0}, TypeError, "round_to must be a whole number, got 2.0"),
        ({"criterion": "magnitud"}, ValueError, "criterion must be one of .* Did you mean 'magnitude'"),
        ({"skip": "head"}, TypeError, r"skip must be a list of names, got the string 'head'; write \['head'\]"),
        ({"max_metric_drop": float("nan")}, ValueError, "got NaN"),
        ({"max_metric_drop": "1%"}, TypeError, "max_metric_drop must be a number or None, got '1%'"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        StructuredPruning(**arguments)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_what_cannot_be_cut_at_all() -> None:
    script: Any = torch.jit.script
    with pytest.raises(MisconfigurationException, match="is scripted, and cannot be cut"):
        refuse_module(script(nn.Linear(2, 2)))
    with pytest.raises(TypeError, match=r"is a torch.nn.Module, got 'net'"):
        refuse_module("net")  # type: ignore[arg-type]
    weight = nn.Parameter(torch.ones(1))
    with pytest.raises(MisconfigurationException, match="LBFGS keeps the sizes of all parameters in one piece"):
        refuse_optimizers([torch.optim.Adam([weight]), torch.optim.LBFGS([weight])])
