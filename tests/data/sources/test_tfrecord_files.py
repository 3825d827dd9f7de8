"""TFRecord files whose bytes and checksums are made by hand."""

from __future__ import annotations

import gzip
import struct
from pathlib import Path

import numpy as np
import pytest

from lightning_speedkit.data import LMDBDataset, write_lmdb
from lightning_speedkit.data.sources.tfrecord_files import TFRecordFiles, masked_crc
from lightning_speedkit.errors import SourceError
from tests.data.sources.records import bytes_feature, crc32c, example, float_feature, int_feature, masked, record

MESSAGES = [
    example({"image": bytes_feature(b"jpeg %d" % i), "label": int_feature(i), "box": float_feature(i, 0.5)})
    for i in range(5)
]


def written(*messages: bytes, name: str = "a.tfrecord") -> Path:
    Path(name).write_bytes(b"".join(map(record, messages)))
    return Path(name)


@pytest.mark.parametrize(
    ("data", "crc"),
    [  # RFC 3720, B.4, and the check value of the catalogue of CRCs
        (bytes(32), 0x8A9136AA),
        (b"\xff" * 32, 0x62A8AB43),
        (bytes(range(32)), 0x46DD794E),
        (bytes(range(31, -1, -1)), 0x113FDB5C),
        (b"123456789", 0xE3069283),
    ],
)
def test_the_checksum_is_that_of_the_standard(data: bytes, crc: int) -> None:
    assert crc32c(data) == crc
    rotated = (crc >> 15) + ((crc & 0x7FFF) << 17)
    assert masked_crc(data) == masked(data) == (rotated + 0xA282EAD8) % 2**32


def test_records_are_dicts_of_their_features() -> None:
    source = TFRecordFiles([written(*MESSAGES)])
    samples = list(source)
    assert len(source) == 5
    assert [list(sample) for sample in samples] == [["box", "image", "label"]] * 5
    for i, sample in enumerate(samples):
        assert (sample["image"], sample["label"], type(sample["label"])) == (b"jpeg %d" % i, i, int)
        assert (sample["box"].tolist(), sample["box"].dtype) == ([i, 0.5], np.float32)
    stored = LMDBDataset(write_lmdb(source, "a.lmdb"))[3]
    assert (stored["image"], stored["label"], stored["box"].tolist()) == (b"jpeg 3", 3, [3, 0.5])


def test_gzip_and_several_files() -> None:
    plain = written(*MESSAGES[:2], name="a.tfrecord-00000-of-00002")
    packed = Path("a.tfrecord-00001-of-00002")
    packed.write_bytes(gzip.compress(written(*MESSAGES[2:], name="b").read_bytes()))
    source = TFRecordFiles([plain, packed])
    assert len(source) == 5
    assert [sample["label"] for sample in source] == [0, 1, 2, 3, 4]
    assert [item.place for item in source.items()][2] == "a.tfrecord-00001-of-00002 record 1"


def test_a_plain_file_that_begins_as_gzip_does_is_read() -> None:
    message = example({"x": bytes_feature(bytes(0x8B1F - 23))})
    assert len(message) == 0x8B1F
    assert [len(sample["x"]) for sample in TFRecordFiles([written(message)])] == [0x8B1F - 23]


def test_the_number_of_values_is_that_of_the_first_record_unless_an_array_is_chosen() -> None:
    path = written(*(example({"box": float_feature(*range(n)), "text": bytes_feature(b"\xc3\xa9")}) for n in (1, 3, 0)))
    first, second, third = TFRecordFiles([path]).items()
    assert first.read()["box"] == 0.0
    for item, count in ((second, 3), (third, 0)):
        with pytest.raises(SourceError, match=rf"the feature 'box' has {count} values and not one: choose box:array"):
            item.read()
    samples = list(TFRecordFiles([path], columns={"text": "str", "box": "array"}))
    assert [(sample["text"], sample["box"].tolist()) for sample in samples] == [("é", [0]), ("é", [0, 1, 2]), ("é", [])]


def test_features_that_are_missing_or_not_text_are_faults() -> None:
    path = written(
        example({"a": bytes_feature(b"x")}), example({"b": int_feature(1)}), example({"a": bytes_feature(b"\xff")})
    )
    first, second, third = TFRecordFiles([path], columns={"a": "str"}).items()
    assert first.read() == {"a": "x"}
    with pytest.raises(SourceError, match=r"^a\.tfrecord record 2: it has no feature 'a'"):
        second.read()
    with pytest.raises(SourceError, match=r"record 3: the feature 'a' is not UTF-8"):
        third.read()
    with pytest.raises(SourceError, match=r"has no 'c'"):
        list(TFRecordFiles([path], columns={"c": ""}))


def test_a_flipped_bit_anywhere_is_found() -> None:
    path = written(*MESSAGES[:2])
    whole = path.read_bytes()
    first = len(record(MESSAGES[0]))
    for position in range(len(whole)):
        path.write_bytes(whole[:position] + bytes([whole[position] ^ 4]) + whole[position + 1 :])
        items = list(TFRecordFiles([path]).items())
        number = 1 if position < first else 2
        in_head = position - (0 if number == 1 else first) < 12
        with pytest.raises(SourceError, match=rf"record {number}: .*checksum of its {'length' if in_head else 'data'}"):
            items[number - 1].read()
        others = [item.read()["label"] for i, item in enumerate(items) if i != number - 1]
        assert others == ([1 - (number - 1)] if number == 2 or not in_head else [])


def test_every_cut_is_found_but_that_between_records() -> None:
    path = written(*MESSAGES[:2])
    whole, first = path.read_bytes(), len(record(MESSAGES[0]))
    for size in set(range(1, len(whole))) - {first}:
        path.write_bytes(whole[:size])
        with pytest.raises(SourceError, match=r"^a\.tfrecord: record \d ends"):
            len(TFRecordFiles([path]))
        *good, bad = TFRecordFiles([path]).items()
        assert [item.read()["label"] for item in good] == ([0] if size > first else [])
        with pytest.raises(SourceError, match=rf"^a\.tfrecord record {2 if size > first else 1}: .* cut short"):
            bad.read()


def test_other_contents_are_named() -> None:
    for content, fault in ((b"no record at all", "checksum of its length"), (record(b"text"), r"tf\.train\.Example")):
        Path("a.tfrecord").write_bytes(content)
        with pytest.raises(SourceError, match=fault):
            list(TFRecordFiles([Path("a.tfrecord")]))
    packed = Path("a.tfrecord.gz")
    packed.write_bytes(gzip.compress(record(MESSAGES[0]))[:-9])
    with pytest.raises(SourceError, match=r"a\.tfrecord\.gz"):
        list(TFRecordFiles([packed]))
    Path("huge.tfrecord").write_bytes(struct.pack("<QI", 2**60, masked(struct.pack("<Q", 2**60))) + b"x")
    with pytest.raises(SourceError, match="at most 2 GiB"):
        list(TFRecordFiles([Path("huge.tfrecord")]))
    assert list(TFRecordFiles([written()])) == []
