"""Every kind of batch: the pieces hold its samples in order, and nothing else."""

from __future__ import annotations

import collections
import dataclasses
from typing import Any, NamedTuple

import numpy
import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pack_sequence, unpack_sequence

from lightning_speedkit.optimize.batch_split import samples_of, split_batch


class Pair(NamedTuple):
    x: Tensor
    y: Tensor


@dataclasses.dataclass(frozen=True)
class Row:
    x: Tensor
    name: str


def test_pieces_are_as_equal_as_can_be_and_views() -> None:
    x = torch.arange(10)
    pieces = split_batch(x, 4)
    assert [piece.tolist() for piece in pieces] == [[0, 1, 2, 3], [4, 5, 6], [7, 8, 9]]
    assert all(piece.untyped_storage().data_ptr() == x.untyped_storage().data_ptr() for piece in pieces)
    assert [len(piece) for piece in split_batch(x, 1)] == [1] * 10
    assert [len(piece) for piece in split_batch(x, 99)] == [10]
    assert [len(piece) for piece in split_batch(x[:0], 3)] == [0]
    alone = {"x": torch.tensor(1.0), "y": torch.tensor(2)}  # one sample
    assert (samples_of(alone), split_batch(alone, 1)) == (1, [alone])


def test_batches_of_several_loaders_are_no_single_samples() -> None:
    def pair(size: int) -> tuple[Tensor, Tensor]:
        return torch.zeros(size, 3), torch.zeros(size)

    for strict in (True, False):
        with pytest.raises(ValueError, match="batch dimensions of 3 and 4"):
            samples_of({"labelled": pair(4), "unlabelled": pair(3)}, strict=strict)
        assert samples_of({"labelled": pair(4), "unlabelled": pair(4)}, strict=strict) == 4
    with pytest.raises(ValueError, match="batch dimensions of 3 and 4"):
        split_batch([list(pair(4)), list(pair(3))], 1)


def test_structures_are_kept() -> None:
    x, y = torch.arange(6.0).reshape(3, 2), torch.tensor([7, 8, 9])
    given = {
        "pair": Pair(x, y),
        "list": [x, y],
        "row": Row(y, "one"),
        "names": ["a", "b", "c"],
        "two": ["p", "q"],
        "array": numpy.arange(3),
        "scale": torch.tensor(0.5),
        "none": None,
        "number": numpy.float32(2),
    }
    first, second = split_batch(given, 2)
    assert samples_of(given) == 3
    assert isinstance(first["pair"], Pair)
    assert second["pair"].x.tolist() == [[4.0, 5.0]]
    assert second["list"][1].tolist() == [9]
    assert (first["row"].x.tolist(), first["row"].name) == ([7, 8], "one")
    assert (first["names"], second["names"], second["two"]) == (["a", "b"], ["c"], ["p", "q"])
    assert second["array"].tolist() == [2]
    assert second["scale"] is given["scale"]
    assert (second["none"], second["number"]) == (None, 2)


def test_mappings_of_other_kinds_stay_what_they_are() -> None:
    class Encoding(collections.UserDict):  # type: ignore[type-arg]
        """As the batches of tokenizers."""

    for given in (
        Encoding({"ids": torch.arange(3)}),
        collections.OrderedDict(ids=torch.arange(3)),
        collections.defaultdict(list, ids=torch.arange(3)),
    ):
        pieces = split_batch(given, 2)
        assert [type(piece) for piece in pieces] == [type(given)] * 2
        assert [piece["ids"].tolist() for piece in pieces] == [[0, 1], [2]]
        assert given["ids"].tolist() == [0, 1, 2]


def test_padded_sequences_that_are_time_first() -> None:
    tokens, lengths = torch.arange(20).reshape(5, 4), torch.tensor([5, 3, 2, 1])
    pieces = split_batch((tokens, lengths), 2, dim=1)
    assert torch.equal(torch.cat([piece[0] for piece in pieces], dim=1), tokens)
    assert [piece[1].tolist() for piece in pieces] == [[5, 3], [2, 1]]


def test_packed_and_nested_sequences() -> None:
    rows = [torch.arange(float(n)) + 10 * n for n in (2, 5, 1, 3)]
    packed = split_batch(pack_sequence(rows, enforce_sorted=False), 2)
    assert [[r.tolist() for r in unpack_sequence(p)] for p in packed] == [
        [r.tolist() for r in rows[:2]],
        [r.tolist() for r in rows[2:]],
    ]
    nested = split_batch((torch.nested.nested_tensor(rows, layout=torch.jagged), torch.arange(4)), 3)
    assert [[r.tolist() for r in piece[0].unbind()] for piece in nested] == [
        [r.tolist() for r in rows[:2]],
        [r.tolist() for r in rows[2:]],
    ]


def test_lists_of_single_samples() -> None:
    images = [torch.zeros(3, 4, 4 + i) for i in range(5)]
    targets = [{"boxes": torch.zeros(i, 4)} for i in range(5)]
    given = {"images": images, "targets": targets, "ids": torch.arange(5), "split": "train"}
    pieces = split_batch(given, 2)
    assert [len(piece["images"]) for piece in pieces] == [2, 2, 1]
    assert pieces[2]["images"][0] is images[4]
    assert pieces[1]["targets"] == targets[2:4]
    assert pieces[1]["ids"].tolist() == [2, 3]
    assert samples_of((["a", "b"], ["c", "d"])) == 2


def test_rows_of_a_detector_are_samples_whatever_their_lengths_are() -> None:
    images, targets = (torch.zeros(3, 4, 4), torch.ones(3, 4, 4)), ({"boxes": torch.zeros(3, 4)},) * 2
    first, second = split_batch((images, targets), 1)  # as zip(*samples) makes it; each tensor has a length of 3
    assert samples_of((images, targets)) == 2
    assert (first[0][0] is images[0], second[0][0] is images[1], len(first[1])) == (True, True, 1)
    assert samples_of({"one": {"x": torch.zeros(5, 2)}, "other": [torch.zeros(5), torch.zeros(5, 3)]}) == 5


def test_names_beside_images_that_torch_collated() -> None:
    batch = torch.utils.data.default_collate([(torch.tensor([i]), f"name {i}", i) for i in range(3)])
    assert type(batch[1]) is tuple
    pieces = split_batch(batch, 2)
    assert [tuple(piece[1]) for piece in pieces] == [("name 0", "name 1"), ("name 2",)]
    assert [piece[2].tolist() for piece in pieces] == [[0, 1], [2]]
    assert split_batch({"x": torch.zeros(2, 1), "size": (20, 30)}, 1)[0]["size"] == (20, 30)


class _Graph:
    """Holds tensors in a way that nothing here knows."""

    x = torch.zeros(3, 2)


@pytest.mark.parametrize(
    ("batch", "kind", "message"),
    [
        ((torch.zeros(8, 2), torch.zeros(5)), ValueError, "batch dimensions of 5 and 8"),
        ({"a": [torch.zeros(3)] * 2, "b": torch.zeros(4)}, ValueError, "3 and 4"),
        ("text", ValueError, "Cannot tell the samples of a str: it has no tensor"),
        ((["a"], ["b", "c"]), ValueError, "it has no tensor"),
        ([torch.zeros(3), _Graph()], TypeError, r"_Graph cannot be split"),
    ],
)
def test_what_cannot_be_split_says_so(batch: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        split_batch(batch, 2)


def test_a_size_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="size=0 must be 1 or more"):
        split_batch(torch.zeros(3), 0)
