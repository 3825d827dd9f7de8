"""The script measures what it says; its numbers are not looked at here."""

from __future__ import annotations

import threading

import pytest

from benchmarks.step_overhead import RUNS, Turns, added_microseconds, measure


@pytest.mark.filterwarnings("ignore")
def test_every_run_is_measured() -> None:
    metrics = measure(count=4)
    assert {name for name in metrics if name.endswith("per batch")} == {f"{n}: microseconds per batch" for n in RUNS}
    assert {name for name in metrics if name.endswith("added")} == {
        f"{n}: added" for n, r in RUNS.items() if r.baseline
    }
    assert all(value > 0 for name, value in metrics.items() if name.endswith("per batch"))


def test_what_is_added_is_the_median_of_the_differences_of_a_round() -> None:
    seconds = {"Lightning, windows of 4": [10e-6, 12e-6, 20e-6], "Lightning again": [14e-6, 20e-6, 80e-6]}
    told = added_microseconds(seconds)
    assert told["Lightning again: added"] == pytest.approx(2.0)  # of 4, 8 and 60, for 4 batches
    assert told["Lightning, windows of 4: microseconds per batch"] == pytest.approx(3.0)


def test_turns_let_each_go_on_once_a_round_and_alone_and_go_on_without_one_that_leaves() -> None:
    turns, order = Turns(3), list[int]()

    def go(member: int) -> None:
        turns.wait(member)
        for place in range(2 if member == 1 else 5):
            if place:
                turns.next()
                turns.wait(member)
            order.append(member)
        turns.leave(member)

    threads = [threading.Thread(target=go, args=(member,), daemon=True) for member in range(3)]
    for thread in threads:
        thread.start()
    turns.next()
    for thread in threads:
        thread.join(timeout=10)
    assert not any(thread.is_alive() for thread in threads)
    assert [sorted(order[:3]), sorted(order[3:6])] == [[0, 1, 2]] * 2
    assert [sorted(order[place : place + 2]) for place in (6, 8, 10)] == [[0, 2]] * 3
