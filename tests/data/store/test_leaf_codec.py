"""Which values are stored, and that the reader owns what it gets."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lightning_speedkit.data import LMDBDataset, write_lmdb


def test_views_and_gradients_are_stored_as_plain_values(tmp_path: Path) -> None:
    base = torch.arange(12.0).reshape(3, 4)
    complex_base = torch.complex(base, base + 1)
    samples = [(base.t(), base[:, ::2].clone().requires_grad_(), complex_base.conj(), np.arange(9)[::-2])]
    found = LMDBDataset(write_lmdb(samples, tmp_path / "a.lmdb"))[0]
    assert torch.equal(found[0], base.t())
    assert not found[1].requires_grad
    assert torch.equal(found[2], complex_base.conj().resolve_conj())
    assert found[3].tolist() == [8, 6, 4, 2, 0]


def test_what_is_read_is_owned_by_the_reader(tmp_path: Path) -> None:
    dataset = LMDBDataset(write_lmdb([(torch.zeros(4), np.zeros(4))] * 2, tmp_path / "a.lmdb"))
    tensor, array = dataset[0]
    tensor.add_(1)
    array += 1
    dataset.close()
    assert tensor.sum() == array.sum() == 4
    assert dataset[0][0].sum() == dataset[0][1].sum() == dataset[1][0].sum() == 0


Point = namedtuple("Point", "x y")


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (Point(1, 2), "namedtuple Point"),
        (object(), "object"),
        (OrderedDict(a=1), "plain dict"),
        ({(1, 2): 3}, "key"),
        ({True: 3}, "key"),
        (np.array([object()]), "objects"),
        (np.zeros(2, dtype=[("a", "i4")]), "records"),
        (np.ma.masked_array([1], [True]), "masked"),
        (torch.zeros(2).to_sparse(), "to_dense"),
        (torch.nn.Parameter(torch.zeros(2)), "as_subclass"),
        (torch.zeros(2, device="meta"), "Tensor"),
        ({1, 2}, "set"),
        (1 + 2j, "complex"),
    ],
)
def test_what_only_pickle_could_restore_is_refused(tmp_path: Path, value: Any, words: str) -> None:
    with pytest.raises(TypeError, match=r"Sample 0: The sample\['deep'\]\[1\]") as caught:
        write_lmdb([{"deep": [1, value]}], tmp_path / "a.lmdb")
    assert words in str(caught.value)
    assert not list(tmp_path.iterdir())
