"""The claim of the guards, by the benchmark's own protocol with one seed more, and what the benchmark is made of."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from benchmarks.bad_batches.showing import by_seed, draw, table
from benchmarks.bad_batches.training import NAN_BATCHES, batches_of, digits, train
from benchmarks.spikes import measure, variants

ROOT = Path(__file__).resolve().parents[2]
RATE, SEED = 0.1 / 3, 100


def _final(guard: str, faults: str, optimizer: str = "sgd") -> float:
    return train(10, optimizer, RATE, guard, faults, SEED).final_loss


@pytest.mark.filterwarnings("ignore")
def test_the_guarded_run_ends_as_the_clean_one_and_the_unguarded_one_is_lost() -> None:
    clean = _final("none", "none")
    assert clean < 0.2
    assert not _final("none", "spike") < 10 * clean
    assert math.isnan(_final("none", "nan"))
    assert _final("non-finite", "nan") == pytest.approx(clean, rel=0.05)
    for action in ("skip", "rollback"):
        assert _final(action, "none") == clean
        assert _final(action, "both") == pytest.approx(clean, rel=0.05)


@pytest.mark.filterwarnings("ignore")
def test_harm_that_the_loss_shows_too_late_takes_a_rollback() -> None:
    assert train(10, "sgd", RATE, "skip", "gradient", SEED).stopped
    run = train(10, "sgd", RATE, "rollback", "gradient", SEED)
    assert run.final_loss == pytest.approx(_final("none", "none"), rel=0.05)
    assert run.taken_back == 4  # the harm is batch 123, shown by 124; the snapshots are of 120 and 123 steps


def test_the_bad_batches_are_where_and_what_they_should_be() -> None:
    images, labels, learnt, held_out = digits()
    assert (len(learnt), len(held_out), len({*learnt.tolist(), *held_out.tolist()})) == (1197, 600, 1797)
    clean, bad, without = (
        batches_of(images, labels, learnt, 74, faults, 1, left_out, 0)
        for faults, left_out in (("none", False), ("both", False), ("both", True))
    )
    assert [len(y) for _, y in clean] == [32] * 74
    changed = [place for place in range(74) if not torch.equal(clean[place][0], bad[place][0])]
    assert changed == [24, *range(49, 49 + NAN_BATCHES)]
    torch.testing.assert_close(bad[24][0], clean[24][0] * 1000, rtol=0, atol=0)
    assert sorted(bad[24][1].tolist()) == sorted(clean[24][1].tolist()) != bad[24][1].tolist()
    assert all(bad[place][0].isnan().all() for place in changed[1:])
    kept = [clean[place] for place in range(74) if place not in changed]
    assert all(torch.equal(one[0], other[0]) for one, other in zip(without, kept, strict=True))


def test_every_variant_names_its_baseline_and_can_be_measured() -> None:
    told = variants(1, 1, 0.1)
    baselines = {"clean", "AdamW, clean", "best rate, clean"}
    assert {variant.baseline for variant in told} == baselines <= {variant.name for variant in told}
    found = measure(**{**next(v for v in told if v.name == "NaN, unguarded").arguments})
    assert found == {"loss_0": 1e6, "acted_0": 0.0, "taken_back_0": 0.0, "stopped_0": 0.0}


def test_the_method_card_shows_the_kept_result() -> None:
    content = json.loads((ROOT / "benchmarks" / "results" / "spikes.json").read_text())
    assert content["seeds"] == by_seed(content)
    assert table(content["seeds"]) in (ROOT / "docs" / "methods" / "guards.md").read_text()


def test_the_curves_are_drawn_and_a_lost_run_has_a_cross(tmp_path: Path) -> None:
    curves = {"clean": [1.0, 0.5, 0.2], "lost": [1.0, math.nan, math.nan], "kept": [1.0, math.nan, 0.2]}
    with_cross = draw({"a": curves, "b": curves}, tmp_path / "a" / "a.svg").read_text()
    del curves["lost"]
    without = draw({"a": curves, "b": curves}, tmp_path / "b.svg").read_text()
    assert with_cross.count("<svg") == without.count("<svg") == 1
    assert "#d62728" in with_cross
