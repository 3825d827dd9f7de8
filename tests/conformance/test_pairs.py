"""Every two callbacks in one Trainer, in both orders."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch

from tests.conformance.cases import CALLBACKS, PLUGINS, Case
from tests.conformance.models import classifier, loader, quiet_trainer

pairs = pytest.mark.parametrize(
    ("one", "other"), list(itertools.permutations(CALLBACKS, 2)), ids=lambda case: case.name
)


@pairs
def test_two_neutral_callbacks_are_bit_identical(one: Case, other: Case) -> None:
    results = []
    for callbacks in ([], [one.neutral.build(), other.neutral.build()]):
        model = classifier()
        torch.manual_seed(3)
        quiet_trainer(callbacks, max_epochs=2).fit(model, loader(), loader())
        results.append(model)
    torch.testing.assert_close(results[1].losses, results[0].losses, rtol=0, atol=0)
    torch.testing.assert_close(results[1].state_dict(), results[0].state_dict(), rtol=0, atol=0)


@pairs
def test_order_does_not_change_what_is_trained(one: Case, other: Case) -> None:
    weights = []
    for callbacks in ([one.working, other.working], [other.working, one.working]):
        model = classifier()
        torch.manual_seed(3)
        quiet_trainer([part.build() for part in callbacks], max_epochs=3).fit(model, loader(), loader())
        weights.append(model.state_dict())
    torch.testing.assert_close(weights[0], weights[1], rtol=0, atol=0)


@pytest.mark.parametrize("plugin", PLUGINS, ids=lambda part: str(part.arguments))
@pytest.mark.parametrize("case", CALLBACKS, ids=lambda case: case.name)
def test_precision_plugin_beside_each_callback(case: Case, plugin: object, tmp_path: Path) -> None:
    losses = []
    for callbacks in ([], [case.neutral.build()]):
        model = classifier()
        torch.manual_seed(3)
        quiet_trainer(callbacks, max_epochs=2, plugins=[plugin.build()]).fit(model, loader(), loader())  # type: ignore[attr-defined]
        losses.append(model.losses)
    torch.testing.assert_close(losses[0], losses[1], rtol=0, atol=0)
