"""``speedkit pack``: every format through the command, splits, options, exit codes, and what is left after a fault."""

from __future__ import annotations

import io
import os
import pickle
import sys
from itertools import chain
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
import pytest
from PIL import Image

from lightning_speedkit.cli.main import main
from lightning_speedkit.data import LMDBDataModule, LMDBDataset, verify_lmdb
from lightning_speedkit.data.sources import read_classes
from tests.data.sources.pictures import encoded, make_tree, picture
from tests.data.sources.records import bytes_feature, example, int_feature, record

Captured = pytest.CaptureFixture[str]


def pack(*words: Any) -> int:
    return main(["pack", *map(str, words), "--quiet"])


def stored(path: str) -> list[Any]:
    verify_lmdb(path)
    return list(LMDBDataset(path))


def failed(capsys: Captured, *words: Any) -> str:
    """The message of a pack that ends with 1."""
    assert main(["pack", *map(str, words)]) == 1
    err = capsys.readouterr().err
    assert err.splitlines()[-1].startswith("speedkit pack: ")
    return err


def refused(capsys: Captured, *words: Any) -> str:
    """The message of a command line that ends with 2."""
    with pytest.raises(SystemExit) as raised:
        main(["pack", *map(str, words)])
    assert raised.value.code == 2
    return capsys.readouterr().err


def test_a_tree_of_pictures_becomes_a_store_with_its_classes(capsys: Captured) -> None:
    files = make_tree(Path("tree"), {"cat": 3, "dog": 2})
    assert main(["pack", "tree", "out"]) == 0
    out, err = capsys.readouterr()
    assert stored("out/train.lmdb") == [(files[name], int(name.startswith("dog"))) for name in sorted(files)]
    assert read_classes("out/train.lmdb") == ("cat", "dog")
    assert sorted(os.listdir("out")) == ["train.classes.json", "train.lmdb"]  # noqa: PTH208
    report = {" ".join(line.split()[:-1]): line.split()[-1] for line in out.splitlines()}
    assert report["samples of train.lmdb"] == "5"
    assert report["payload bytes"] == f"{sum(map(len, files.values())) + 5 * 8:,}"
    assert "classes 2, named in train.classes.json" in " ".join(out.split())
    assert "samples/s" in err
    assert "5/5" in err


def test_quiet_says_nothing(capsys: Captured) -> None:
    make_tree(Path("tree"), {"cat": 1})
    assert pack("tree", "a.lmdb") == 0
    assert capsys.readouterr() == ("", "")


def test_sub_folders_named_as_splits_share_their_classes() -> None:
    train = make_tree(Path("data/train"), {"cat": 2, "dog": 1})
    val = make_tree(Path("data/valid"), {"dog": 1, "emu": 1})
    assert pack("data", "out") == 0
    assert stored("out/train.lmdb") == [(train[f"cat/00{i}.{s}"], 0) for i, s in ((0, "png"), (1, "jpg"))] + [
        (train["dog/000.png"], 1)
    ]
    assert stored("out/val.lmdb") == [(val["dog/000.png"], 1), (val["emu/000.png"], 2)]
    assert read_classes("out/train.lmdb") == read_classes("out/val.lmdb") == ("cat", "dog", "emu")


def test_the_stores_are_those_of_the_data_module() -> None:
    np.savez("a.npz", x=np.arange(40, dtype=np.float32).reshape(20, 2), y=np.arange(20))
    assert pack("a.npz", "out", "--split", "0.8,0.2") == 0
    data = LMDBDataModule("out", batch_size=4, shuffle=False)
    data.prepare_data()
    seen = [batch["y"].tolist() for loader in (data.train_dataloader(), data.val_dataloader()) for batch in loader]
    assert [len(batch) for batch in seen] == [4] * 5
    assert sorted(chain.from_iterable(seen)) == list(range(20))


def test_splits_by_fractions_depend_on_the_seed_alone() -> None:
    np.save("a.npy", np.arange(50))
    divided = {}
    for out, seed, workers in (("a", 0, 1), ("b", 0, 3), ("c", 7, 2)):
        assert pack("a.npy", out, "--split", "train=0.9,held=0.1", "--seed", seed, "--workers", workers) == 0
        divided[out] = {name: [int(x) for x in stored(f"{out}/{name}.lmdb")] for name in ("train", "held")}
        assert (len(divided[out]["held"]), sorted(chain.from_iterable(divided[out].values()))) == (5, list(range(50)))
    assert divided["a"] == divided["b"] != divided["c"]


