"""The rate that goes with another batch size: the factor by hand, and what a search sets."""

from __future__ import annotations

import pytest

from lightning_speedkit.memory.batch_size import BatchSizeSearch
from lightning_speedkit.memory.batch_size_rate import rate_factor
from tests.memory.scarce import Net, fit


@pytest.mark.parametrize(
    ("rule", "before", "after", "factor"),
    [("linear", 4, 12, 3.0), ("linear", 12, 4, 1 / 3), ("sqrt", 4, 36, 3.0), ("sqrt", 5, 5, 1.0), (None, 4, 12, 1.0)],
)
def test_the_factor(rule: str | None, before: int, after: int, factor: float) -> None:
    assert rate_factor(rule, before, after) == pytest.approx(factor)


@pytest.mark.parametrize(("rule", "rate"), [(None, 0.02), ("linear", 0.08), ("sqrt", 0.04)])
def test_the_rate_is_scaled_if_asked(rule: str | None, rate: float) -> None:
    search = BatchSizeSearch(start=16, limit=16, scale_lr=rule)
    _, run = fit(search, Net(), max_steps=0, max_epochs=1)
    assert run.optimizers[0].param_groups[0]["lr"] == pytest.approx(rate)
    assert run.lr_scheduler_configs[0].scheduler.base_lrs == pytest.approx([rate])
