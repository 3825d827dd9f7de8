"""Micro-batches of a batch, and one value of what they logged."""

from __future__ import annotations

import pytest
import torch

from lightning_speedkit.parallel.pipeline_batch import MicroBatches, merge_logged


@pytest.mark.parametrize("samples", [1, 2, 5, 8, 9])
@pytest.mark.parametrize("count", [1, 3, 4])
def test_the_real_rows_are_the_batch_and_the_padded_ones_have_one_size(samples: int, count: int) -> None:
    batch = {
        "x": torch.arange(samples * 2).view(samples, 2),
        "more": (torch.arange(samples), torch.tensor(7.0), "name"),
    }
    cut = MicroBatches(batch, count)
    real = [cut.real(i) for i in range(count)]
    assert torch.equal(torch.cat([part["x"] for part in real]), batch["x"])  # type: ignore[arg-type]
    assert [len(part["more"][0]) for part in real] == [cut.rows(i) for i in range(count)]
    assert sum(cut.rows(i) for i in range(count)) == samples
    for i in range(count):
        padded = cut.padded(i)
        assert len(padded["x"]) == cut.size == -(-samples // count)
        assert torch.equal(padded["x"][: cut.rows(i)], real[i]["x"])
        assert padded["more"][1:] == (torch.tensor(7.0), "name")


@pytest.mark.parametrize("batch", ["text", [torch.ones(2), torch.ones(3)], [torch.ones(0)], torch.tensor(1.0)])
def test_a_batch_without_one_number_of_samples_is_refused(batch: object) -> None:
    with pytest.raises(ValueError, match="must be one number of samples"):
        MicroBatches(batch, 2)


def test_what_was_logged_becomes_one_value() -> None:
    values = [(2.0, 3), (6.0, 1)]
    assert merge_logged(values, "mean") == 3.0
    assert merge_logged(values, torch.mean) == 3.0
    assert [merge_logged(values, name) for name in ("sum", "max", "min")] == [8.0, 6.0, 2.0]
    assert merge_logged(values, max) == 6.0
