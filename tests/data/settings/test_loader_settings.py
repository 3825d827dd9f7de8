"""What is tried next and what is chosen, by hand-made trials: no process and no clock."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
from torch.utils.data import DataLoader

from lightning_speedkit.data.settings.loader_settings import (
    LoaderLimits,
    LoaderSettings,
    LoaderTrial,
    choose_trial,
    next_trial,
    worker_numbers,
)


def _search(
    rate: Callable[[int, int], float], limits: LoaderLimits, *, batch_bytes: int = 0, worker_bytes: int = 0
) -> list[LoaderTrial]:
    """All trials on a machine where that many workers and that much prefetching load at that rate."""
    trials: list[LoaderTrial] = []
    while (setting := next_trial(trials, limits)) is not None:
        workers, prefetch = setting
        trials.append(
            LoaderTrial(
                num_workers=workers,
                prefetch_factor=prefetch or None,
                samples_per_second=rate(workers, prefetch),
                batch_bytes=batch_bytes,
                worker_bytes=worker_bytes if workers else 0,
            )
        )
        assert len(trials) < 50, "the search does not end"
    return trials


def _numbers(trials: list[LoaderTrial]) -> list[tuple[int, int | None]]:
    return [(trial.num_workers, trial.prefetch_factor) for trial in trials]


@pytest.mark.parametrize(
    ("most", "numbers"),
    [(0, [0]), (1, [0, 1]), (2, [0, 1, 2]), (4, [0, 1, 2, 3, 4]), (32, [0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32])],
)
def test_numbers_of_workers(most: int, numbers: list[int]) -> None:
    assert list(worker_numbers(most)) == numbers


def test_numbers_grow_and_end_at_the_limit_whatever_it_is() -> None:
    for most in range(200):
        numbers = list(worker_numbers(most))
        assert numbers[0] == 0
        assert numbers[-1] == most
        assert all(one < other for one, other in itertools.pairwise(numbers))


def test_samples_that_scale_are_tried_up_to_the_limit() -> None:
    trials = _search(lambda workers, prefetch: 100.0 * max(workers, 1), LoaderLimits(max_workers=8))
    assert _numbers(trials) == [(0, None), *((n, 2) for n in (1, 2, 3, 4, 6, 8)), (8, 4), (8, 2), (8, 4)]
    chosen, reason = choose_trial(trials)
    assert (chosen.num_workers, chosen.prefetch_factor) == (8, 2)
    assert reason == "800 samples/s, 8.00 times the rate without workers"


def test_two_numbers_in_a_row_without_gain_end_it() -> None:
    trials = _search(lambda workers, prefetch: 1000.0 / (1 + workers), LoaderLimits(max_workers=64))
    assert _numbers(trials) == [(0, None), (1, 2), (2, 2), (0, None)]
    chosen, reason = choose_trial(trials)
    assert chosen.num_workers == 0
    assert reason == "1,000 samples/s; 1 worker load 500"


def test_one_bad_number_does_not_end_it() -> None:
    rates = {0: 100.0, 1: 60.0, 2: 120.0, 3: 180.0, 4: 181.0, 6: 180.0}
    trials = _search(lambda workers, prefetch: rates[workers], LoaderLimits(max_workers=6))
    assert choose_trial(trials)[0].num_workers == 3


def test_what_is_within_five_percent_is_a_tie_and_the_fewest_win() -> None:
    rates = {0: 96.0, 1: 50.0, 2: 100.0}
    limits = LoaderLimits(max_workers=2)
    trials = _search(lambda workers, prefetch: rates[workers], limits)
    assert choose_trial(trials)[0].num_workers == 0  # 96 * 1.05 is above 100
    assert choose_trial(trials, prefer_workers=True)[0].num_workers == 2
    rates[0] = 95.0
    assert choose_trial(_search(lambda workers, prefetch: rates[workers], limits))[0].num_workers == 2


def test_prefetching_more_is_chosen_where_it_helps() -> None:
    trials = _search(
        lambda workers, prefetch: 100.0 * (1 + workers) * (1 + (prefetch == 4)), LoaderLimits(max_workers=1)
    )
    chosen, _ = choose_trial(trials)
    assert (chosen.num_workers, chosen.prefetch_factor) == (1, 4)


@pytest.mark.parametrize(
    ("limits", "most"),
    [
        (LoaderLimits(max_workers=8, shared_bytes=6 * 10), 3),  # two batches of 10 bytes for each worker
        (LoaderLimits(max_workers=8, memory_bytes=250), 2),  # 100 bytes for each
        (LoaderLimits(max_workers=8, memory_bytes=99), 1),  # what a worker takes is seen with the first one
        (LoaderLimits(max_workers=8, shared_bytes=19), 0),
    ],
)
def test_memory_bounds_the_number(limits: LoaderLimits, most: int) -> None:
    trials = _search(lambda workers, prefetch: 1.0 + workers, limits, batch_bytes=10, worker_bytes=100)
    assert max(trial.num_workers for trial in trials) == most
    assert all(
        limits.shared_bytes is None or trial.num_workers * (trial.prefetch_factor or 0) * 10 <= limits.shared_bytes
        for trial in trials
    )


def test_why_a_number_is_refused() -> None:
    seen = [LoaderTrial(num_workers=1, batch_bytes=2**20, worker_bytes=2**20)]
    limits = LoaderLimits(max_workers=8, memory_bytes=4 * 2**20, shared_bytes=4 * 2**20)
    assert limits.refuse(2, 2, seen) == ""
    assert limits.refuse(9, 2, seen) == "at most 8 workers"
    assert "4 MiB of shared memory" in limits.refuse(3, 2, seen)
    assert "4 MiB of memory" in limits.refuse(5, 0, seen)


def test_a_failure_ends_the_numbers_and_is_not_chosen() -> None:
    trials = [
        LoaderTrial(num_workers=0, samples_per_second=10.0),
        LoaderTrial(num_workers=1, prefetch_factor=2, samples_per_second=20.0),
        LoaderTrial(num_workers=2, prefetch_factor=2, failure="it broke"),
    ]
    assert next_trial(trials, LoaderLimits(max_workers=8)) == (1, 4)
    assert choose_trial(trials)[0].num_workers == 1
    again = [*trials, LoaderTrial(num_workers=1, prefetch_factor=2, failure="this time it did not work")]
    assert choose_trial(again)[0].num_workers == 0


def test_a_setting_counts_with_its_fastest_time() -> None:
    trials = [
        LoaderTrial(num_workers=0, samples_per_second=50.0),  # another program was busy
        LoaderTrial(num_workers=1, prefetch_factor=2, samples_per_second=90.0),
        LoaderTrial(num_workers=0, samples_per_second=100.0),
    ]
    assert choose_trial(trials)[0].samples_per_second == 100.0


def test_nothing_measured_is_an_error() -> None:
    with pytest.raises(ValueError, match="No trial"):
        choose_trial([LoaderTrial(num_workers=0, failure="it broke")])


@pytest.mark.parametrize("context", [None, "spawn"])
@pytest.mark.parametrize("workers", [0, 2])
def test_arguments_are_what_the_dataloader_takes(workers: int, context: str | None) -> None:
    settings = LoaderSettings(
        num_workers=workers,
        prefetch_factor=3 if workers else None,
        persistent_workers=workers > 0,
        multiprocessing_context=context,
    )
    loader = DataLoader([1, 2, 3], **settings.arguments())  # type: ignore[arg-type]
    assert (loader.num_workers, loader.prefetch_factor) == (workers, 3 if workers else None)
    assert loader.persistent_workers == (workers > 0)
    assert (loader.multiprocessing_context is not None) == (workers > 0 and context is not None)


def test_description_has_the_choice_and_a_line_for_each_trial() -> None:
    settings = LoaderSettings(
        num_workers=1,
        prefetch_factor=2,
        reason="1,234 samples/s",
        trials=(
            LoaderTrial(num_workers=0, samples_per_second=617.0, seconds_start=0.01),
            LoaderTrial(
                num_workers=1, prefetch_factor=2, samples_per_second=1234.0, seconds_start=0.5, worker_bytes=2**21
            ),
            LoaderTrial(num_workers=2, prefetch_factor=2, failure="it broke"),
        ),
    )
    assert settings.describe().splitlines() == [
        "num_workers=1, pin_memory=False, persistent_workers=False, prefetch_factor=2: 1,234 samples/s",
        "  0 workers: 617 samples/s after 0.01 s",
        "  1 worker, prefetch 2: 1,234 samples/s after 0.50 s, 2 MiB each",
        "  2 workers, prefetch 2: failed: it broke",
    ]
