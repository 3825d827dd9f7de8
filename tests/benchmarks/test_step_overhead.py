"""The script measures what it says; its numbers are not looked at here."""

from __future__ import annotations

import pytest

from benchmarks.step_overhead import added_microseconds, measure, variants


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("variant", variants(batches=112), ids=lambda variant: variant.name)
def test_every_variant_runs(variant: object) -> None:
    metrics = measure(**variant.arguments)  # type: ignore[attr-defined]
    assert list(metrics) == ["microseconds_per_batch"]
    assert metrics["microseconds_per_batch"] > 0


def test_what_is_added_is_the_median_of_the_differences_of_a_round() -> None:
    rounds = [{"runs": {n: {"metrics": {"microseconds_per_batch": v}} for n, v in pair.items()}} for pair in _PAIRS]
    failed = {"runs": {"a": {"error": "x"}, "b": {"metrics": {"microseconds_per_batch": 1.0}}}}
    summary = {"a": {"baseline": "b"}, "b": {"baseline": None}}
    assert added_microseconds({"summary": summary, "rounds": [*rounds, failed]}) == {"a": 3.0}


_PAIRS = ({"a": 11.0, "b": 10.0}, {"a": 15.0, "b": 12.0}, {"a": 30.0, "b": 20.0})
