"""Every two callbacks in one Trainer, in both orders."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor

from lightning_speedkit import Float8Precision, OptimizerChoice
from lightning_speedkit.registry import Part
from tests.conformance.cases import CALLBACKS, PLUGINS, Case
from tests.conformance.models import Classifier, classifier, loader, quiet_trainer

# the optimizer of the table is schedule-free: it averages the weights, and stands for a schedule
REFUSED = {
    ("AutoMicroBatch", "BatchSizeSearch"): "beside AutoMicroBatch would find that every size fits",
    ("AverageWeights", "OptimizerChoice"): "AverageWeights and ScheduleFreeAdamW both average the weights",
    ("AverageWeights", "StructuredPruning"): "AverageWeights",
    ("CompileModel", "StructuredPruning"): "is compiled for the shapes that it has",
    ("NonFiniteGuard", "StructuredPruning"): "NonFiniteGuard",
    ("Pruning", "StructuredPruning"): "StructuredPruning",
    ("QuantizationAwareTraining", "StructuredPruning"): "QuantizationAwareTraining",
    ("SpikeGuard", "StructuredPruning"): "SpikeGuard",
    ("OptimizerChoice", "ScheduleChoice"): "Two schedules at once: 'warmup-cosine', and 'schedule-free'",
}
_MUON = Part(OptimizerChoice, {"optimizer": "muon", "lr": 0.02})
MUON = Case("OptimizerChoice", working=_MUON, neutral=_MUON)

WHATEVER_THEY_DO = {("AutoMicroBatch", "BatchSizeSearch")}  # refused in neutral settings too
ORDERED = [
    (one, other)
    for one, other in itertools.permutations(CALLBACKS, 2)
    if not WHATEVER_THEY_DO & {(one.name, other.name), (other.name, one.name)}
]
UNORDERED = list(itertools.combinations(CALLBACKS, 2))
NOT_SENSIBLE = [pair for pair in UNORDERED if (pair[0].name, pair[1].name) in REFUSED]
SENSIBLE = [pair for pair in UNORDERED if pair not in NOT_SENSIBLE] + [
    (MUON if one.name == MUON.name else one, MUON if other.name == MUON.name else other)
    for one, other in NOT_SENSIBLE
    if MUON.name in (one.name, other.name)
]


def _pairs(pairs: Sequence[tuple[Case, Case]]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(("one", "other"), pairs, ids=lambda case: case.name)


def _fitted(parts: Sequence[Part], max_epochs: int = 2, **options: Any) -> Classifier:
    model = classifier()
    torch.manual_seed(3)
    trainer = quiet_trainer([part.build() for part in parts], max_epochs=max_epochs, **options)
    trainer.fit(model, loader(), loader())
    return model


def _equal(one: Any, other: Any) -> None:
    torch.testing.assert_close(one, other, rtol=0, atol=0)


@pytest.fixture(scope="module")
def plain() -> Classifier:
    return _fitted([])


@_pairs(ORDERED)
def test_two_neutral_callbacks_are_bit_identical(one: Case, other: Case, plain: Classifier) -> None:
    model = _fitted([one.neutral, other.neutral])
    _equal(model.losses, plain.losses)
    _equal(model.state_dict(), plain.state_dict())


@_pairs(SENSIBLE)
def test_order_does_not_change_what_is_trained(one: Case, other: Case) -> None:
    parts = [one.working, other.working]
    weights: list[dict[str, Tensor]] = [_fitted(order, max_epochs=3).state_dict() for order in (parts, parts[::-1])]
    _equal(weights[0], weights[1])


@_pairs(NOT_SENSIBLE)
def test_what_is_not_sensible_together_is_refused_in_both_orders(one: Case, other: Case) -> None:
    parts = [one.working, other.working]
    for order in (parts, parts[::-1]):
        with pytest.raises(MisconfigurationException, match=REFUSED[one.name, other.name]):
            _fitted(order)


@pytest.mark.parametrize("plugin", PLUGINS, ids=lambda part: str(part.arguments))
@pytest.mark.parametrize("case", CALLBACKS, ids=lambda case: case.name)
def test_precision_plugin_beside_each_callback(case: Case, plugin: Part, tmp_path: Path) -> None:
    if plugin.cls is Float8Precision:
        pytest.importorskip("torchao")
    losses = [_fitted(parts, plugins=[plugin.build()]).losses for parts in ([], [case.neutral])]
    _equal(losses[0], losses[1])
