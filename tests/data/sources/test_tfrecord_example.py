"""tf.train.Example messages, made byte by byte."""

from __future__ import annotations

import contextlib
import struct

import numpy as np
import pytest

from lightning_speedkit.data.sources.tfrecord_example import ExampleFault, parse_example
from tests.data.sources.records import bytes_feature, example, field, float_feature, int_feature, varint


def test_a_message_worked_out_by_hand() -> None:
    # Example.features(1) > entry(1) > key(1) "a", value(2) > int64_list(3) > value(1) packed 42, 7
    message = bytes.fromhex("0a 0d 0a 0b 0a 01 61 12 06 1a 04 0a 02 2a 07")
    (name, values), = parse_example(message).items()  # fmt: skip
    assert (name, values.tolist(), values.dtype) == ("a", [42, 7], np.int64)


def test_every_kind_of_list() -> None:
    parsed = parse_example(
        example(
            {
                "z/bytes": bytes_feature(b"\0\xff", b""),
                "floats": float_feature(0.5, -2.25, 3e38),
                "ints": int_feature(0, 1, 127, 128, -1, 2**63 - 1, -(2**63)),
                "é": int_feature(),
                "nothing": b"",
            }
        )
    )
    assert list(parsed) == ["floats", "ints", "nothing", "z/bytes", "é"]
    assert parsed["z/bytes"] == [b"\0\xff", b""]
    assert parsed["floats"].tolist() == np.float32([0.5, -2.25, 3e38]).tolist()
    assert parsed["ints"].tolist() == [0, 1, 127, 128, -1, 2**63 - 1, -(2**63)]
    assert parsed["é"].tolist() == []
    assert parsed["nothing"] == []
    assert parse_example(b"") == {}


def test_lists_that_are_not_packed() -> None:
    floats = field(2, b"".join(varint(1 * 8 + 5) + struct.pack("<f", value) for value in (1.5, 2.5)))
    ints = field(3, b"".join(varint(1 * 8 + 0) + varint(value) for value in (300, -5)))
    parsed = parse_example(example({"f": floats, "i": ints}))
    assert (parsed["f"].tolist(), parsed["i"].tolist()) == ([1.5, 2.5], [300, -5])


def test_the_last_of_two_entries_of_one_name_counts() -> None:
    assert parse_example(example([("a", int_feature(1)), ("a", int_feature(2))]))["a"].tolist() == [2]


def test_every_cut_and_every_other_message_is_a_fault() -> None:
    whole = example({"a": bytes_feature(b"abc"), "b": float_feature(1.0), "c": int_feature(5, 600)})
    for size in range(1, len(whole)):
        with pytest.raises(ExampleFault):
            parse_example(whole[:size])
    for other in (
        b"plain text",
        b"\xff" * 12,
        field(3, b"x"),
        varint(8) + varint(1),
        field(1, field(2, b"")),
        b"\x00\x00",
    ):
        with pytest.raises(ExampleFault, match=r"tf\.train\.Example|ends"):
            parse_example(other)
    with pytest.raises(ExampleFault, match="SequenceExample"):
        parse_example(field(1, b"") + field(2, field(1, b"")))


def test_random_bytes_never_do_worse_than_a_fault() -> None:
    whole = bytearray(example({"a": bytes_feature(b"abc"), "b": float_feature(1.0), "c": int_feature(5, 600)}))
    random = np.random.default_rng(0)
    for _ in range(2000):
        changed = bytearray(whole)
        changed[random.integers(len(whole))] = random.integers(256)
        with contextlib.suppress(ExampleFault):
            parse_example(bytes(changed))
