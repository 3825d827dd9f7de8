"""A damaged store: every damage is an error of ours or changes nothing, and none ends the process."""

from __future__ import annotations

import json
import os
import random
import shutil
import socket
import struct
import zlib
from pathlib import Path
from typing import Any

import lmdb
import pytest
import torch

from lightning_speedkit.data import LMDBDataset, verify_lmdb, write_lmdb
from lightning_speedkit.data.store.lmdb_index import StoreIndex
from lightning_speedkit.data.store.sample_codec import Schema
from lightning_speedkit.errors import StoreCorruptError, StoreError, StoreNotFoundError, StoreVersionError
from tests.data.forked import output_of_fork
from tests.data.samples import same, varied_samples

STORES: dict[str, Any] = {
    "varied": lambda: varied_samples(120),  # some blocks, and an index with arrays
    "deep": lambda: [bytes([i]) * 3000 for i in range(200)],  # so many blocks that the tree has branch pages
    "tiny": lambda: [1.5, 2.5],
}


def _write(name: str, path: Path) -> Path:
    return write_lmdb(STORES[name](), path, block_bytes=4096)


def _read_all(path: Path) -> list[Any]:
    dataset = LMDBDataset(path)
    samples = dataset.__getitems__(range(len(dataset)))
    dataset.close()
    return samples


def _damage_everywhere(folder: Path) -> None:
    outcomes = {}
    for name in STORES:
        path = _write(name, folder / f"{name}.lmdb")
        size = path.stat().st_size
        for width in (1, 600):
            source = random.Random(width)
            positions = [source.randrange(size) for _ in range(40)]
            positions += [page + source.randrange(24) for page in range(0, size, 4096)][:40]  # the heads of pages
            positions += [size - 1 - page for page in range(0, size, 4096)][:20]
            positions += range(size - 200, size, 7)  # the seal
            positions = [min(position, size - width) for position in positions]
            outcomes[f"{name} {width}"] = _damage(name, path, positions, width)
    _truncate_everywhere(folder)
    print(json.dumps(outcomes))


def _damage(name: str, store: Path, positions: list[int], width: int) -> dict[str, Any]:
    """For each position: change ``width`` bytes there, read all samples, verify, and put the bytes back."""
    expected, source = STORES[name](), random.Random(7)
    outcomes: dict[str, Any] = {"error": 0, "unchanged": 0, "wrong": [], "unnoticed": []}
    with store.open("r+b", buffering=0) as file:
        for position in positions:
            file.seek(position)
            before = file.read(width)
            after = bytes(byte ^ source.randrange(1, 256) for byte in before)
            file.seek(position)
            file.write(after)
            try:
                found = _read_all(store)
                right = len(found) == len(expected) and all(map(same, found, expected))
                if right:
                    outcomes["unchanged"] += 1
                else:
                    outcomes["wrong"].append(position)
            except StoreError:
                outcomes["error"] += 1
            try:
                verify_lmdb(store)
                outcomes["unnoticed"].append(position)
            except StoreError:
                pass
            file.seek(position)
            file.write(before)
    verify_lmdb(store)
    return outcomes


def test_no_damage_passes_unnoticed_or_kills(tmp_path: Path) -> None:
    end, out, err = output_of_fork(lambda: _damage_everywhere(tmp_path))
    assert end == "returned", err[-3000:]
    found = json.loads(out)
    assert len(found) == 6
    for outcomes in found.values():
        assert outcomes["wrong"] == []
        assert outcomes["unnoticed"] == []  # verify_lmdb covers every byte of the file
        assert outcomes["error"] > 40


