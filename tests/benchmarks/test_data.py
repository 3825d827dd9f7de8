"""The ways to load give all samples, once, with their labels; what judges them would notice if they did not."""

from __future__ import annotations

import json
import mmap
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.data import cold, measuring
from benchmarks.data.bars import Bar, held_against
from benchmarks.data.datasets import NAMES, Data, dataset
from benchmarks.data.loading import PEERS, bars, variants
from benchmarks.data.tables import table
from tests.benchmarks.conftest import ForkServer

ROOT = Path(__file__).resolve().parents[2]
RAW = ("limits.copying", "ours.threads", "ours.processes", "ours.inline", "naive.lmdb", "naive.files")
IMAGES = ("limits.decoding", "limits.coarse_decoding", *RAW[1:])


@pytest.fixture(scope="module", autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPEEDKIT_BENCHMARK_DATA", str(tmp_path_factory.mktemp("data")))
        yield


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("data", "way"), [("tensors", way) for way in RAW] + [("images", way) for way in IMAGES])
def test_a_way_gives_every_sample_once(data: str, way: str) -> None:
    measuring.checked(f"benchmarks.data.{way}", data, workers=2)


@pytest.mark.parametrize("way", ["limits.copying", "ours.threads", "naive.lmdb"])
def test_floats_too(way: str) -> None:
    measuring.checked(f"benchmarks.data.{way}", "large", workers=1)


@pytest.mark.slow
@pytest.mark.parametrize("data", NAMES)
@pytest.mark.parametrize("peer", PEERS)
def test_a_peer_gives_every_sample_once(data: str, peer: str) -> None:
    pytest.importorskip(PEERS[peer])
    code = f"""if __name__ == "__main__":
    from benchmarks.data.measuring import checked
    checked("benchmarks.data.peers.{peer}", "{data}", workers=2)
"""
    script = Path(os.environ["SPEEDKIT_BENCHMARK_DATA"]) / f"{peer}_{data}.py"
    script.write_text(code)  # a file, since LitData starts its writers anew from it
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    run = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True, timeout=250)
    assert run.returncode == 0, run.stderr[-2000:]


@contextmanager
def twisted(data: Data, workers: int) -> Iterator[measuring.Batches]:
    """All rows, wrong in the way that the test has set."""
    rows = np.array(data.rows())
    order = np.random.default_rng(0).permutation(data.samples)
    labels = np.array([data.label(number) for number in range(data.samples)])
    if FAULT == "twice":
        order[0] = order[1]
    elif FAULT == "label":
        labels[3] += 1
    elif FAULT == "byte":
        rows[5, -1, -1, -1] ^= 1
    elif FAULT == "sorted":
        order = np.sort(order)
    elif FAULT == "short":
        order = order[:-1]
    yield lambda number: [(rows[part], labels[part]) for part in np.array_split(order, 5)]


FAULT = ""


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ("twice", "without"),
        ("short", "without"),
        ("label", "not what was written"),
        ("byte", "not what was written"),
        ("sorted", "not shuffled"),
    ],
)
def test_a_fault_is_noticed(monkeypatch: pytest.MonkeyPatch, fault: str, told: str) -> None:
    monkeypatch.setattr(sys.modules[__name__], "FAULT", fault)
    with pytest.raises(ValueError, match=told):
        measuring.checked(f"{__name__}.twisted", "tensors", workers=0)


def test_without_a_fault_nothing_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "FAULT", "")
    measuring.checked(f"{__name__}.twisted", "tensors", workers=0)
    metrics = measuring.measure(f"{__name__}.twisted", "tensors", workers=0, epochs=1, small=True)
    assert metrics["bytes_per_second"] == pytest.approx(12288 * metrics["samples_per_second"])
    monkeypatch.setattr(sys.modules[__name__], "FAULT", "short")
    with pytest.raises(ValueError, match="599 samples came in an epoch of 600"):
        measuring.measure(f"{__name__}.twisted", "tensors", workers=0, epochs=1, small=True)


def test_another_picture_is_another_sample() -> None:
    from benchmarks.data.naive import picture

    data = dataset("images", small=True)
    jpegs = data.jpegs()
    assert data.numbers_of(picture(jpegs[2]).numpy()[None], np.array([2])) == [2]
    with pytest.raises(ValueError, match="not what was written"):
        data.numbers_of(picture(jpegs[3]).numpy()[None], np.array([2]))


