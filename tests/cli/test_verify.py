"""``speedkit verify``: sound and damaged stores, one or a folder of them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from lightning_speedkit.cli.main import main
from lightning_speedkit.data import write_lmdb
from lightning_speedkit.errors import StoreCorruptError, StoreNotFoundError


@pytest.fixture
def store() -> Path:
    return Path(write_lmdb([(i, float(i)) for i in range(100)], "numbers.lmdb"))


@pytest.fixture
def damaged(store: Path) -> Path:
    content = bytearray(store.read_bytes())
    content[len(content) // 2] ^= 0xFF
    path = Path("damaged.lmdb")
    path.write_bytes(content[: len(content) - 4096])
    return path


def test_a_sound_store_is_reported(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", store.name]) == 0
    title, *rows = capsys.readouterr().out.splitlines()
    assert title == "numbers.lmdb: every checksum matches"
    values = {" ".join(words[:-1]): words[-1] for words in map(str.split, rows)}
    assert values["samples"] == "100"
    assert values["payload bytes"] == "1,600"  # an int and a float of 8 bytes per sample
    assert values["file bytes"] == f"{store.stat().st_size:,}"


def test_a_damaged_store_is_exit_code_1_with_what_is_wrong(damaged: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(damaged)]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("speedkit verify: ")
    assert "damaged.lmdb" in err


def test_a_folder_is_every_store_in_it(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("second.lmdb").write_bytes(store.read_bytes())
    assert main(["verify", "."]) == 0
    assert [line for line in capsys.readouterr().out.splitlines() if "every checksum" in line] == [
        "numbers.lmdb: every checksum matches",
        "second.lmdb: every checksum matches",
    ]
    Path("empty").mkdir()
    assert main(["verify", "empty"]) == 1
    assert "holds no *.lmdb file" in capsys.readouterr().err


def test_every_store_of_a_folder_is_checked_whatever_the_others_are(
    damaged: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("a.lmdb").write_bytes(Path("numbers.lmdb").read_bytes())  # in the order of their names
    Path("empty.lmdb").touch()
    os.mkfifo("pipe.lmdb")
    Path("loop.lmdb").symlink_to("loop.lmdb")
    assert main(["verify", "."]) == 1
    out, err = capsys.readouterr()
    sound = [line for line in out.splitlines() if "every checksum" in line]
    assert sound == ["a.lmdb: every checksum matches", "numbers.lmdb: every checksum matches"]
    assert [line.startswith("speedkit verify: ") for line in err.splitlines()] == [True] * 4
    names = [damaged.name, "empty.lmdb", "loop.lmdb", "pipe.lmdb"]
    assert all(name in line for name, line in zip(names, err.splitlines(), strict=True))
    with pytest.raises(StoreCorruptError, match=damaged.name):
        main(["verify", ".", "--debug"])


@pytest.mark.parametrize("name", ["pipe", "loop", "x" * 300])
def test_what_cannot_be_opened_is_one_line(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    os.mkfifo("pipe")
    Path("loop").symlink_to("loop")
    assert main(["verify", name]) == 1
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert name in err


def test_what_a_store_holds_is_told_one_kind_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    Path(write_lmdb([{"image": b"123", "label": 1}], "pairs.lmdb"))
    assert main(["verify", "pairs.lmdb"]) == 0
    out = capsys.readouterr().out
    assert "image" in out
    assert "label" in out


def test_nothing_at_the_path_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "absent.lmdb"]) == 1
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert "absent.lmdb" in err
    with pytest.raises(StoreNotFoundError):
        main(["verify", "absent.lmdb", "--debug"])


def test_debug_shows_where_a_store_is_damaged(damaged: Path) -> None:
    with pytest.raises(StoreCorruptError):
        main(["--debug", "verify", str(damaged)])
