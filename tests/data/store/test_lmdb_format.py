"""A reader written from docs/lmdb-format.md alone, with lmdb, json and numpy, must agree with the kit's."""

from __future__ import annotations

import json
import struct
import zlib
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
import pytest
import torch

from lightning_speedkit.data import write_lmdb
from lightning_speedkit.data.store.lmdb_format import has_seal
from tests.data.samples import varied_samples


class Reader:
    """Format 1: the records, the place of a sample, and the bytes and shape of each of its fields."""

    def __init__(self, path: Path) -> None:
        engine = lmdb.open(str(path), subdir=False, readonly=True, lock=False)
        with engine.begin() as transaction:
            self.records = {bytes(key): bytes(value) for key, value in transaction.cursor()}
        engine.close()
        self.meta = json.loads(self.records[b"meta"])
        self.arrays = {
            (entry["name"], entry.get("field")): np.frombuffer(
                self.records[b"index"], entry["dtype"], int(np.prod(entry["shape"])), entry["offset"]
            ).reshape(entry["shape"])
            for entry in self.meta["index"]
        }

    def fields(self, sample: int) -> list[tuple[bytes, tuple[int, ...]]]:
        meta = self.meta
        if meta["sample_bytes"] is not None:
            stride = max(-(-meta["sample_bytes"] // meta["alignment"]) * meta["alignment"], 1)
            per_block = max((meta["block_bytes"] - meta["sample_bytes"]) // stride + 1, 1)
            block, start = sample // per_block, sample % per_block * stride
        else:
            firsts = self.arrays["block_first", None]
            block = max(b for b in range(meta["blocks"]) if firsts[b] <= sample)
            start = int(self.arrays["sample_start", None][sample])
        data = self.records[struct.pack(">Q", block)]
        found = []
        for number, (field, leaf) in enumerate(zip(meta["fields"], leaves(meta["schema"]), strict=True)):
            shape = field["shape"]
            if shape is None:
                shape = self.arrays["shape", number][sample].tolist()
                if ("rank", number) in self.arrays:
                    shape = shape[: self.arrays["rank", number][sample]]
            size = item_bytes(leaf) * int(np.prod(shape))
            found.append((data[start : start + size], tuple(shape)))
            start += size
        return found


def leaves(tree: dict[str, Any]) -> list[dict[str, Any]]:
    if "items" not in tree:
        return [tree]
    return [leaf for item in tree["items"] for leaf in leaves(item)]


def item_bytes(leaf: dict[str, Any]) -> int:
    if leaf["kind"] in ("ndarray", "scalar"):
        return np.dtype(leaf["dtype"]).itemsize
    tensors = {"uint8": 1, "bfloat16": 2, "float32": 4, "int64": 8}
    plain = {"int": 8, "float": 8, "bool": 1, "str": 1, "bytes": 1, "none": 0}
    return tensors[leaf["dtype"]] if leaf["kind"] == "tensor" else plain[leaf["kind"]]


def test_varied_samples(tmp_path: Path) -> None:
    samples = varied_samples(60)
    reader = Reader(write_lmdb(samples, tmp_path / "a.lmdb", block_bytes=4096))
    paths = ["['image']", "['boxes']", "['label']", "['pair'][0]", "['pair'][1][0]", "['pair'][1][1]", "['name']"]
    assert [field["path"] for field in reader.meta["fields"]] == [*paths, "['half']"]
    for i, sample in enumerate(samples):
        image, boxes, label, third, even, raw, name, half = reader.fields(i)
        assert (image[0], image[1]) == (sample["image"].numpy().tobytes(), tuple(sample["image"].shape))
        assert (boxes[0], boxes[1]) == (sample["boxes"].tobytes(), sample["boxes"].shape)
        assert label == (struct.pack("<q", i), ())
        assert third == (struct.pack("<d", i / 3), ())
        assert even == (bytes([i % 2 == 0]), ())
        assert raw == (b"\x00\xff" * (i % 5), (2 * (i % 5),))
        assert name[0].decode() == f"sample {i} ä"
        assert half == (sample["half"].view(torch.int16).numpy().tobytes(), (2,))


@pytest.mark.parametrize("size", [0, 1, 63, 64, 1000, 4096, 5000])
def test_samples_of_one_size_need_no_index(tmp_path: Path, size: int) -> None:
    rows = torch.arange(70 * size, dtype=torch.int32).to(torch.uint8).reshape(70, size)
    reader = Reader(write_lmdb(rows, tmp_path / "a.lmdb", block_bytes=4096))
    assert reader.records[b"index"] == b""
    assert reader.meta["sample_bytes"] == size
    for i in range(70):
        assert reader.fields(i) == [(rows[i].numpy().tobytes(), (size,))]


def test_the_meta_record_word_for_word(tmp_path: Path) -> None:
    from lightning_speedkit import __version__

    samples = [(torch.zeros(3, 2), {"a": 1, 7: np.float32(2)}) for _ in range(5)]
    reader = Reader(write_lmdb(samples, tmp_path / "a.lmdb"))
    page_bytes = reader.meta.pop("page_bytes")
    assert page_bytes >= 4096
    assert page_bytes & (page_bytes - 1) == 0
    assert reader.meta == {
        "format_version": 1,
        "writer": f"lightning-speedkit {__version__}",
        "engine": "lmdb-0.9",
        "byte_order": "little",
        "block_bytes": 1048576,
        "samples": 5,
        "blocks": 1,
        "payload_bytes": 5 * (24 + 8 + 4),
        "alignment": 1,
        "sample_bytes": 36,
        "schema": {
            "kind": "tuple",
            "items": [
                {"kind": "tensor", "dtype": "float32"},
                {"kind": "dict", "keys": ["a", 7], "items": [{"kind": "int"}, {"kind": "scalar", "dtype": "<f4"}]},
            ],
        },
        "fields": [
            {"path": "[0]", "codec": "raw", "shape": [3, 2]},
            {"path": "[1]['a']", "codec": "raw", "shape": []},
            {"path": "[1][7]", "codec": "raw", "shape": []},
        ],
        "index": [],
    }


def test_checksums_and_seal(tmp_path: Path) -> None:
    path = write_lmdb(varied_samples(60), tmp_path / "a.lmdb", block_bytes=4096)
    reader, whole = Reader(path), path.read_bytes()
    blocks = reader.meta["blocks"]
    assert blocks >= 3
    assert sorted(reader.records) == [*(struct.pack(">Q", b) for b in range(blocks)), b"crc", b"index", b"meta"]
    crc = reader.records[b"crc"]
    assert struct.unpack_from("<QQ", crc) == (60, blocks)
    meta_crc, index_crc, *block_crcs, own_crc = struct.unpack_from(f"<{blocks + 3}I", crc, 16)
    assert len(crc) == 16 + 4 * (blocks + 3)
    assert meta_crc == zlib.crc32(reader.records[b"meta"])
    assert index_crc == zlib.crc32(reader.records[b"index"])
    assert block_crcs == [zlib.crc32(reader.records[struct.pack(">Q", b)]) for b in range(blocks)]
    assert own_crc == zlib.crc32(crc[:-4])
    footer = struct.unpack("<8sIIQQQQQIIIII52x", whole[-128:])
    magic, version, footer_crc, file_bytes, lmdb_bytes, runs, samples, seal_blocks, page_bytes = footer[:9]
    runs_crc, tree_crc, _, record_crc = footer[9:]
    assert (magic, version, file_bytes, samples, seal_blocks) == (b"SPKSEAL\n", 1, len(whole), 60, blocks)
    assert footer_crc == zlib.crc32(whole[-128:-116] + bytes(4) + whole[-112:])
    assert lmdb_bytes % page_bytes == 0
    assert lmdb_bytes + 16 * runs + 128 == len(whole)
    assert runs_crc == zlib.crc32(whole[lmdb_bytes:-128])
    assert record_crc == own_crc
    tree = b"".join(
        whole[first * page_bytes : (first + count) * page_bytes]
        for first, count in struct.iter_unpack("<QQ", whole[lmdb_bytes:-128])
    )
    assert tree_crc == zlib.crc32(tree)


def test_sample_starts_are_aligned(tmp_path: Path) -> None:
    samples = [torch.zeros(3000 + 7 * i, dtype=torch.uint8) for i in range(20)]
    reader = Reader(write_lmdb(samples, tmp_path / "a.lmdb", block_bytes=1 << 16))
    assert reader.meta["alignment"] == 64
    assert (reader.arrays["sample_start", None] % 64 == 0).all()


def test_a_seal_is_known_by_the_last_128_bytes(tmp_path: Path) -> None:
    path = write_lmdb([1], tmp_path / "a.lmdb")
    content = path.read_bytes()
    for kept, sealed in ((content, True), (content[-128:], True), (content[:-1], False), (b"", False)):
        path.write_bytes(kept)
        assert has_seal(path) == sealed