@pytest.mark.parametrize("flags", [mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, mmap.MAP_SHARED | mmap.MAP_ANONYMOUS])
def test_memory_that_is_no_file_is_counted(flags: int) -> None:
    before = measuring.held_bytes()
    memory = mmap.mmap(-1, 8 << 20, flags=flags)
    memory.write(b"x" * (8 << 20))
    assert measuring.held_bytes() - before == pytest.approx(8 << 20, abs=1 << 20)


def test_a_mapped_file_is_not_counted() -> None:
    rows = np.load(dataset("tensors", small=True).folder / "rows.npy", mmap_mode="r")  # 7 MB
    before = measuring.held_bytes()
    assert rows.sum() > 0
    assert measuring.held_bytes() - before < 1 << 20


def test_processor_seconds_of_children_count() -> None:
    before = measuring.cpu_seconds()
    subprocess.run([sys.executable, "-c", "import time\nwhile time.process_time() < 0.5: pass"], check=True)
    assert measuring.cpu_seconds() - before >= 0.4


def test_a_dropped_file_has_left_the_cache(tmp_path: Path) -> None:
    target = tmp_path / "file"
    target.write_bytes(os.urandom(1 << 20))
    assert cold.bytes_in_cache(target) == 1 << 20
    cold.drop_from_cache(target)
    assert cold.bytes_in_cache(target) == 0


def test_bars_by_hand(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def told(mine: float, other: float) -> dict[str, Any]:
        runs = {"a": {"metrics": {"samples_per_second": mine}}, "b": {"metrics": {"samples_per_second": other}}}
        return {"runs": {**runs, "c": {"error": "gone"}}}

    rounds = [told(30, 10), told(10, 10), told(40, 20)]  # 3, 1, 2
    asked = [
        Bar("two", "a", "b", least=2),
        Bar("more", "a", "b", least=2.1),
        Bar("less", "a", "b", most=1.9),
        Bar("alone", "a", least=30),
        Bar("none", "a", "c", least=1),
    ]
    judged = held_against({"name": "x", "rounds": rounds}, asked, tmp_path)
    assert [(bar["figure"], bar["met"]) for bar in judged] == [
        (2, True), (2, False), (2, False), (30, True), (None, None),
    ]  # fmt: skip
    assert json.loads((tmp_path / "x.json").read_text())["bars"] == judged
    shown = [line.split("  ")[0] for line in capsys.readouterr().out.splitlines()]
    assert shown == ["met", "NOT MET", "NOT MET", "met", "not measured"]


@pytest.mark.parametrize("data", NAMES)
def test_every_bar_is_about_variants_that_run(data: str) -> None:
    names = {variant.name for variant in variants(data, epochs=1, small=True)}
    assert {bar.variant for bar in bars(data)} | {bar.against for bar in bars(data)} <= names


@pytest.mark.slow
@pytest.mark.parametrize("script", ["tensors", "large", "images", "cold", "memory"])
def test_smoke_run(script: str, tmp_path: Path, fork_server: ForkServer) -> None:
    arguments = {"module": f"benchmarks.data.{script}", "arguments": ["--smoke", "--results", str(tmp_path)]}
    folder = os.environ["SPEEDKIT_BENCHMARK_DATA"]
    told = fork_server.run("script", arguments, timeout=250, SPEEDKIT_BENCHMARK_DATA=folder)
    assert told.get("metrics") == {"done": 1}, told
    content = json.loads((tmp_path / f"data_{script}.json").read_text())
    installed = [v["name"] for v in content["variants"] if not v["requires"] or find_spec(v["requires"])]
    summary = content["summary"]
    assert {name: summary[name]["errors"] for name in installed} == {name: [] for name in installed}
    assert all(summary[name]["metrics"] for name in installed)
    for variant in content["variants"]:
        if variant["name"] not in installed:
            assert summary[variant["name"]]["errors"] == [f"{variant['requires']} is not installed"]
    assert content["bars"]


def test_a_table_has_the_medians_and_tells_what_failed() -> None:
    rate = {"median": 1234.4, "min": 1.0, "max": 9000.0}
    summary = {
        "old": {"metrics": {"samples_per_second": rate}, "ratios": {}},
        "new": {
            "metrics": {"samples_per_second": rate},
            "ratios": {"samples_per_second": {"median": 2.04, "min": 1.5, "max": 12.0}},
        },
        "broken": {"metrics": {}, "ratios": {}},
    }
    assert table({"baseline": "old", "summary": summary}).splitlines() == [
        "| | samples/s | times old |",
        "|---|---:|---:|",
        "| old | 1 234 | |",
        "| new | 1 234 | 2.0 (1.5 to 12.0) |",
        "| broken | failed | |",
    ]