def test_every_format_goes_through_the_command() -> None:
    import pyarrow as pa
    from pyarrow import parquet

    from tests.data.sources.test_webdataset_shards import shard

    Path("a.csv").write_text("x,name\n1,a\n2,b\n")
    parquet.write_table(pa.table({"x": [1, 2], "name": ["a", "b"]}), "a.parquet")
    for i in range(2):
        shard(f"s-{i}.tar", [(f"{i}.cls", b"%d" % (i + 1)), (f"{i}.txt", b"ab"[i : i + 1])])
    Path("a.tfrecord").write_bytes(
        b"".join(record(example({"x": int_feature(i + 1), "name": bytes_feature(b"ab"[i : i + 1])})) for i in range(2))
    )
    rows = [{"x": 1, "name": "a"}, {"x": 2, "name": "b"}]
    with lmdb.open("db") as environment, environment.begin(write=True) as transaction:
        for i, row in enumerate(rows):
            transaction.put(b"%d" % i, pickle.dumps(row))
    Path("my_samples.py").write_text(f"def rows():\n    yield from {rows!r}\n")
    for source, *options in (
        ("a.csv",),
        ("a.parquet",),
        ("a.tfrecord", "--columns", "x,name:str"),
        ("db", "--trust-pickle"),
        ("my_samples:rows",),
    ):
        assert pack(source, "out.lmdb", "--overwrite", *options) == 0
        assert stored("out.lmdb") == rows
    assert pack("out.lmdb", "again.lmdb") == 0
    assert stored("again.lmdb") == rows
    assert pack("s-{0..1}.tar", "shards.lmdb") == 0
    assert stored("shards.lmdb") == [{"cls": 1, "txt": "a"}, {"cls": 2, "txt": "b"}]
    assert pack(".", "folder.lmdb", "--format", "webdataset", "--columns", "cls", "--limit", 1) == 0
    assert stored("folder.lmdb") == [{"cls": 1}]


def test_pickles_need_the_option(capsys: Captured) -> None:
    with lmdb.open("db") as environment, environment.begin(write=True) as transaction:
        transaction.put(b"0", pickle.dumps(1))
    assert "runs whatever code is in it" in failed(capsys, "db", "out.lmdb")


def test_pictures_are_made_smaller() -> None:
    Path("tree/a").mkdir(parents=True)
    Path("tree/a/1.jpg").write_bytes(encoded(picture(0, (100, 60))))
    Path("tree/a/2.bmp").write_bytes(encoded(picture(1, (20, 10)), "BMP"))
    assert pack("tree", "a.lmdb", "--resize", 30, "--workers", 2) == 0
    pictures = [Image.open(io.BytesIO(data)) for data, _ in stored("a.lmdb")]
    assert [(one.format, one.size) for one in pictures] == [("JPEG", (50, 30)), ("PNG", (20, 10))]
    assert pack("tree", "b.lmdb", "--encode", "jpeg", "--quality", 40) == 0
    pictures = [Image.open(io.BytesIO(data)) for data, _ in stored("b.lmdb")]
    assert [(one.format, one.size) for one in pictures] == [("JPEG", (100, 60)), ("JPEG", (20, 10))]


def test_a_bad_item_is_named_and_leaves_nothing(capsys: Captured) -> None:
    files = make_tree(Path("tree"), {"cat": 30, "dog": 4})
    Path("tree/cat/011.jpg").write_bytes(files["cat/011.jpg"][:-9])
    Path("tree/dog/001.jpg").write_bytes(b"<html>")
    for words in (
        ("out",),
        ("one.lmdb",),
        ("divided", "--split", "0.5,0.5"),
        ("made", "--check", "full", "--workers", 3),
    ):
        told = failed(capsys, "tree", *words)
        assert "tree/cat/011.jpg: A truncated JPEG of 10 x 12 pixels" in told
        assert told.endswith("With --skip-bad such samples are left out and listed.\n")
    assert [path for path in Path().rglob("*") if path.is_file() and not path.is_relative_to("tree")] == []
    assert pack("tree", "out", "--skip-bad") == 0
    err = capsys.readouterr().err.splitlines()
    assert err[0] == "2 bad samples were left out:"
    assert err[1].startswith("  tree/cat/011.jpg: A truncated JPEG")
    assert err[2].startswith("  tree/dog/001.jpg: not a picture")
    assert len(stored("out/train.lmdb")) == 32
    assert main(["pack", "tree", "out", "--skip-bad", "--overwrite"]) == 0
    assert "left out 2" in " ".join(capsys.readouterr().out.split())


def test_one_broken_split_comes_after_those_that_are_whole(capsys: Captured) -> None:
    make_tree(Path("data/train"), {"a": 2})
    make_tree(Path("data/val"), {"a": 2})
    Path("data/val/a/000.png").write_bytes(b"")
    assert "data/val/a/000.png: the file is empty" in failed(capsys, "data", "out")
    assert not Path("out/val.lmdb").exists()
    verify_lmdb("out/train.lmdb")