def _truncate_everywhere(folder: Path) -> None:
    for name in STORES:
        short = _write(name, folder / "short.lmdb")
        size = short.stat().st_size
        lengths = {*range(0, 200, 9), *range(0, size, size // 20), *range(size - 300, size, 3), size - 1}
        for length in sorted(lengths, reverse=True):
            os.truncate(short, length)
            for check in (_read_all, verify_lmdb):
                with pytest.raises(StoreCorruptError, match=str(short)):
                    check(short)
        short.unlink()


def test_what_is_at_the_path_is_said(tmp_path: Path) -> None:
    def reason(path: Path) -> str:
        with pytest.raises(StoreCorruptError) as by_reading:
            LMDBDataset(path)
        with pytest.raises(StoreCorruptError) as by_verifying:
            verify_lmdb(path)
        assert str(by_reading.value) == str(by_verifying.value)
        return str(by_reading.value)

    path = tmp_path / "a.lmdb"
    path.touch()
    assert "is empty" in reason(path)
    path.write_bytes(b"not a store" * 1000)
    assert "not an LMDB file" in reason(path)
    path.write_bytes(_write("varied", tmp_path / "b.lmdb").read_bytes()[:20_000])
    assert "truncated: it has 20000 bytes" in reason(path)
    with (tmp_path / "b.lmdb").open("ab") as file:
        file.write(b"more")
    assert "without the seal" in reason(tmp_path / "b.lmdb")
    with lmdb.open(str(tmp_path / "foreign"), subdir=False) as foreign, foreign.begin(write=True) as transaction:
        transaction.put(b"key", b"value")
    assert "not written by lightning-speedkit" in reason(tmp_path / "foreign")
    lmdb.open(str(tmp_path / "folder")).close()
    assert "is a folder" in reason(tmp_path / "folder")


def test_a_missing_store(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path / "a.lmdb", tmp_path / "no" / "folder", tmp_path / "file" / "below"):
        for check in (LMDBDataset, verify_lmdb):
            with pytest.raises(StoreNotFoundError, match="There is no store") as caught:
                check(path)
            assert isinstance(caught.value, FileNotFoundError)


def test_a_damaged_block_is_named_when_it_is_read_first(tmp_path: Path) -> None:
    marker = b"\x5a" * 3000
    path = write_lmdb([bytes(3000), bytes(3000), marker, bytes(3000)], tmp_path / "a.lmdb", block_bytes=4096)
    data = bytearray(path.read_bytes())
    data[data.index(marker) + 1234] ^= 1
    path.write_bytes(data)
    dataset = LMDBDataset(path)
    assert dataset[0] == dataset[1] == dataset[3] == bytes(3000)
    for _ in range(2):
        with pytest.raises(StoreCorruptError, match=r"block 2 does not match; samples 2 to 2 are damaged"):
            dataset[2]
    with pytest.raises(StoreCorruptError, match=r"block 2 does not match; samples 2 to 2 are damaged"):
        verify_lmdb(path)


def test_damaged_records_are_named(tmp_path: Path) -> None:
    path = _write("varied", tmp_path / "a.lmdb")
    whole = path.read_bytes()
    with lmdb.open(str(path), subdir=False, readonly=True, lock=False) as engine, engine.begin() as transaction:
        values = {key: bytes(transaction.get(key)) for key in (b"meta", b"index", b"crc")}
    for key, value in values.items():
        assert len(value) >= 48
        start = whole.index(value)
        path.write_bytes(whole[:start] + bytes([whole[start] ^ 255]) + whole[start + 1 :])
        with pytest.raises(StoreCorruptError, match=f"record '{key.decode()}'|LMDB's own pages"):
            LMDBDataset(path)[0]
    path.write_bytes(whole)
    assert same(LMDBDataset(path)[0], varied_samples(1)[0])


def test_a_newer_format_says_which_version_is_needed(tmp_path: Path) -> None:
    path = _write("tiny", tmp_path / "a.lmdb")
    whole = bytearray(path.read_bytes())
    whole[-120:-116] = struct.pack("<I", 7)  # the version, then its checksum, as the format document has them
    whole[-116:-112] = bytes(4)
    whole[-116:-112] = struct.pack("<I", zlib.crc32(whole[-128:]))
    path.write_bytes(whole)
    for check in (LMDBDataset, verify_lmdb):
        with pytest.raises(StoreVersionError, match="format 7; this version of lightning-speedkit reads format 1"):
            check(path)


def test_the_report_of_a_sound_store(tmp_path: Path) -> None:
    path = write_lmdb([{"x": torch.zeros(2, 3), "n": i, "s": "a" * i} for i in range(10)], tmp_path / "a.lmdb")
    report = verify_lmdb(path)
    assert (report.path, report.format_version, report.samples, report.blocks) == (path, 1, 10, 1)
    assert report.payload_bytes == 10 * (24 + 8) + sum(range(10))
    assert report.file_bytes == path.stat().st_size
    assert report.fields == ("['x']: tensor float32 (2, 3)", "['n']: int", "['s']: str varies")
    with pytest.raises(AttributeError):
        report.samples = 3  # type: ignore[misc]


def test_a_copy_and_a_link_are_the_same_store(tmp_path: Path) -> None:
    path = _write("varied", tmp_path / "a.lmdb")
    shutil.copy(path, tmp_path / "copy.lmdb")
    os.link(path, tmp_path / "hard.lmdb")
    (tmp_path / "soft.lmdb").symlink_to(path)
    datasets = [LMDBDataset(tmp_path / f"{name}.lmdb") for name in ("a", "copy", "hard", "soft")]
    for i in range(120):
        assert all(same(dataset[i], datasets[0][i]) for dataset in datasets)


def test_two_stores_of_one_layout_have_two_fingerprints(tmp_path: Path) -> None:
    found = set()
    for value in range(3):
        path = write_lmdb([(torch.full((50,), value), value)] * 30, tmp_path / f"{value}.lmdb")
        found.add(path.read_bytes()[-128:])
        assert path.stat().st_size == (tmp_path / "0.lmdb").stat().st_size
    assert len(found) == 3


def test_what_is_no_file_that_can_be_opened_is_an_error_of_ours(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")  # opening one to read waits for a writer
    (tmp_path / "loop").symlink_to("loop")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "socket"))
    cases = {"pipe": "is a pipe", "loop": "cannot be opened", "x" * 300: "cannot be opened", "socket": "socket|opened"}
    for name, words in cases.items():
        for check in (LMDBDataset, verify_lmdb):
            with pytest.raises(StoreError, match=words):
                check(tmp_path / name)


@pytest.mark.parametrize("values", [[7] * 3000, ["a" * (i % 9) for i in range(3000)]])
def test_verified_means_readable_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, values: list[Any]) -> None:
    """A fault of the writer is under the checksums like all else; here the last sample of each block is cut off."""
    path = write_lmdb(values, tmp_path / "a.lmdb", block_bytes=4096)
    assert verify_lmdb(path).blocks > 2
    real = StoreIndex.size
    monkeypatch.setattr(StoreIndex, "size", lambda self, shapes: real(self, shapes) + 1)
    with pytest.raises(StoreCorruptError, match="every checksum matches, but sample 0 cannot be read"):
        verify_lmdb(path)


@pytest.mark.parametrize("block", [0, 1, 2])
def test_each_block_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int) -> None:
    path = write_lmdb([bytes([i]) * 3000 for i in range(3)], tmp_path / "a.lmdb", block_bytes=4096)
    real = Schema.decode

    def failing(self: Schema, data: Any, shapes: Any) -> Any:
        if data[0] == block:
            raise RecursionError("too deep")
        return real(self, data, shapes)

    monkeypatch.setattr(Schema, "decode", failing)
    with pytest.raises(StoreCorruptError, match=f"sample {block} cannot be read: too deep"):
        verify_lmdb(path)


def test_a_path_below_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = _write("tiny", tmp_path / "a.lmdb")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert verify_lmdb("~/a.lmdb").path == path
