"""Rows of .npy and .npz files that NumPy wrote, and damage to them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightning_speedkit.data.sources.numpy_arrays import NumpyFile, NumpyZip
from lightning_speedkit.data.sources.parallel_pack import write_parallel
from lightning_speedkit.errors import SourceError


@pytest.mark.parametrize("dtype", ["u1", "i8", ">f4", "f2", "c8", "?", "U3", "S2", "M8[s]"])
@pytest.mark.parametrize("shape", [(5,), (5, 2, 3), (5, 0)])
@pytest.mark.parametrize("save", ["npy", "npz", "compressed", "fortran"])
def test_rows_are_those_of_the_array(dtype: str, shape: tuple[int, ...], save: str) -> None:
    array = np.arange(int(np.prod(shape))).reshape(shape).astype(dtype)
    if save == "npy":
        np.save("x.npy", array)
        rows: list[Any] = list(NumpyFile(Path("x.npy")))
    else:
        if save == "fortran":
            array = np.asfortranarray(array)
        (np.savez if save == "npz" else np.savez_compressed)("x.npz", x=array)
        rows = [sample["x"] for sample in NumpyZip(Path("x.npz"))]
    assert len(rows) == 5
    for row, expected in zip(rows, array, strict=True):
        if isinstance(row, str | bytes):
            assert row == expected.item()
            continue
        assert row.dtype == array.dtype.newbyteorder("=")
        assert row.dtype.isnative
        assert row.shape == expected.shape
        assert np.array_equal(row, expected)


def test_rows_of_a_file_are_mapped_and_not_loaded() -> None:
    with Path("big.npy").open("wb") as file:
        np.lib.format.write_array_header_1_0(
            file, {"descr": "<f4", "fortran_order": False, "shape": (1 << 20, 1 << 16)}
        )
        file.truncate(file.tell() + (1 << 38))  # 256 GiB, without blocks on disk
    source = NumpyFile(Path("big.npy"))
    assert (len(source), next(iter(source.items())).read().shape) == (1 << 20, (1 << 16,))


def test_several_arrays_are_dicts_in_the_order_of_the_file_or_the_choice() -> None:
    np.savez("x.npz", y=np.arange(3), x=np.ones((3, 2)), other=np.zeros(7))
    with pytest.raises(SourceError, match=r"different lengths \(y 3, x 3, other 7\)"):
        NumpyZip(Path("x.npz"))
    source = NumpyZip(Path("x.npz"), columns={"x": "", "y": ""})
    samples = list(source)
    assert [list(sample) for sample in samples] == [["x", "y"]] * 3
    assert [int(sample["y"]) for sample in samples] == [0, 1, 2]
    assert [item.place for item in source.items()] == [f"x.npz row {i}" for i in range(3)]


@pytest.mark.parametrize("compressed", [False, True])
def test_a_flipped_byte_of_an_archive_is_an_error(compressed: bool) -> None:
    (np.savez_compressed if compressed else np.savez)("x.npz", x=np.random.default_rng(0).random((50, 100)))
    data = bytearray(Path("x.npz").read_bytes())
    data[len(data) // 2] ^= 0x10
    Path("x.npz").write_bytes(data)
    with pytest.raises(SourceError, match=r"x\.npz row \d+: the file is damaged here or before"):
        list(NumpyZip(Path("x.npz")))


@pytest.mark.parametrize("save", ["compressed", "plain", "fortran"])
@pytest.mark.parametrize("limit", [None, 100])
def test_no_row_of_a_damaged_archive_is_packed(save: str, limit: int | None) -> None:
    """With a limit too, behind which the damage lies; and with bad samples left out, as rows cannot be told apart."""
    rows = np.random.default_rng(0).integers(0, 50, (3000, 2))
    x = np.asfortranarray(rows) if save == "fortran" else rows
    (np.savez if save == "plain" else np.savez_compressed)("x.npz", other=rows[:, 0], x=x)
    data = Path("x.npz").read_bytes()
    assert write_parallel(NumpyZip(Path("x.npz")), "whole.lmdb", limit=limit).total == (limit or 3000)
    for part in (0.3, 0.6, 0.9):
        damaged = bytearray(data)
        damaged[int(part * len(data))] ^= 4
        Path("x.npz").write_bytes(damaged)
        for skip_bad in (True, False):
            with pytest.raises(SourceError, match=r"x\.npz row \d+: the file is damaged.*which of its rows are right"):
                write_parallel(NumpyZip(Path("x.npz")), "a.lmdb", limit=limit, skip_bad=skip_bad)
    assert not Path("a.lmdb").exists()


def test_what_is_no_array_of_samples_is_refused() -> None:
    np.save("scalar.npy", np.float32(1))
    with pytest.raises(SourceError, match="single value"):
        NumpyFile(Path("scalar.npy"))
    np.save("objects.npy", np.array([{}, []], dtype=object), allow_pickle=True)
    with pytest.raises(SourceError, match="Python objects"):
        NumpyFile(Path("objects.npy"))
    np.savez("objects.npz", x=np.array([{}, []], dtype=object))
    with pytest.raises(SourceError, match="Python objects, which only pickle restores"):
        NumpyZip(Path("objects.npz"))
    np.save("records.npy", np.zeros(3, [("a", "i4"), ("b", "f4")]))
    with pytest.raises(SourceError, match="records of dtype"):
        NumpyFile(Path("records.npy"))
    np.save("cut.npy", np.arange(1000))
    Path("cut.npy").write_bytes(Path("cut.npy").read_bytes()[:-100])
    with pytest.raises(SourceError, match=r"cut\.npy cannot be read"):
        NumpyFile(Path("cut.npy"))
    np.savez("cut.npz", x=np.arange(1000))
    Path("cut.npz").write_bytes(Path("cut.npz").read_bytes()[:-100])
    for name in ("cut.npz", "cut.npy", "nowhere.npz"):
        with pytest.raises(SourceError, match="cannot be read"):
            NumpyZip(Path(name))
    np.savez("empty.npz")
    with pytest.raises(SourceError, match="no array"):
        NumpyZip(Path("empty.npz"))
