"""What the demo keeps as numbers."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from lightning_speedkit.demo.results import Latency
from tests.demo.made_up import results


def test_json_holds_every_number_and_the_rates_that_follow() -> None:
    content = json.loads(results().to_json())
    assert (content["schema"], content["schema_version"]) == ("speedkit-demo", 1)
    assert [run["name"] for run in content["trainings"]] == ["files", "files, 2 workers", "LMDB", "LMDB, preset cpu"]
    # 100 steps of 6,400 samples in 4 s
    assert content["trainings"][0]["samples_per_second"] == 1600.0
    assert content["trainings"][0]["seconds_per_step"] == 0.04
    assert content["trainings"][0]["timing"]["seconds_data"] == 1.0
    assert content["disk"]["store_overhead"] == pytest.approx(1.02)
    assert content["quantization"]["latencies"][0] == {"batch_size": 1, "seconds_float": 0.001, "seconds_int8": 0.002}
    assert content["hardware"]["cpu_count"] == 2
    assert content["seconds_total"] == 61.5


def test_json_refuses_what_is_no_number() -> None:
    with pytest.raises(ValueError, match="JSON"):
        replace(results(), seconds_total=float("nan")).to_json()


def test_speedup_is_float_over_int8() -> None:
    assert Latency(batch_size=1, seconds_float=0.003, seconds_int8=0.002).speedup == pytest.approx(1.5)