def test_what_is_there_is_kept_unless_told(capsys: Captured) -> None:
    np.save("a.npy", np.arange(3))
    Path("out").mkdir()
    Path("out/val.lmdb").write_text("precious")
    message = failed(capsys, "a.npy", "out", "--split", "0.5,0.5")
    assert "out/val.lmdb is there already: give --overwrite" in message
    assert "is not replaced" in failed(capsys, "a.npy", "out", "--split", "0.5,0.5", "--overwrite")
    assert os.listdir("out") == ["val.lmdb"]  # noqa: PTH208
    assert Path("out/val.lmdb").read_text() == "precious"
    assert pack("a.npy", "x.lmdb") == 0
    np.save("a.npy", np.arange(4))
    assert pack("a.npy", "x.lmdb", "--overwrite") == 0
    assert len(stored("x.lmdb")) == 4


def test_a_split_that_no_data_module_serves_is_noted(capsys: Captured) -> None:
    np.save("a.npy", np.arange(8))
    assert main(["pack", "a.npy", "out", "--split", "trian=0.5,val=0.5"]) == 0
    assert (
        "note: LMDBDataModule serves train, val, test and predict, and not 'trian'. Did you mean 'train'?"
        in capsys.readouterr().err
    )
    assert main(["pack", "a.npy", "other", "--split", "train=0.5,val=0.25,test=0.25"]) == 0
    assert "note:" not in capsys.readouterr().err
    assert pack("a.npy", "quiet", "--split", "trian=0.5,val=0.5") == 0
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("out", "store"),
    [("v1.0", "v1.0/train.lmdb"), ("x.db/", "x.db/train.lmdb"), ("there.d", "there.d/train.lmdb"), (".hidden", None)],
)
def test_folders_whose_names_have_a_dot(out: str, store: str | None) -> None:
    np.save("a.npy", np.arange(3))
    Path("there.d").mkdir()
    assert pack("a.npy", out) == 0
    assert len(stored(store or f"{out}/train.lmdb")) == 3


def test_several_stores_that_are_there_are_named_together(capsys: Captured) -> None:
    np.save("a.npy", np.arange(8))
    Path("out").mkdir()
    for names, told in (
        (["val"], "out/val.lmdb is there already: give --overwrite to replace it, or"),
        (["train"], "out/train.lmdb and out/val.lmdb are there already: give --overwrite to replace them, or"),
        (
            ["test"],
            "out/train.lmdb, out/val.lmdb and out/test.lmdb are there already: give --overwrite to replace them",
        ),
    ):
        Path(f"out/{names[0]}.lmdb").write_text("precious")
        assert told in failed(capsys, "a.npy", "out", "--split", "0.5,0.25,0.25")


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(0.0123, "0.012"), (0.5, "0.5"), (1.26, "1.3"), (9.94, "9.9"), (9.96, "10"), (12.34, "12"), (4567.0, "4,567")],
)
def test_seconds_have_two_digits_or_more(seconds: float, shown: str, capsys: Captured) -> None:
    from lightning_speedkit.cli import pack as module
    from lightning_speedkit.data import PackReport, open_source

    np.save("a.npy", np.arange(3))
    report = PackReport(
        paths={"train": Path("x.lmdb")}, samples={"train": 3}, payload_bytes=24, skipped=(), seconds=seconds
    )
    module._print(report, open_source("a.npy"))
    assert f"seconds {shown} rate" in " ".join(capsys.readouterr().out.split())


def test_one_bad_sample_is_told_in_the_singular(capsys: Captured) -> None:
    make_tree(Path("tree"), {"cat": 3})
    Path("tree/cat/001.jpg").write_bytes(b"<html>")
    assert pack("tree", "out", "--skip-bad") == 0
    assert capsys.readouterr().err.splitlines()[0] == "1 bad sample was left out:"


def test_of_a_shard_that_ends_early_at_least_so_many_samples_are_lost(capsys: Captured) -> None:
    from tests.data.sources.test_webdataset_shards import shard

    for i in range(8):
        shard(f"s-{i}.tar", [(f"{i}{k}.cls", b"1") for k in range(9)])
        if i != 1:
            Path(f"s-{i}.tar").write_bytes(Path(f"s-{i}.tar").read_bytes()[: 6 * 1024 + 100])
    assert main(["pack", "s-{0..1}.tar", "a.lmdb", "--skip-bad"]) == 0
    out, err = capsys.readouterr()
    assert "left out at least 1 " in " ".join(out.split())
    lines = err.splitlines()
    assert lines[-2] == (
        "At least 1 bad sample was left out; the rest of s-0.tar could not be read, and its samples are lost:"
    )
    assert lines[-1].startswith("  s-0.tar, after the key '04': ")
    assert len(stored("a.lmdb")) == 5 + 9
    assert pack("s-{0..7}.tar", "b.lmdb", "--skip-bad") == 0
    first = capsys.readouterr().err.splitlines()[0]
    assert first.startswith("At least 7 bad samples were left out; the rest of s-0.tar, s-2.tar, ")
    assert ", s-5.tar and 2 more could not be read" in first


