"""Each warning comes once in a fit."""

from __future__ import annotations

import warnings

from lightning_speedkit.optimize.accumulation_warnings import WindowWarnings


def test_each_is_told_once_and_anew_in_the_next_fit() -> None:
    with warnings.catch_warnings(record=True) as record:
        warnings.simplefilter("always")
        for _ in range(2):
            of_fit = WindowWarnings()
            for time in range(3):
                of_fit.of_long_windows(8, 2)
                of_fit.of_long_targets(100, 7 + time)
                of_fit.of_lost_gradients()
                of_fit.of_dropped_gradients()
        of_fit.of_long_windows(4, 2)
        of_fit.of_long_targets(50, 7)
    told = [str(warning.message) for warning in record]
    assert len(told) == 10
    of_long = ("factor is 8 and an epoch has 2 batches", "target_batch is 100 and an epoch counts 7 over all ranks")
    for words in (*of_long, "before the checkpoint is lost", "takes no step there"):
        assert sum(words in message for message in told) == 2
