"""The benchmark of quantization measures one network in each way, from weights that are trained once."""

from __future__ import annotations

from pathlib import Path

from benchmarks.quantize import ENGINES, EPOCHS, measure, variants


def test_int8_is_measured_beside_float_on_the_same_weights(tmp_path: Path) -> None:
    arguments = {"network": "MLP", "epochs": 1, "calls": 2, "weights": str(tmp_path), "limit": 64}
    before = measure(engine=None, **arguments)
    (weights,) = tmp_path.iterdir()
    written = weights.stat().st_mtime_ns
    after = measure(engine="onnxruntime-static", **arguments)
    assert weights.stat().st_mtime_ns == written
    assert before["relative_error"] == 0 < after["relative_error"] < 0.1
    assert after["bytes"] < 0.3 * before["bytes"]  # a byte per weight instead of four
    assert set(before) == set(after)


def test_every_network_is_measured_in_every_way_against_its_own_eager_one() -> None:
    told = variants("folder")
    assert len(told) == len(EPOCHS) * (2 + len(ENGINES))
    assert {v.baseline for v in told} == {f"{network}, eager" for network in EPOCHS}
