"""``speedkit data bench``: what it measures of which store, and what it says."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightning_speedkit.cli import data as module
from lightning_speedkit.cli.image_option import encoded_pictures
from lightning_speedkit.cli.main import main
from lightning_speedkit.data import write_lmdb
from lightning_speedkit.data.loading.loader_speed import LoaderPass, LoaderSpeed
from lightning_speedkit.errors import SourceError, StoreNotFoundError

QUICK = ["--seconds", "0.05", "--workers", "1", "--no-disk"]


@pytest.fixture
def store() -> str:
    rows = np.random.default_rng(0).integers(0, 255, (64, 3, 16, 16), dtype=np.uint8)
    write_lmdb(((row, number) for number, row in enumerate(rows)), "raw.lmdb")
    return "raw.lmdb"


def _table(out: str) -> dict[str, str]:
    """The rows of one store: the name, and what stands beside it."""
    lines = [line.strip() for line in out.splitlines()[1:] if line.strip()]
    names = (
        "store", "pictures", "batches", "machine", "first pass", "from memory", "memory copy", "disk",
        "without transform",
        "without decoding", "without both", "DataLoader, 0 workers", "DataLoader, 1 workers", "bound by", "advice",
    )  # fmt: skip
    found = {name: line[len(name) :].strip() for line in lines for name in names if line.startswith(f"{name}  ")}
    assert len(found) == len(lines), out
    return found


def _number(text: str) -> float:
    return float(text.split()[0].replace(",", ""))


def test_a_store_of_tensors(store: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "bench", store, *QUICK, "--batch-size", "8"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("raw.lmdb\n")
    table = _table(out)
    assert table["store"].startswith("64 samples, ")
    assert table["store"].endswith(" 776 bytes per sample when loaded")  # 3 x 16 x 16, and a number of 8
    assert table["disk"] == "not measured"
    assert table["bound by"] in ("memory copy", "handing out batches")
    assert "without transform" not in table
    samples, megabytes = _number(table["memory copy"]), _number(table["memory copy"].split(", ", 1)[1])
    assert megabytes * 1e6 == pytest.approx(samples * 776, rel=0.05, abs=1e6)
    warm, share = _number(table["from memory"]), float(table["from memory"].split()[-5].rstrip("%")) / 100
    assert share == pytest.approx(warm / samples, abs=0.02)


def test_the_store_is_not_changed(store: str) -> None:
    before = Path(store).read_bytes(), Path(store).stat().st_mtime_ns
    main(["data", "bench", store, *QUICK, "--cold"])
    assert (Path(store).read_bytes(), Path(store).stat().st_mtime_ns) == before
    assert sorted(path.name for path in Path.cwd().iterdir()) == ["raw.lmdb"]


def test_the_disk_is_measured_and_leaves_nothing(store: str, capsys: pytest.CaptureFixture[str]) -> None:
    main(["data", "bench", store, "--seconds", "0.1", "--workers", "1"])
    assert "sequential" in _table(capsys.readouterr().out)["disk"]
    assert sorted(path.name for path in Path.cwd().iterdir()) == ["raw.lmdb"]


def test_a_disk_that_cannot_be_measured_is_told(
    store: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(folder: Any, *, seconds: float) -> Any:
        raise OSError("nothing to read there")

    monkeypatch.setattr("lightning_speedkit.measure.storage.measure_storage", fail)
    assert main(["data", "bench", store, "--seconds", "0.05", "--workers", "1"]) == 0
    assert _table(capsys.readouterr().out)["disk"] == "not measured: nothing to read there"


def test_a_folder_is_every_store_in_it(store: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("b.lmdb").write_bytes(Path(store).read_bytes())
    assert main(["data", "bench", ".", *QUICK]) == 0
    first, second = capsys.readouterr().out.split("\n\n")
    assert (first.splitlines()[0], second.splitlines()[0]) == ("b.lmdb", "raw.lmdb")
    Path("empty").mkdir()
    assert main(["data", "bench", "empty"]) == 1
    assert "holds no *.lmdb file" in capsys.readouterr().err


_TRANSFORM = """
calls = 0

