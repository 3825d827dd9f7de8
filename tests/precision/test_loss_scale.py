"""When a collapse of the loss scale is told, and when it ends the run: counted by hand."""

from __future__ import annotations

import warnings

import pytest

from lightning_speedkit.errors import DivergenceError
from lightning_speedkit.precision.loss_scale import LossScaleWatch


def _warned(watch: LossScaleWatch, scales: list[float]) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for scale in scales:
            watch.see_skip(scale)
    return [str(warning.message) for warning in caught]


def test_a_scale_above_the_floor_is_no_news() -> None:
    assert _warned(LossScaleWatch(1.0, 2), [8.0, 4.0, 2.0, 1.0]) == []


def test_the_first_scale_below_the_floor_is_told_once_with_the_remedies() -> None:
    watch = LossScaleWatch(2.0, 10)
    (said,) = _warned(watch, [4.0, 2.0, 1.0, 0.5])
    assert "fell to 1, below 2: 3 optimizer steps in a row" in said
    assert all(name in said for name in ("'guard-non-finite'", "'bf16-mixed'", "'fp32'"))
    watch.start()
    assert len(_warned(watch, [1.0])) == 1


def test_too_many_in_a_row_end_the_run() -> None:
    watch = LossScaleWatch(1.0, 3)
    _warned(watch, [2.0, 1.0, 0.5])
    with pytest.raises(DivergenceError, match=r"4 optimizer steps in a row.*fell to 0.25.*'bf16-mixed' or 'fp32'"):
        watch.see_skip(0.25)


def test_a_step_that_is_taken_begins_the_count_anew() -> None:
    watch = LossScaleWatch(1.0, 2)
    _warned(watch, [0.5, 0.25])
    watch.see_step()
    assert _warned(watch, [0.125, 0.0625]) == []
    assert watch.in_a_row == 2
