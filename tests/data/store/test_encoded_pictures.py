"""Which fields of a store hold encoded pictures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightning_speedkit.data import write_lmdb
from lightning_speedkit.data.store.encoded_pictures import encoded_bytes, encoded_pictures
from tests.data.pictures import encoded

PNG = encoded(np.zeros((4, 5, 3), np.uint8), "PNG")


@pytest.mark.parametrize(
    ("sample", "places", "pictures"),
    [
        ((PNG, 1), {"[0]": "0"}, ["[0]"]),
        ({"image": PNG, "text": b"none"}, {"['image']": "image", "['text']": "text"}, ["['image']"]),
        (PNG, {"": ""}, [""]),
        ({"a": (b"x", PNG)}, {"['a'][0]": "['a'][0]", "['a'][1]": "['a'][1]"}, ["['a'][1]"]),
        ((b"", 1), {"[0]": "0"}, []),
        ((PNG[:-4], 1), {"[0]": "0"}, []),  # cut short: no picture
        ((1.0, "text"), {}, []),
    ],
)
def test_they_are_found_by_their_place(
    tmp_path: Path, sample: Any, places: dict[str, str], pictures: list[str]
) -> None:
    path = write_lmdb([sample], tmp_path / "a.lmdb")
    assert encoded_bytes(path) == places
    assert encoded_pictures(path) == {place: places[place] for place in pictures}
