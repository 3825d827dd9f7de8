"""The claim of the guards, on the benchmark's own run: with them a bad run ends as the clean one, else it is lost."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.spikes import draw, measure, variants

STEPS = 1000


@pytest.fixture(scope="module")
def found() -> dict[str, float]:
    chosen = [variant for variant in variants(STEPS) if variant.name not in ("clean, all guards", "spikes, clipping")]
    return {variant.name: measure(**variant.arguments)["final_loss"] for variant in chosen}


@pytest.mark.filterwarnings("ignore")
def test_the_guarded_run_ends_as_the_clean_one_and_the_unguarded_one_is_lost(found: dict[str, float]) -> None:
    clean = found["clean"]
    for name in ("both, SpikeGuard skip", "both, SpikeGuard rollback", "both, all guards", "nan, NonFiniteGuard"):
        assert found[name] == pytest.approx(clean, rel=0.05), name
    for name in ("spikes, unguarded", "nan, unguarded", "both, unguarded"):
        assert found[name] > 2 * clean, name


def test_the_curves_are_drawn(tmp_path: Path) -> None:
    path = draw({"clean": [1.0, 0.5], "lost": [1.0, float("nan")]}, tmp_path / "a.svg")
    assert path.read_text().count("<svg") == 1