def test_a_damaged_archive_is_refused_as_a_whole(capsys: Captured) -> None:
    np.savez_compressed("a.npz", x=np.random.default_rng(0).integers(0, 50, 30000))
    data = bytearray(Path("a.npz").read_bytes())
    data[len(data) // 2] ^= 4
    Path("a.npz").write_bytes(data)
    assert "which of its rows are right cannot be told" in failed(capsys, "a.npz", "out.lmdb", "--skip-bad")
    assert os.listdir() == ["a.npz"]  # noqa: PTH208


def test_what_gives_no_samples_is_told_in_english(capsys: Captured) -> None:
    Path("seven.py").write_text("samples = 7")
    assert "seven:samples gave an int: it must give an iterable" in failed(capsys, "seven:samples", "out.lmdb")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["a.npy", "x.db"], "got x.db: type x.lmdb for one store, or x.db/ for a folder of that name"),
        (["a.npy", "x.LMDB"], "type x.lmdb for one store"),
        (["a.npy", "out/x.mdb", "--split", "0.5,0.5"], "type out/x.lmdb for one store, or out/x.mdb/ for a folder"),
        (["a.npy", "a.npy"], "type a.lmdb for one store"),
        (["a.npy", "x.lmdb", "--split", "0.5,0.5"], "OUT must be a folder for the splits train, val"),
        (["a.npy", "out", "--split", "0.5,0.6"], "--split: the fractions of a split are above 0 and their sum is 1"),
        (["a.npy", "out", "--split", "a=half"], "--split: a split is written as"),
        (["a.npy", "out", "--seed", "1"], "--seed has no effect without --split"),
        (["a.npy", "out", "--quality", "50"], "--quality has no effect"),
        (["a.npy", "out", "--encode", "png", "--quality", "50"], "--quality has no effect"),
        (["a.npy", "out", "--resize", "9", "--check", "full"], "--check has no effect beside"),
        (["a.npy", "out", "--columns", "x"], "columns has no effect on the format npy"),
        (["a.npy", "out", "--trust-pickle"], "trust_pickle has no effect on the format npy"),
        (["a.npy", "out", "--check", "full"], "check has no effect on the format npy"),
        (["a.npy", "out", "--limit", "0"], "must be at least 1, got 0"),
        (["a.npy", "out", "--workers", "x"], "invalid whole number value: 'x'"),
        (["a.npy", "out", "--quality", "96", "--resize", "9"], "must be from 1 to 95, got 96"),
        (["a.npy", "out", "--format", "tar"], "invalid choice"),
        (["a.npy"], "OUT"),
    ],
)
def test_a_wrong_command_line_is_exit_code_2(words: list[str], message: str, capsys: Captured) -> None:
    np.save("a.npy", np.arange(8))
    assert message in refused(capsys, *words)
    assert os.listdir() == ["a.npy"]  # noqa: PTH208


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nowhere", "out"], "There is nothing at nowhere"),
        (["a.npy", "out", "--split", "train=0.99,val=0.01"], "val would be empty"),
        (["a.npy", "out", "--resize", "9"], "a.npy row 0: the sample has no picture"),
        (["no_module:x", "out"], "no module 'no_module'"),
        (["empty.csv", "out"], "There were no samples"),
    ],
)
def test_a_fault_is_exit_code_1(words: list[str], message: str, capsys: Captured) -> None:
    np.save("a.npy", np.arange(8))
    Path("empty.csv").write_text("x,y\n")
    assert message in failed(capsys, *words)
    assert not list(Path().rglob("*.lmdb*"))


def test_the_splits_of_a_folder_cannot_be_divided_or_put_into_one_file(capsys: Captured) -> None:
    make_tree(Path("data/train"), {"a": 2})
    make_tree(Path("data/test"), {"a": 2})
    assert "has the splits train, test already" in refused(capsys, "data", "out", "--split", "0.5,0.5")
    assert "OUT must be a folder for the splits train, test" in refused(capsys, "data", "a.lmdb")


def test_modules_of_the_current_folder_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the folder is not on the path, as for the installed command, which is a script elsewhere."""
    Path("only_here.py").write_text("samples = [1, 2, 3]")
    path = [folder for folder in sys.path if folder not in ("", str(Path.cwd()))]
    monkeypatch.setattr(sys, "path", path)
    found = list(path)
    assert pack("only_here:samples", "a.lmdb") == 0
    assert (stored("a.lmdb"), sys.path) == ([1, 2, 3], found)


def test_the_formats_of_the_help_are_those_of_the_library() -> None:
    from lightning_speedkit.cli import pack as module
    from lightning_speedkit.data.sources.detection import FORMATS

    assert module._FORMATS == FORMATS