def slow(sample):
    total = 0
    for number in range(30_000):
        total += number
    return sample

def broken(sample):
    raise KeyError("no such key")
"""


def test_a_transform_that_takes_the_time_is_named(store: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("slow_transform.py").write_text(_TRANSFORM)
    words = ["data", "bench", store, "--seconds", "0.05", "--workers", "0", "--no-disk"]
    before = list(sys.path)
    assert main([*words, "--transform", "slow_transform:slow"]) == 0
    assert sys.path == before
    table = _table(capsys.readouterr().out)
    assert table["bound by"] == "the Python transform"
    assert _number(table["without transform"]) > 2 * _number(table["from memory"])
    assert main([*words, "--transform", "slow_transform:broken"]) == 1
    assert "no such key" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["nowhere_at_all:f", "json:no_such", "json", "json:__name__"])
def test_a_transform_that_is_not_there_is_one_line(name: str, store: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "bench", store, *QUICK, "--transform", name]) == 1
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert name in err
    with pytest.raises(SourceError):
        main(["data", "bench", store, *QUICK, "--transform", name, "--debug"])


def test_pictures_are_decoded_where_it_is_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    image = pytest.importorskip("PIL.Image")
    file = io.BytesIO()
    image.fromarray(np.random.default_rng(0).integers(0, 255, (200, 300, 3), dtype=np.uint8)).save(file, "PNG")
    write_lmdb([{"image": file.getvalue(), "label": number} for number in range(16)], "pictures.lmdb")
    words = ["data", "bench", "pictures.lmdb", "--batch-size", "4", "--seconds", "0.1", "--workers", "1", "--no-disk"]
    assert main([*words, "--image", "image=32"]) == 0
    table = _table(capsys.readouterr().out)
    assert table["store"].endswith(f" {3 * 32 * 32 + 8:,} bytes per sample when loaded")
    assert table["bound by"] == "decoding on the CPU"
    assert "without transform" not in table
    assert "pictures" not in table
    assert main(words) == 0
    table = _table(capsys.readouterr().out)
    assert table["pictures"].endswith(" --image image=224")
    assert table["store"].endswith(f" {len(file.getvalue()) + 8:,} bytes per sample when loaded")


def test_encoded_pictures_are_found_where_they_lie() -> None:
    image = pytest.importorskip("PIL.Image")
    file = io.BytesIO()
    image.fromarray(np.zeros((4, 4, 3), dtype=np.uint8)).save(file, "PNG")
    picture = file.getvalue()
    for name, sample, found in (
        ("dict", {"image": picture, "text": b"no picture"}, ["image"]),
        ("tuple", (picture, 1), ["0"]),
        ("alone", picture, [""]),
        ("deep", {"views": (picture, b"x")}, ["['views'][0]"]),
        ("none", (np.zeros(3), 1), []),
    ):
        assert encoded_pictures(write_lmdb([sample], f"{name}.lmdb")) == found


@pytest.mark.parametrize(("decoded", "bound"), [(120.0, "decoding on the CPU"), (900.0, "the Python transform")])
def test_the_larger_of_decoding_and_transform_is_named(
    decoded: float, bound: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With rates made by hand: 1000 samples/s without both, 100 with both."""

    def ring(dataset: Any, args: Any, collate: Any = None) -> LoaderSpeed:
        rate = 100.0 if dataset.transform else decoded if dataset.leaf_fields() else 1000.0
        read = LoaderPass(batches=9, samples=10_000, bytes=10_000, seconds=10_000 / rate)
        return LoaderSpeed(first=read, warm=read)

    monkeypatch.setattr(module, "_ring", ring)
    Path("identity_transform.py").write_text("def same(sample):\n    return sample\n")
    write_lmdb([(b"picture", 1)] * 4, "a.lmdb")
    words = ["data", "bench", "a.lmdb", *QUICK, "--image", "0=32", "--transform", "identity_transform:same"]
    assert main(words) == 0
    table = _table(capsys.readouterr().out)
    assert table["bound by"] == bound
    assert _number(table["without transform"]) == decoded
    assert _number(table["without both"]) == 1000


