"""The function: what it refuses, what it leaves as it was, and what it says about real datasets."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from lightning_speedkit.data import SpeedkitDataModule
from lightning_speedkit.data.settings import suggest_loader as module
from lightning_speedkit.data.settings.suggest_loader import suggest_loader
from lightning_speedkit.errors import LoaderError
from lightning_speedkit.facts import Hardware
from tests.data.forked import running_fork
from tests.data.processes import alive, wait_until

CPU = Hardware(accelerator="cpu", device_name="a CPU", cpu_count=3, memory_bytes=2**34)
CUDA = Hardware(accelerator="cuda", device_name="a GPU", cpu_count=2, memory_bytes=2**34)
QUICK = {"seconds": 0.1, "patience_seconds": 60.0}


class Waits(Dataset[int]):
    """Samples that wait, as for a network: more workers wait side by side, also on one core."""

    def __init__(self, seconds: float = 0.004) -> None:
        self.seconds = seconds

    def __len__(self) -> int:
        return 200

    def __getitem__(self, index: int) -> int:
        time.sleep(self.seconds)
        return index


class Draws(Waits):
    """Samples from the global random states, and a state of its own."""

    def __init__(self) -> None:
        self.reads = 0
        self.file: object = None

    def __getitem__(self, index: int) -> int:
        self.reads += 1
        self.file = object()
        return int(torch.rand(()) + random.random() + np.random.rand())


def test_workers_that_wait_side_by_side_are_suggested() -> None:
    settings = suggest_loader(CPU, Waits(0.02), batch_size=4, seconds=1.0, patience_seconds=60.0)
    assert settings.num_workers >= 2
    assert settings.persistent_workers
    assert not settings.pin_memory
    rates = {trial.num_workers: trial.samples_per_second for trial in settings.trials}
    assert rates[0] < 1 / 0.02  # it cannot be faster than its waits
    assert 1.5 * rates[0] < rates[settings.num_workers] < settings.num_workers / 0.02 * 1.2
    loader = DataLoader(Waits(0.0), batch_size=4, **settings.arguments())  # type: ignore[arg-type]
    assert [sample for batch in loader for sample in batch.tolist()] == list(range(200))


def test_the_fewest_workers_that_are_nearly_the_fastest_are_taken() -> None:
    dataset = TensorDataset(torch.zeros(512, 3, 64, 64, dtype=torch.uint8))
    settings = suggest_loader(CPU, dataset, **QUICK)
    rates: dict[int, float] = {}
    for trial in settings.trials:
        rates[trial.num_workers] = max(rates.get(trial.num_workers, 0.0), trial.samples_per_second)
    assert set(rates) == {0, 1, 2}
    near = [workers for workers, rate in rates.items() if 1.05 * rate >= max(rates.values())]
    assert settings.num_workers == min(near)
    assert 16 * 3 * 64 * 64 < settings.trials[0].batch_bytes <= 32 * 3 * 64 * 64  # from a shorter one if it is slow
    arguments = settings.arguments()
    assert (arguments["num_workers"], arguments["persistent_workers"]) == (min(near), min(near) > 0)


def test_a_gpu_gets_pinned_memory() -> None:
    assert suggest_loader(CUDA, TensorDataset(torch.zeros(8)), max_workers=0, **QUICK).pin_memory


def test_nothing_of_the_caller_is_changed() -> None:
    dataset = Draws()
    torch.manual_seed(4)
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[union-attr]
    threads, files = set(threading.enumerate()), set(Path("/dev/shm").iterdir())
    children = set(multiprocessing.active_children())
    suggest_loader(CPU, dataset, max_workers=2, **QUICK)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before[1:]  # type: ignore[union-attr]
    assert (dataset.reads, dataset.file) == (0, None)
    assert set(threading.enumerate()) <= threads
    assert set(multiprocessing.active_children()) <= children
    assert {name for name in set(Path("/dev/shm").iterdir()) - files if "torch" in name.name} == set()


def test_tensors_of_a_dataset_stay_out_of_shared_memory_with_workers_that_are_not_forked() -> None:
    dataset = TensorDataset(torch.zeros(64))
    settings = suggest_loader(CPU, dataset, multiprocessing_context="forkserver", max_workers=0, **QUICK)
    assert settings.trials[0].samples_per_second > 0
    assert not dataset.tensors[0].is_shared()


def test_workers_that_must_see_each_epoch_are_not_kept() -> None:
    class Follows(Waits):
        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

    settings = suggest_loader(CPU, Follows(0.02), batch_size=2, max_workers=2, **QUICK)
    assert settings.num_workers > 0
    assert not settings.persistent_workers


def test_a_dataset_of_whole_batches() -> None:
    batches = [torch.zeros(16) for _ in range(10)]
    settings = suggest_loader(CPU, batches, batch_size=None, max_workers=0, **QUICK)
    assert settings.trials[0].batch_bytes == 16 * 4


def test_collate_and_worker_init_are_used() -> None:
    def collate(samples: list[Any]) -> bytes:
        return b"x" * 1000

    def init(worker: int) -> None:
        raise OSError("no licence for a second process")

    settings = suggest_loader(CPU, Waits(0.0), collate_fn=collate, worker_init_fn=init, **QUICK)
    assert settings.num_workers == 0
    assert settings.trials[0].batch_bytes == 1000
    assert "no licence for a second process" in settings.trials[1].failure


class _Stream(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(3))


@pytest.mark.parametrize(
    ("dataset", "error", "message"),
    [
        (_Stream(), TypeError, "IterableDataset"),
        ([], ValueError, "list is empty"),
        (iter([1]), TypeError, "must be map-style"),
        (None, TypeError, "must be map-style"),
    ],
)
def test_what_is_no_dataset_is_refused(dataset: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        suggest_loader(CPU, dataset, **QUICK)


@pytest.mark.parametrize(
    ("arguments", "error", "name"),
    [
        ({"batch_size": 0}, ValueError, "batch_size"),
        ({"batch_size": True}, TypeError, "batch_size"),
        ({"max_workers": -1}, ValueError, "max_workers"),
        ({"max_workers": 1.5}, TypeError, "max_workers"),
        ({"loaders_on_machine": 0}, ValueError, "loaders_on_machine"),
        ({"loaders_on_machine": None}, TypeError, "loaders_on_machine"),
        ({"seconds": 0}, ValueError, "seconds"),
        ({"seconds": "5"}, TypeError, "seconds"),
        ({"seconds": float("nan")}, ValueError, "seconds"),
        ({"patience_seconds": float("inf")}, ValueError, "patience_seconds"),
        ({"multiprocessing_context": "frok"}, ValueError, "multiprocessing_context"),
    ],
)
def test_a_wrong_argument_is_named(arguments: dict[str, Any], error: type[Exception], name: str) -> None:
    with pytest.raises(error, match=name):
        suggest_loader(CPU, [1, 2, 3], **arguments)


def test_hardware_is_read_or_must_be_hardware() -> None:
    with pytest.raises(TypeError, match="Hardware"):
        suggest_loader("cpu", [1, 2, 3])  # type: ignore[arg-type]
    dataset: Any = TensorDataset(torch.zeros(8))
    with pytest.raises(
        TypeError, match=r"got a TensorDataset; the dataset comes second: suggest_loader\(None, dataset"
    ):
        suggest_loader(dataset)
    for given in ((DataLoader(dataset),), (None, DataLoader(dataset))):
        with pytest.raises(TypeError, match=r"got a DataLoader; suggest_for\(loader\) measures"):
            suggest_loader(*given)
    with pytest.raises(TypeError, match=r"such as data.dataset\('train'\)"):
        suggest_loader(None, SpeedkitDataModule())


class _Breaks(Waits):
    def __getitem__(self, index: int) -> int:
        raise KeyError("no such picture")


class _Hangs(Waits):
    def __getitem__(self, index: int) -> int:
        time.sleep(1000)
        return index


class _Dies(Waits):
    def __getitem__(self, index: int) -> int:
        os._exit(7)


def test_a_dataset_that_fails_is_told_with_its_error() -> None:
    with pytest.raises(LoaderError, match="no such picture"):
        suggest_loader(CPU, _Breaks(), **QUICK)


class _OneBad(Waits):
    """Each sample but one is there, and says so in its error."""

    def __getitem__(self, index: int) -> int:
        if index == 71:
            raise Unspeakable
        return index


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise TypeError("cannot be told")


@pytest.mark.parametrize("batch_size", [None, 1, 150])
def test_the_sample_that_fails_is_named(batch_size: int | None) -> None:
    words = r"Unspeakable: \(its __str__ raised TypeError\) \(.*\)\. Try dataset\[71\] by hand"
    with pytest.raises(LoaderError, match=words):
        suggest_loader(CPU, _OneBad(), batch_size=batch_size, shuffle=False, max_workers=0, seconds=20)


def _pairs_only(samples: list[int]) -> int:
    if len(samples) > 1:
        raise ValueError("too many")
    return samples[0]


def test_a_batch_whose_samples_load_alone_is_named() -> None:
    with pytest.raises(LoaderError, match=r"Try collate_fn\(\[dataset\[i\] for i in \[\d+, \d+\]\]\) by hand"):
        suggest_loader(CPU, [1, 2, 3], batch_size=2, collate_fn=_pairs_only, seconds=20)


def test_a_dataset_that_hangs_is_ended() -> None:
    children = set(multiprocessing.active_children())
    with pytest.raises(LoaderError, match=r"nothing came within 0\.5 s"):
        suggest_loader(CPU, _Hangs(), seconds=0.1, patience_seconds=0.5)
    assert set(multiprocessing.active_children()) <= children


def test_a_dataset_that_ends_its_process_is_told() -> None:
    with pytest.raises(LoaderError, match="exit code 7"):
        suggest_loader(CPU, _Dies(), **QUICK)


def test_what_cannot_be_pickled_for_spawned_workers_is_told() -> None:
    dataset = [lambda: 1]
    with pytest.raises(LoaderError, match="pickle"):
        suggest_loader(CPU, dataset, multiprocessing_context="spawn", **QUICK)


class _OnlyHere(Waits):
    """Can be read without workers only."""

    def __getitem__(self, index: int) -> int:
        if torch.utils.data.get_worker_info() is not None:
            time.sleep(1000)
        return index


def test_workers_that_hang_leave_what_was_measured() -> None:
    settings = suggest_loader(CPU, _OnlyHere(), seconds=0.1, patience_seconds=2)
    assert settings.num_workers == 0
    assert settings.trials[-1].failure == "nothing came within 2 s"
    assert "nothing else could be measured" in settings.reason


class _TellsAndHangs(Waits):
    def __getitem__(self, index: int) -> int:
        print(os.getpid(), flush=True)
        time.sleep(1000)
        return index


def _suggest_and_tell() -> None:
    before = set(multiprocessing.active_children())
    try:
        suggest_loader(CPU, _TellsAndHangs(), seconds=0.5, multiprocessing_context="fork")
    except KeyboardInterrupt:
        print("interrupted", set(multiprocessing.active_children()) <= before, flush=True)


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_ctrl_c_or_the_end_of_the_caller_ends_all_processes(how: signal.Signals) -> None:
    with running_fork(_suggest_and_tell) as (process, lines):
        reader = int(lines.readline())
        time.sleep(0.5)  # Python drops an interrupt that comes in the middle of a fork
        os.kill(process, how)
        if how == signal.SIGINT:
            assert lines.readline() == "interrupted True\n"
        os.waitpid(process, 0)
        assert wait_until(lambda: not alive(reader), 30)


def test_free_memory_is_the_smallest_of_what_is_known(tmp_path: Path) -> None:
    meminfo, group = tmp_path / "meminfo", tmp_path / "cgroup"
    assert module._free_memory_bytes(CPU, meminfo=str(meminfo), group=str(group)) == 2**34
    meminfo.write_text("MemTotal:  99 kB\nMemAvailable:   1000 kB\n")
    assert module._free_memory_bytes(CPU, meminfo=str(meminfo), group=str(group)) == 1000 * 1024
    group.mkdir()
    (group / "memory.max").write_text("700000\n")
    (group / "memory.current").write_text("200000\n")
    assert module._free_memory_bytes(CPU, meminfo=str(meminfo), group=str(group)) == 500_000
    (group / "memory.max").write_text("max\n")
    assert module._free_memory_bytes(CPU, meminfo=str(meminfo), group=str(group)) == 1000 * 1024
    nothing = Hardware(accelerator="cpu", device_name="a CPU")
    assert module._free_memory_bytes(nothing, meminfo=str(tmp_path / "no"), group=str(tmp_path / "no")) is None


def test_a_share_of_what_is_free() -> None:
    assert module._share_of(None, 2) is None
    assert module._share_of(1000, 2) == 250
    assert module._free_shared_bytes("/no/such/folder") is None


def test_little_shared_memory_allows_no_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if the samples are so slow that they are measured in shorter batches than those that will be loaded."""
    monkeypatch.setattr(module, "_free_shared_bytes", lambda: 64)
    settings = suggest_loader(CPU, Waits(), batch_size=4, **QUICK)
    assert {trial.num_workers for trial in settings.trials} == {0}


def test_loaders_that_share_the_machine_share_its_cores() -> None:
    settings = suggest_loader(CPU, Waits(), batch_size=2, loaders_on_machine=3, **QUICK)
    assert max(trial.num_workers for trial in settings.trials) == 1
