"""When skips are told, and when there are too many."""

from __future__ import annotations

from unittest import mock

import pytest

from lightning_speedkit.errors import DivergenceError
from lightning_speedkit.optimize.non_finite_guard import NonFiniteGuard
from lightning_speedkit.optimize.non_finite_guard_count import SkipCount
from tests.optimize.line import Line
from tests.optimize.test_non_finite_guard import batches, fit, with_bad

NAN = float("nan")


@pytest.mark.parametrize(
    ("bad", "arguments", "fails"),
    [
        ({1, 2, 3}, {"max_in_a_row": 3}, False),
        ({1, 2, 3, 4}, {"max_in_a_row": 3}, True),
        ({1, 2, 4, 5, 6}, {"max_in_a_row": 3}, False),
        ({1, 3, 5}, {"max_total": 3}, False),
        ({1, 3, 5, 7}, {"max_total": 3}, True),
    ],
)
def test_too_many_skips_are_an_error(bad: set[int], arguments: dict[str, int], fails: bool) -> None:
    data = with_bad(batches(), dict.fromkeys(bad, NAN))
    if not fails:
        fit(data, NonFiniteGuard(**arguments))
        return
    with pytest.raises(DivergenceError, match=r"4 optimizer steps .* it is in the batch\. Look at that first"):
        fit(data, NonFiniteGuard(**arguments))


def test_the_first_is_told_and_a_good_step_starts_anew(recwarn: pytest.WarningsRecorder) -> None:
    count, run = SkipCount(2, None, explain=False), mock.Mock(current_epoch=3)
    count.add(run, Line(), (None, 7))
    count.add(run, Line(), (None, 8))
    assert [str(w.message)[:79] for w in recwarn] == [
        "The gradient of batch 7 in epoch 3 is not finite, and its step is skipped. Furt"
    ]
    count.in_a_row = 0
    count.add(run, Line(), (None, 9))
    count.add(run, Line(), (None, 10))
    with pytest.raises(DivergenceError, match=r"5 optimizer steps had .* 3 of them in a row; allowed .*=2 and"):
        count.add(run, Line(), (None, 11))


def test_what_a_scaler_skips_is_not_told(recwarn: pytest.WarningsRecorder) -> None:
    count = SkipCount(1, None, explain=True)
    for place in range(17):
        count.add(mock.Mock(), Line(), (None, place), by_scaler=True)
    assert not list(recwarn)
    assert count.total == count.in_a_row == 17
