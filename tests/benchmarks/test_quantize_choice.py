"""The benchmark of what QuantizeOnFitEnd chooses runs the callback on weights that stay as they are."""

from __future__ import annotations

from pathlib import Path

import torch

from benchmarks.quantize_choice import measure


def test_the_file_is_smaller_and_the_trained_weights_are_what_is_measured(tmp_path: Path) -> None:
    arguments = {"network": "MLP", "epochs": 1, "calls": 2, "weights": str(tmp_path), "limit": 64}
    told = measure(objective="size", **arguments)
    (weights,) = tmp_path.iterdir()
    before = torch.load(weights, weights_only=True)
    assert told["int8"] == 1
    assert told["bytes_after"] < 0.3 * told["bytes_before"]
    assert told["bytes_before"] > 4 * sum(tensor.numel() for tensor in before.values())
    assert abs(told["test_accuracy"] - told["test_accuracy_before"]) <= 0.05
    assert told["times_faster"] > 0
