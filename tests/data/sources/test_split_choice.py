"""The division among splits: sizes, disjoint and exhaustive, and the same for one seed."""

from __future__ import annotations

from collections import Counter
from itertools import islice

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_speedkit.data.sources.split_choice import (
    check_fractions,
    parse_fractions,
    split_of_each,
    split_sizes,
    splits_not_served,
)
from lightning_speedkit.errors import SourceError


@given(weights=st.lists(st.integers(1, 50), min_size=1, max_size=5), count=st.integers(0, 5000))
@settings(max_examples=100, deadline=None)
def test_sizes_are_the_fractions_to_less_than_one_and_their_sum_is_the_count(weights: list[int], count: int) -> None:
    fractions = {str(i): weight / sum(weights) for i, weight in enumerate(weights)}
    sizes = split_sizes(fractions, count)
    assert sum(sizes.values()) == count
    assert all(abs(sizes[name] - fractions[name] * count) < 1 + 1e-6 for name in fractions)


def test_each_sample_is_in_one_split_and_the_seed_decides_which() -> None:
    fractions = {"train": 0.7, "val": 0.2, "test": 0.1}
    first = list(split_of_each(fractions, 1000, 0))
    assert Counter(first) == {"train": 700, "val": 200, "test": 100}
    assert first == list(split_of_each(fractions, 1000, 0))
    other = list(split_of_each(fractions, 1000, 1))
    assert other != first
    # independent of the place: both halves of the samples, and both seeds, have their share
    assert 70 <= Counter(first[:500])["val"] <= 130
    assert sum(a == b == "val" for a, b in zip(first, other, strict=True)) < 80


def test_the_division_is_the_same_in_all_versions() -> None:
    """The 8 smallest of the first 16 numbers of PCG64(0) are those at 11, 3, 13, 2, 15, 1, 8 and 6, in this order."""
    splits = split_of_each({"train": 0.5, "val": 0.5}, 16, 0)
    assert {i for i, name in enumerate(splits) if name == "train"} == {11, 3, 13, 2, 15, 1, 8, 6}


def test_without_a_count_the_shares_come_near() -> None:
    fractions = {"a": 0.25, "b": 0.75}
    first = list(islice(split_of_each(fractions, None, 3), 4000))
    assert 900 <= Counter(first)["a"] <= 1100
    assert first == list(islice(split_of_each(fractions, None, 3), 4000))


def test_a_split_without_a_sample_is_refused() -> None:
    with pytest.raises(SourceError, match="4 samples are too few for this split: val would be empty"):
        next(split_of_each({"train": 0.9, "val": 0.1}, 4, 0))


@pytest.mark.parametrize(
    ("text", "fractions"),
    [
        ("0.9,0.1", {"train": 0.9, "val": 0.1}),
        ("0.5, 0.25, 0.25", {"train": 0.5, "val": 0.25, "test": 0.25}),
        ("a=1", {"a": 1.0}),
        ("fold-1=0.5,fold_2=0.5", {"fold-1": 0.5, "fold_2": 0.5}),
    ],
)
def test_texts(text: str, fractions: dict[str, float]) -> None:
    assert parse_fractions(text) == fractions


@pytest.mark.parametrize(
    ("names", "not_served", "meant"),
    [
        (["train", "val", "test", "predict"], "", ""),
        (["trian", "val"], "'trian'", "'train'"),
        (["Train", "VAL"], "'Train', 'VAL'", "'train' and 'val'"),
        (["training", "valid"], "'training', 'valid'", "'train' and 'val'"),
        (["train", "valdiation"], "'valdiation'", "'val'"),
        (["vla", "tets"], "'vla', 'tets'", "'val' and 'test'"),
        (["fold-1", "held"], "'fold-1', 'held'", ""),
    ],
)
def test_names_that_no_data_module_serves(names: list[str], not_served: str, meant: str) -> None:
    told = splits_not_served(names)
    assert told.partition(" and not ")[2].partition(".")[0] == not_served
    assert told.partition("Did you mean ")[2].removesuffix("?") == meant


def test_the_names_are_those_of_the_data_module() -> None:
    from lightning_speedkit.data.datamodule import SPLITS

    assert splits_not_served(SPLITS) == ""
    served = splits_not_served(["x"]).removeprefix("LMDBDataModule serves ").partition(", and not")[0]
    assert served.replace(" and ", ", ").split(", ") == list(SPLITS)


@pytest.mark.parametrize(
    "text",
    ["", "1", "0.9", "0.9,0.2", "train=0.9", "train=0.9,train=0.1", "train=x,val=0.1", "a/b=1", "../x=1", "0.9,val=0.1",
     "train=1.1,val=-0.1", "train=nan", "0.25,0.25,0.25,0.25", "train=1,val=0"],
)  # fmt: skip
def test_wrong_texts(text: str) -> None:
    with pytest.raises(ValueError, match="split"):
        parse_fractions(text)
    with pytest.raises(ValueError, match="sum"):
        check_fractions({"a": 0.5})
