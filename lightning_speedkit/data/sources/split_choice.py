"""Divides samples among splits: the same way for the same seed, each sample in one split, none left out."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterable, Iterator, Mapping

import numpy as np

from lightning_speedkit.errors import SourceError

__all__ = ["SPLIT_NAMES", "check_fractions", "parse_fractions", "split_of_each", "split_sizes", "splits_not_served"]

SPLIT_NAMES = {"train": "train", "training": "train", "val": "val", "valid": "val", "validation": "val", "test": "test",
               "predict": "predict"}  # fmt: skip
"""The split that each name of a folder stands for: the values are what ``LMDBDataModule`` serves."""

_DEFAULT_NAMES = {2: ("train", "val"), 3: ("train", "val", "test")}
_NAME = re.compile(r"[A-Za-z0-9_-]+")


def parse_fractions(text: str) -> dict[str, float]:
    """The splits of ``"train=0.9,val=0.1"``, or of ``"0.8,0.1,0.1"``, which are train, val and test.

    Raises:
        ValueError: not such a text, a fraction outside 0 to 1, or a sum other than 1.

    >>> parse_fractions("train=0.9,val=0.1")
    {'train': 0.9, 'val': 0.1}
    >>> parse_fractions("0.8,0.1,0.1")
    {'train': 0.8, 'val': 0.1, 'test': 0.1}
    """
    pairs = [part.strip().rpartition("=") for part in text.split(",")]
    names = [name for name, _, _ in pairs]
    if not any(names):
        if len(pairs) not in _DEFAULT_NAMES:
            raise ValueError(f"a split without names has two or three fractions, as 0.9,0.1; got {text!r}.")
        names = list(_DEFAULT_NAMES[len(pairs)])
    try:
        fractions = {name: float(value) for name, (_, _, value) in zip(names, pairs, strict=True)}
    except ValueError:
        raise ValueError(f"a split is written as train=0.9,val=0.1 or 0.9,0.1; got {text!r}.") from None
    if len(fractions) != len(pairs) or not all(_NAME.fullmatch(name) for name in names):
        raise ValueError(f"the names of splits are different and of letters, digits, - and _; got {text!r}.")
    check_fractions(fractions)
    return fractions


def check_fractions(fractions: Mapping[str, float]) -> None:
    """``ValueError`` unless all fractions are above 0 and their sum is 1."""
    total = math.fsum(fractions.values())
    if not all(0 < value <= 1 for value in fractions.values()) or not math.isclose(total, 1, abs_tol=1e-6):
        shown = ", ".join(f"{name}={value:g}" for name, value in fractions.items())
        raise ValueError(
            f"the fractions of a split are above 0 and their sum is 1; got {shown} with the sum {total:g}."
        )


def splits_not_served(names: Iterable[str]) -> str:
    """What to say of the names that ``LMDBDataModule`` does not serve; nothing if it serves all of them.

    >>> splits_not_served(["trian", "val"])
    "LMDBDataModule serves train, val, test and predict, and not 'trian'. Did you mean 'train'?"
    """
    served = list(dict.fromkeys(SPLIT_NAMES.values()))
    others = [name for name in names if name not in served]
    if not others:
        return ""
    near = dict.fromkeys(SPLIT_NAMES[found] for name in others for found in _near(name))
    hint = f" Did you mean {' and '.join(map(repr, near))}?" if near else ""
    last = served.pop()
    return f"LMDBDataModule serves {', '.join(served)} and {last}, and not {', '.join(map(repr, others))}.{hint}"


def _near(name: str) -> list[str]:
    return difflib.get_close_matches(name.lower(), SPLIT_NAMES, n=1, cutoff=0.6)


def split_sizes(fractions: Mapping[str, float], count: int) -> dict[str, int]:
    """How many of ``count`` samples each split gets: the fractions, rounded so that the sum is ``count``.

    >>> split_sizes({"train": 0.9, "val": 0.1}, 15)
    {'train': 14, 'val': 1}
    """
    sizes = {name: math.floor(fraction * count + 1e-9) for name, fraction in fractions.items()}
    remainders = sorted(fractions, key=lambda name: sizes[name] - fractions[name] * count)
    for name in remainders[: count - sum(sizes.values())]:
        sizes[name] += 1
    return sizes


def split_of_each(fractions: Mapping[str, float], count: int | None, seed: int) -> Iterator[str]:
    """The name of the split of each sample, in their order.

    Of a known ``count`` the splits have exactly :func:`split_sizes`; otherwise each sample is drawn by itself, and the
    sizes come near to that. The n-th sample of a source is drawn alike in each pass.

    Raises:
        SourceError: a split of a known ``count`` would be empty.
    """
    names = list(fractions)
    random = np.random.PCG64(seed)  # its raw numbers are the same in every version of NumPy
    if count is None:
        bounds = np.cumsum(list(fractions.values()))[:-1]
        while True:
            yield names[int(np.searchsorted(bounds, random.random_raw() / 2**64, side="right"))]
    sizes = split_sizes(fractions, count)
    empty = [name for name, size in sizes.items() if size == 0]
    if empty:
        raise SourceError(f"{count} samples are too few for this split: {', '.join(empty)} would be empty.")
    order = np.empty(count, np.uint8)
    order[np.argsort(random.random_raw(count), kind="stable")] = np.repeat(
        np.arange(len(names), dtype=np.uint8), [sizes[name] for name in names]
    )
    for number in order:
        yield names[number]