def test_samples_of_many_sizes_are_handed_out_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    write_lmdb([np.zeros(number + 1) for number in range(20)], "many.lmdb")
    assert main(["data", "bench", "many.lmdb", *QUICK, "--compare"]) == 0
    table = _table(capsys.readouterr().out)
    assert table["batches"].startswith("lists of samples")
    assert table["bound by"] == "Python code per sample"
    assert _number(table["DataLoader, 0 workers"]) > 0
    assert _number(table["DataLoader, 1 workers"]) > 0


@pytest.mark.parametrize("sample", [(), {"text": "abc"}])
def test_samples_without_a_tensor_are_counted(sample: Any, capsys: pytest.CaptureFixture[str]) -> None:
    write_lmdb([sample] * 40, "bare.lmdb")
    assert main(["data", "bench", "bare.lmdb", *QUICK]) == 0
    table = _table(capsys.readouterr().out)
    assert _number(table["first pass"]) > 0
    assert _number(table["from memory"]) > 0


@pytest.mark.parametrize("key", ["label", "imag", "7", "['image'][0]", ""])
def test_a_field_that_is_no_picture_is_a_wrong_command_line(key: str, capsys: pytest.CaptureFixture[str]) -> None:
    """For each store of a folder, and before anything is measured."""
    write_lmdb([{"image": b"x", "label": 1}] * 4, "b.lmdb")
    write_lmdb([{"image": b"x", "label": b"y", "imag": b"y", "7": b"y"}] * 4, "a.lmdb")
    with pytest.raises(SystemExit) as raised:
        main(["data", "bench", ".", "--image", f"{key}=32"])
    assert raised.value.code == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert f"speedkit data bench: error: --image {key}=32: " in err
    assert "Fields of encoded bytes: 'image'" in err
    assert "Did you mean --image image=32?" in err


def test_a_store_of_few_batches_says_so(store: str, capsys: pytest.CaptureFixture[str]) -> None:
    """64 samples are 2 batches of 32, and a thread makes 2 before they are asked for."""
    assert main(["data", "bench", store, *QUICK]) == 0
    assert _table(capsys.readouterr().out)["first pass"].endswith(": too few batches to tell")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["data"], "a command is missing: bench"),
        (["data", "bench"], "required: PATH"),
        (["data", "bench", "x", "--seconds", "0"], "must be above 0"),
        (["data", "bench", "x", "--seconds", "soon"], "--seconds"),
        (["data", "bench", "x", "--batch-size", "0"], "must be at least 1"),
        (["data", "bench", "x", "--workers", "-1"], "must be at least 0"),
        (["data", "bench", "x", "--workers", "two"], "invalid whole number value: 'two'"),
        (["data", "bench", "x", "--image", "image"], "must be KEY=SIZE"),
        (["data", "bench", "x", "--image", "image=big"], "must be KEY=SIZE"),
    ],
)
def test_a_wrong_command_line_is_exit_code_2(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as raised:
        main(words)
    assert raised.value.code == 2
    assert message in capsys.readouterr().err


def test_nothing_at_the_path_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "bench", "absent.lmdb", *QUICK]) == 1
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert "absent.lmdb" in err
    with pytest.raises(StoreNotFoundError):
        main(["data", "bench", "absent.lmdb", *QUICK, "--debug"])


def test_a_system_without_a_way_to_forget_pages_is_told(
    store: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delattr("os.posix_fadvise")
    assert main(["data", "bench", store, *QUICK, "--cold"]) == 1
    assert "posix_fadvise" in capsys.readouterr().err
