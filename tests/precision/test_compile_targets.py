"""Which modules are compiled."""

from __future__ import annotations

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torchmetrics import MeanMetric

from lightning_speedkit.precision.compile_targets import compile_targets


class Model(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(*(nn.Sequential(nn.Linear(2, 2), nn.ReLU()) for _ in range(2)))
        self.heads = nn.ModuleList([nn.Linear(2, 1), nn.Linear(2, 3)])
        self.loss = nn.MSELoss()
        self.metric = MeanMetric()


@pytest.mark.parametrize(
    ("modules", "paths"),
    [
        ("auto", ("encoder", "heads.0", "heads.1")),
        ("blocks", ("encoder.0", "encoder.1")),
        ("heads.*", ("heads.0", "heads.1")),
        (["Linear", "encoder"], ("encoder", "heads.0", "heads.1")),
    ],
)
def test_chosen(modules: str | list[str], paths: tuple[str, ...]) -> None:
    assert compile_targets(Model(), modules) == paths


@pytest.mark.parametrize(
    ("modules", "error", "said"),
    [
        ("encodr", ValueError, r"no path 'encodr' in the model. Did you mean 'encoder'\? Classes: Linear \(x4\), "),
        ("head.0", ValueError, r"Did you mean 'heads.0'"),
        ("zzz", ValueError, r"Paths: encoder, loss, metric, encoder.0, encoder.1, heads.0, heads.1, encoder.0.0, "),
        ("heads", ValueError, r"never called. Take what it holds: 'heads\.\*'"),
        ("Model", ValueError, "steps stay eager so that self.log works"),
        (["auto", "encoder"], ValueError, "mixes 'auto' with names"),
        ([], ValueError, "names nothing"),
        (3, TypeError, "a name or a list of names"),
    ],
)
def test_refused(modules: object, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        compile_targets(Model(), modules)  # type: ignore[arg-type]


def test_what_the_user_has_compiled_is_left_alone() -> None:
    model = Model()
    model.encoder = torch.compile(model.encoder, backend="eager")  # type: ignore[assignment]
    assert compile_targets(model) == ("heads.0", "heads.1")
    with pytest.raises(ValueError, match="compiled already"):
        compile_targets(model, "encoder")
