"""The size of samples, and what the bar says."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from lightning_speedkit.data import verify_lmdb, write_lmdb
from lightning_speedkit.data.sources.pack_progress import payload_bytes, shown_progress


@pytest.mark.parametrize(
    ("sample", "size"),
    [
        ((torch.zeros(3, 4, dtype=torch.int16), 1), 24 + 8),
        ({"a": [b"abc", "de"], "b": np.zeros((2, 2), np.float32), "c": np.int16(1)}, 5 + 16 + 2),
        ((1.5, True, None), 8 + 1 + 0),
        ("ä€", 2 + 3),
        (torch.zeros(0), 0),
    ],
)
def test_the_size_is_that_of_the_store(sample: object, size: int) -> None:
    assert payload_bytes(sample) == size
    assert size in (0, verify_lmdb(write_lmdb([sample], "a.lmdb")).payload_bytes)


def test_the_bar_says_how_many_and_how_fast(capsys: pytest.CaptureFixture[str]) -> None:
    with shown_progress("packing [train].lmdb", 2000) as bar:
        for _ in range(2000):
            bar.add(1000)
    out, err = capsys.readouterr()
    assert out == ""
    assert "packing [train].lmdb" in err
    assert "2,000/2,000" in " ".join(err.split())
    assert "samples/s" in err
    assert "MB/s" in err


def test_an_unknown_total_has_no_end(capsys: pytest.CaptureFixture[str]) -> None:
    with shown_progress("packing", None) as bar:
        bar.add(10)
    assert "1 samples" in " ".join(capsys.readouterr().err.split())
