"""The loader as a whole: what it gives, that batches may be kept, where it goes on, and what becomes of its workers."""

from __future__ import annotations

import copy
import gc
import itertools
import json
import os
import pickle
import re
import resource
import runpy
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

from lightning_speedkit.data import LMDBDataset, RingLoader, collate_samples, write_lmdb
from lightning_speedkit.data.loading import process_workers, shuffle_choice
from lightning_speedkit.errors import LoaderError, StoreCorruptError
from tests.data.child import ROOT
from tests.data.forked import end_of_fork, output_of_fork, running_fork, stop_coverage
from tests.data.processes import alive, wait_until
from tests.data.samples import same

KINDS = ["inline", "threads", "processes"]
COUNT = 50


def sample(index: int) -> dict[str, Any]:
    image = torch.full((3, 4, 5), index, dtype=torch.uint8)
    return {"image": image, "pair": (index, index / 8), "name": f"n{index}", "vector": np.full(3, index, np.float32)}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("stores") / "fifty.lmdb"
    return write_lmdb((sample(i) for i in range(COUNT)), path, block_bytes=4096)


@pytest.fixture
def make(store: Path) -> Iterator[Any]:
    made: list[RingLoader] = []

    def loader(dataset: Any = None, **arguments: Any) -> RingLoader:
        made.append(RingLoader(LMDBDataset(store) if dataset is None else dataset, **arguments))
        return made[-1]

    yield loader
    for each in made:
        each.close()


class Squares(Dataset[Any]):
    """A dataset in Python, with a random number in each sample."""

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int, float]:
        return torch.tensor([index, index**2]), index, float(np.random.rand() + torch.rand(()))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shuffle", [False, "full", "blocks"])
def test_batches_are_the_collated_samples(make: Any, store: Path, kind: str, shuffle: Any) -> None:
    loader = make(batch_size=8, shuffle=shuffle, workers=kind, seed=5)
    plain = LMDBDataset(store)
    for epoch in range(2):
        order = [loader.order.batch(epoch, step) for step in range(7)]
        expected = [collate_samples([plain[int(i)] for i in numbers]) for numbers in order]
        batches = list(loader)
        assert all(map(same, batches, expected))
        assert len(batches) == len(loader) == 7
        assert sorted(np.concatenate(order).tolist()) == list(range(COUNT))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dataset", ["store", "python"])
def test_kept_batches_never_change(make: Any, kind: str, dataset: str) -> None:
    loader = make(None if dataset == "store" else Squares(), batch_size=4, workers=kind, prefetch_factor=1)
    kept, copies = [], []
    for batch in loader:
        kept.append(batch)
        copies.append(pickle.loads(pickle.dumps(batch)))
    for _ in range(3):  # whatever is written from now on
        for batch in loader:
            del batch
    assert all(map(same, kept, copies))


@pytest.mark.parametrize("kind", KINDS)
def test_memory_is_used_again_when_batches_are_let_go(make: Any, kind: str) -> None:
    loader = make(batch_size=5, workers=kind, num_workers=None if kind == "inline" else 1)
    addresses = set()
    for _ in range(5):
        for batch in loader:
            addresses.add(batch["image"].data_ptr())
            batch["image"][:1].add_(1)  # a view of it, and a batch may be written to
    assert len(addresses) <= loader.prefetch_factor + 3


def test_a_part_of_a_batch_holds_its_memory(make: Any) -> None:
    loader = make(batch_size=5, workers="inline")
    parts = [batch["image"][2:3].reshape(-1)[:4] for batch in loader]
    for _ in loader:
        pass
    assert [part.tolist() for part in parts] == [[5 * step + 2] * 4 for step in range(10)]


@pytest.mark.parametrize("kind", ["inline", "processes"])  # threads share one random state
def test_randomness_depends_on_seed_epoch_and_batch_alone(make: Any, kind: str) -> None:
    def drawn(**arguments: Any) -> list[list[float]]:
        return [batch[2].tolist() for batch in make(Squares(), batch_size=8, **arguments)]

    expected = drawn(workers="inline")
    torch.manual_seed(77)
    before = torch.get_rng_state()
    assert drawn(workers=kind, num_workers=None if kind == "inline" else 2) == expected
    assert torch.equal(torch.get_rng_state(), before)
    assert drawn(workers=kind, seed=1) != expected


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stop", [1, 3, 6, 7])
def test_it_goes_on_where_it_stopped(make: Any, kind: str, stop: int) -> None:
    def numbers(batches: Any) -> list[list[int]]:
        return [batch["pair"][0].tolist() for batch in batches]

    whole = make(batch_size=8, shuffle=True, workers=kind)
    expected = numbers(whole) + numbers(whole)
    first, second = make(batch_size=8, shuffle=True, workers=kind), make(batch_size=8, shuffle=True, workers=kind)
    seen = []
    for batch in first:
        seen.append(batch)
        if len(seen) == stop:
            break
    state = json.loads(json.dumps(first.state_dict()))
    second.load_state_dict(state)
    rest = numbers(second)
    if stop < 7:
        assert len(second) == 7
        rest += numbers(second)
    assert numbers(seen) + rest == expected


def test_the_state_counts_what_was_given_out_and_not_what_is_ready(make: Any) -> None:
    loader = make(batch_size=8, workers="threads", num_workers=2, prefetch_factor=3)
    positions = [loader.state_dict()["position"]]
    for _ in loader:
        positions.append(loader.state_dict()["position"])
    assert positions == [0, 8, 16, 24, 32, 40, 48, 50]
    assert (loader.state_dict()["epoch"], loader.state_dict()["position"]) == (1, 0)


@pytest.mark.parametrize("remainder", ["pad", "drop", "exact"])
def test_all_ranks_have_the_same_state_after_the_same_steps(make: Any, remainder: str) -> None:
    """Also those that have nothing in the last step. Two states are the same if they lead to the same place."""
    settings = itertools.product(range(1, 12), (1, 2, 3), range(1, 6))
    for samples, batch_size, ranks in settings:
        sizes = {"batch_size": batch_size, "world_size": ranks, "remainder": remainder, "workers": "inline"}
        loaders = [make(list(range(samples)), rank=rank, **sizes) for rank in range(ranks)]
        loops = [iter(loader) for loader in loaders]
        left = list(range(samples))
        while True:
            taken = [next(loop, None) for loop in loops]
            numbers = sorted(number for batch in taken if batch is not None for number in batch.tolist())
            if not numbers:
                break
            left = left[len(numbers) :]  # with "pad", more may be taken than are left
            places = set()
            for loader in loaders:
                other = make(list(range(samples)), workers="inline", remainder="exact", batch_size=samples)
                other.load_state_dict(loader.state_dict())
                rest = next(iter(other)).tolist() if other.epoch == 0 else []
                places.add((other.epoch, tuple(rest)))
            assert len(places) == 1, (samples, batch_size, ranks, places)
            ((epoch, rest),) = places
            if remainder != "drop" or epoch == 0:
                assert (epoch, rest) == ((0, tuple(left)) if left else (1, ())), (samples, batch_size, ranks)


def test_a_state_of_another_order_is_refused(make: Any) -> None:
    state = {**make(batch_size=8, shuffle=True, seed=1).state_dict(), "position": 8}
    with pytest.raises(ValueError, match="seed=1, this one has 2"):
        make(batch_size=8, shuffle=True, seed=2).load_state_dict(state)
    with pytest.raises(ValueError, match="shuffle='full', this one has 'none'"):
        make(batch_size=8, seed=1).load_state_dict(state)
    with pytest.raises(ValueError, match="samples=50, this one has 49"):
        make(list(range(49)), shuffle=True, seed=1).load_state_dict(state)


def test_an_epoch_that_was_left_begins_anew(make: Any) -> None:
    loader = make(batch_size=8, workers="inline")
    next(iter(loader))
    assert [batch["pair"][0][0].item() for batch in loader] == [0, 8, 16, 24, 32, 40, 48]
    assert loader.epoch == 1


def test_set_epoch_goes_to_an_epoch_and_keeps_the_place_in_it(make: Any) -> None:
    loader = make(batch_size=8, shuffle=True, workers="inline")
    loader.load_state_dict({**loader.state_dict(), "epoch": 3, "position": 16})
    loader.batch_sampler.sampler.set_epoch(3)
    assert loader.state_dict()["position"] == 16
    loader.set_epoch(4)
    assert loader.state_dict()["position"] == 0
    first = [batch["pair"][0].tolist() for batch in loader]
    loader.set_epoch(4)
    assert [batch["pair"][0].tolist() for batch in loader] == first


@pytest.mark.parametrize("kind", KINDS)
def test_two_iterations_at_the_same_time(make: Any, kind: str) -> None:
    loader = make(batch_size=8, workers=kind)
    pairs = [(a["pair"][0].tolist(), b["pair"][0].tolist()) for a, b in zip(loader, loader, strict=True)]
    assert all(first == second for first, second in pairs)
    assert [number for first, _ in pairs for number in first] == list(range(COUNT))


def test_several_loaders_over_one_file(make: Any) -> None:
    loaders = [make(batch_size=size, workers=kind) for size, kind in ((8, "threads"), (8, "processes"), (8, "inline"))]
    for batches in zip(*loaders, strict=True):
        assert same(batches[0], batches[1])
        assert same(batches[0], batches[2])


class Broken(Squares):
    def __init__(self, how: str) -> None:
        self.how = how

    def __getitem__(self, index: int) -> Any:
        if index == 17:
            if self.how == "unpicklable":
                raise _Unpicklable(threading.Lock())
            raise KeyError("no such thing")
        return super().__getitem__(index)


class _Unpicklable(Exception):
    pass


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("how", ["plain", "unpicklable"])
def test_a_fault_of_a_sample_names_it_and_has_the_traceback(make: Any, kind: str, how: str) -> None:
    loader = make(Broken(how), batch_size=4, workers=kind)
    given: list[Any] = []
    with pytest.raises(LoaderError) as caught:
        given.extend(loader)
    assert len(given) == 4
    assert "Sample 17" in str(caught.value)
    assert "__getitem__" in str(caught.value)
    assert ("no such thing" if how == "plain" else "_Unpicklable") in str(caught.value)
    assert len(next(iter(loader))[1]) == 4  # and the loader still works


UNGUARDED = """
from lightning_speedkit.data import RingLoader

loader = RingLoader(list(range(4)), batch_size=2, workers="processes", num_workers=1, start_method="spawn")
print([batch.tolist() for batch in loader])
"""


def test_a_script_without_main_guard_is_told_what_it_lacks(tmp_path: Path) -> None:
    script = tmp_path / "unguarded.py"
    script.write_text(UNGUARDED)
    end, out, err = output_of_fork(lambda: runpy.run_path(str(script), run_name="__main__"))
    assert (end, out) == ("raised", "")
    *_, last = err.strip().splitlines()
    assert "LoaderError" in last
    assert 'if __name__ == "__main__":' in last
    assert err.count("bootstrapping phase") == 1  # of the one worker, which is not started again


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise TypeError("cannot be told")


class RaisesUnspeakable(Squares):
    def __getitem__(self, index: int) -> Any:
        raise Unspeakable


@pytest.mark.parametrize("kind", KINDS)
def test_an_exception_that_cannot_be_told_names_the_sample_all_the_same(make: Any, kind: str) -> None:
    words = r"(?s)Sample 0 \(RaisesUnspeakable\): Unspeakable: \(its __str__ raised TypeError\).*in __getitem__"
    with pytest.raises(LoaderError, match=words):
        list(make(RaisesUnspeakable(), batch_size=4, workers=kind, num_workers=None if kind == "inline" else 1))


def fails_at_nine(value: Any) -> Any:
    if value["pair"][0] == 9:
        raise RuntimeError("nine")
    return value


@pytest.mark.parametrize("kind", KINDS)
def test_a_fault_of_a_transform_names_sample_and_block(make: Any, store: Path, kind: str) -> None:
    with pytest.raises(LoaderError, match=rf"Sample 9 \(block 0 of {store}\): RuntimeError: nine"):
        list(make(LMDBDataset(store, fails_at_nine), batch_size=4, workers=kind))


def bad_collate(samples: Any) -> Any:
    raise TypeError("cannot")


@pytest.mark.parametrize("kind", KINDS)
def test_a_fault_of_collate_names_the_samples(make: Any, kind: str) -> None:
    with pytest.raises(LoaderError, match=r"collate failed for the samples 0, 1, 2: TypeError: cannot"):
        list(make(batch_size=3, workers=kind, collate=bad_collate))


@pytest.mark.parametrize("kind", KINDS)
def test_a_damaged_block_is_found(tmp_path: Path, make: Any, kind: str) -> None:
    path = write_lmdb((torch.full((64,), float(i)) for i in range(200)), tmp_path / "a.lmdb", block_bytes=4096)
    data = bytearray(path.read_bytes())
    place = data.index(torch.full((64,), 150.0).numpy().tobytes())
    data[place + 5] ^= 1
    path.write_bytes(data)
    with pytest.raises(StoreCorruptError, match="the checksum of block 9 does not match"):
        list(make(LMDBDataset(path), batch_size=16, workers=kind))


def slow(value: Any) -> Any:
    time.sleep(0.002)
    return value


def test_a_worker_that_is_killed_is_replaced(make: Any, store: Path) -> None:
    expected = [batch["name"] for batch in make(batch_size=4, workers="inline")]
    loader = make(LMDBDataset(store, slow), batch_size=4, workers="processes", num_workers=2)

    def names_with_a_kill() -> list[list[str]]:
        seen = []
        for batch in loader:
            seen.append(batch["name"])
            if len(seen) == 3:
                os.kill(loader.worker_pids[0], signal.SIGKILL)
        return seen

    with pytest.warns(RuntimeWarning, match="was killed by SIGKILL.*started again"):
        seen = names_with_a_kill()
    assert seen == expected


def test_closing_ends_the_processes_and_iterating_starts_them_again(make: Any) -> None:
    loader = make(Squares(), batch_size=4, workers="processes", num_workers=2)
    next(iter(loader))
    pids = loader.worker_pids
    assert len(pids) == 2
    loader.close()
    assert not any(alive(pid) for pid in pids)
    assert loader.worker_pids == []
    assert len(list(loader)) == 13


def test_a_loader_that_is_forgotten_leaves_nothing_behind(store: Path) -> None:
    def use() -> list[int]:
        loader = RingLoader(Squares(), batch_size=4, workers="processes", num_workers=2)
        next(iter(loader))
        RingLoader(LMDBDataset(store), workers="threads").__iter__().__next__()
        return loader.worker_pids

    use()
    gc.collect()
    files, threads = len(list(Path("/proc/self/fd").iterdir())), threading.active_count()
    for _ in range(3):
        pids = use()
        gc.collect()
        assert not any(alive(pid) for pid in pids)
    assert len(list(Path("/proc/self/fd").iterdir())) == files
    assert wait_until(lambda: threading.active_count() <= threads)


def _iterate_for_ever() -> None:
    loader = RingLoader(Squares(), batch_size=2, workers="processes", num_workers=2, start_method="fork")
    batches = iter(loader)
    next(batches)
    print(*loader.worker_pids, flush=True)
    while True:
        for _ in loader:
            time.sleep(0.01)


def _workers_of(process: int, line: str) -> list[int]:
    """What it has printed, when they share memory with it that goes with the last of them."""
    pids = [int(pid) for pid in line.split()]
    assert len(pids) == 2
    maps = [Path(f"/proc/{pid}/maps").read_text() for pid in (process, *pids)]
    assert all("memfd:speedkit-batches" in text for text in maps)
    inherited = set(re.findall(r"/dev/shm\S+", Path("/proc/self/maps").read_text()))  # what other tests have made
    assert {name for text in maps for name in re.findall(r"/dev/shm\S+", text)} <= inherited
    return pids


def test_no_process_outlives_a_training_process_that_hears_ctrl_c() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", "from tests.data.loading.test_loader import _iterate_for_ever as run; run()"],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        assert process.stdout is not None
        pids = _workers_of(process.pid, process.stdout.readline())
        os.killpg(process.pid, signal.SIGINT)  # the workers hear it too
        _, printed = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode != 0
    assert printed.count("KeyboardInterrupt") == 1, printed
    assert wait_until(lambda: not any(map(alive, pids)))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_no_process_outlives_a_training_process_that_is_ended(number: signal.Signals) -> None:
    with running_fork(_iterate_for_ever) as (process, lines):
        pids = _workers_of(process, lines.readline())
        os.kill(process, number)
        assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == -number
    assert wait_until(lambda: not any(map(alive, pids)))


def _iterate_in_a_fork(path: Path) -> None:
    """The loader is in use when the process is forked; parent and child both go on."""
    stop_coverage()  # its own locks are not made for a fork beside running threads
    for kind in KINDS:
        loader = RingLoader(LMDBDataset(path), batch_size=8, workers=kind)
        batches = iter(loader)
        next(batches)

        def child(loader: RingLoader = loader) -> None:
            assert [name for batch in loader for name in batch["name"]] == [f"n{i}" for i in range(COUNT)]

        assert end_of_fork(child, measured=False) == "returned"
        assert [name for batch in batches for name in batch["name"]] == [f"n{i}" for i in range(8, COUNT)]
        loader.close()


def test_parent_and_forked_child_both_go_on(store: Path) -> None:
    assert end_of_fork(lambda: _iterate_in_a_fork(store), measured=False) == "returned"


def test_a_store_that_is_replaced_meanwhile(tmp_path: Path, make: Any) -> None:
    path = write_lmdb(range(10), tmp_path / "a.lmdb")
    dataset = LMDBDataset(path)
    loader = make(dataset, batch_size=2, workers="threads")
    batches = iter(loader)
    assert next(batches).tolist() == [0, 1]
    write_lmdb(range(100, 110), path)
    assert [batch.tolist() for batch in batches] == [[2, 3], [4, 5], [6, 7], [8, 9]]  # the open one is still the old
    with pytest.raises(StoreCorruptError, match="another store than this"):
        list(make(dataset, batch_size=2, workers="threads"))


def _two_threads_for_torch(path: Path) -> None:
    torch.set_num_threads(2)
    assert list(RingLoader(LMDBDataset(path), workers="threads", num_workers=2))
    found = [torch.get_num_threads()]
    thread = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    assert found == [2, 2]


def test_torchs_number_of_threads_is_left_alone(store: Path) -> None:
    assert end_of_fork(lambda: _two_threads_for_torch(store)) == "returned"


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"batch_size": 0}, ValueError, "batch_size must be at least 1, got 0"),
        ({"batch_size": True}, TypeError, "batch_size must be an int, got True"),
        ({"num_workers": -1}, ValueError, "num_workers must be at least 0"),
        ({"workers": "thread"}, ValueError, "workers must be one of 'auto', 'threads', 'processes', 'inline', got 'th"),
        ({"workers": "threads", "num_workers": 0}, ValueError, "workers='threads' needs num_workers of 1 or more"),
        ({"remainder": "none"}, ValueError, "remainder must be one of 'pad', 'drop', 'exact', got 'none'"),
        ({"rank": 2, "world_size": 2}, ValueError, "rank must be below world_size=2, got 2"),
        ({"shuffle": "block"}, ValueError, "shuffle must be False, True, 'full' or 'blocks', got 'block'"),
        ({"shuffle": 1}, ValueError, "shuffle must be"),
        ({"start_method": "spwan"}, ValueError, "start_method must be one of .*got 'spwan'. Did you mean 'spawn'"),
        ({"collate": 3}, TypeError, "collate must be callable or None, got 3"),
        ({"seed": -1}, ValueError, "seed must be at least 0"),
        ({"prefetch_factor": 0}, ValueError, "prefetch_factor must be at least 1"),
    ],
)
def test_arguments_are_checked(make: Any, arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make(**arguments)


def test_what_cannot_be_loaded_is_refused(make: Any) -> None:
    with pytest.raises(ValueError, match="list has no samples"):
        make([])
    with pytest.raises(ValueError, match="shuffle='blocks' needs an LMDBDataset, got a list"):
        make([1], shuffle="blocks")


def test_hosts_of_unlike_memory_take_the_same_order(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    orders = []
    for memory in (1 << 20, 1 << 22, 1 << 40):
        hardware = SimpleNamespace(memory_bytes=memory)
        monkeypatch.setattr(shuffle_choice, "read_hardware", lambda accelerator, found=hardware: found)
        loader = make(batch_size=8, shuffle="blocks", seed=3)
        orders.append([loader.order.batch(2, step).tolist() for step in range(7)])
    assert orders[0] == orders[1] == orders[2]


def test_a_state_of_other_blocks_is_refused_within_an_epoch(tmp_path: Path, make: Any) -> None:
    states = []
    for size in (4096, 8192):
        path = write_lmdb((bytes([i]) * 500 for i in range(60)), tmp_path / f"{size}.lmdb", block_bytes=size)
        loader = make(LMDBDataset(path), batch_size=8, shuffle="blocks", workers="inline")
        next(iter(loader))
        states.append(loader.state_dict())
        loader.load_state_dict(loader.state_dict())
    with pytest.raises(ValueError, match=r"loader with blocks=.*this one has"):
        loader.load_state_dict(states[0])


def test_between_epochs_data_and_seed_may_change(make: Any) -> None:
    first = make(list(range(8)), batch_size=2, shuffle=True, seed=1, workers="inline")
    list(first)
    grown = make(list(range(12)), batch_size=2, shuffle=True, seed=2, workers="inline")
    grown.load_state_dict(first.state_dict())
    assert (grown.epoch, len(list(grown))) == (1, 6)
    assert grown.epoch == 2


@pytest.mark.parametrize("change", ["load", "set"])
def test_a_place_that_is_set_within_a_loop_holds(make: Any, change: str) -> None:
    loader = make(batch_size=8, shuffle=True, workers="inline")
    for i, _ in enumerate(loader):
        if i == 1 and change == "load":
            loader.load_state_dict({**loader.state_dict(), "epoch": 7, "position": 16})
        elif i == 1:
            loader.set_epoch(7)
    state = loader.state_dict()
    assert (state["epoch"], state["position"]) == (7, 16 if change == "load" else 0)


@pytest.mark.parametrize("kind", KINDS)
def test_memory_follows_the_samples_that_there_are(make: Any, kind: str) -> None:
    loader = make(batch_size=10_000_000, workers=kind, prefetch_factor=1000)
    assert len(next(iter(loader))["name"]) == COUNT
    ring = loader._crew._ring
    assert ring.slots <= 4
    assert ring.slot_bytes < 100_000


def doubled(value: Any) -> Any:
    return value["pair"][0] * 2


@pytest.mark.parametrize("kind", KINDS)
def test_a_transform_that_is_set_later_counts(make: Any, kind: str) -> None:
    loader = make(batch_size=50, workers=kind)
    assert next(iter(loader))["pair"][0].tolist() == list(range(COUNT))
    loader.dataset.transform = doubled
    assert next(iter(loader)).tolist() == [2 * i for i in range(COUNT)]


def test_a_transform_that_is_set_while_two_loops_run_counts_afterwards(make: Any) -> None:
    """The second loop makes its batches with the new transform; the workers of the first one still have the old."""
    loader = make(batch_size=25, workers="threads")
    first = iter(loader)
    next(first)
    loader.dataset.transform = doubled
    expected = [2 * i for i in range(COUNT)]
    assert [number for batch in loader for number in batch.tolist()] == expected
    assert len(list(first)) == 1
    assert [number for batch in loader for number in batch.tolist()] == expected


class Twice(LMDBDataset):
    """Goes through its store two times."""

    def __len__(self) -> int:
        return 2 * super().__len__()

    def __getitem__(self, index: int) -> Any:
        return super().__getitem__(index % super().__len__())


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_subclass_with_another_length_than_its_store(make: Any, store: Path, shuffle: bool) -> None:
    loader = make(Twice(store), batch_size=8, shuffle=shuffle, workers="inline")
    for _ in range(2):
        found = [number for batch in loader for number in batch["pair"][0].tolist()]
        assert sorted(found) == sorted(2 * list(range(COUNT)))
    with pytest.raises(ValueError, match="needs an LMDBDataset, got a Twice with a length of its own; use 'full'"):
        make(Twice(store), shuffle="blocks")


def refuse(process: Any) -> None:
    raise BlockingIOError(11, "Resource temporarily unavailable")


@pytest.mark.parametrize("workers", [1, 2])
def test_workers_that_cannot_be_started_again_end_the_loop_and_not_the_loader(
    make: Any, store: Path, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    loader = make(LMDBDataset(store, slow), batch_size=4, workers="processes", num_workers=workers)
    batches = iter(loader)
    next(batches)
    with monkeypatch.context() as patch:
        patch.setattr(process_workers, "start_quietly", refuse)
        os.kill(loader.worker_pids[0], signal.SIGKILL)
        with pytest.raises(LoaderError, match=r"was killed by SIGKILL.* cannot be started"):
            list(batches)
    assert not loader.is_iterated
    names = [name for batch in loader for name in batch["name"]]
    assert names == [f"n{i}" for i in range(COUNT)]


def test_workers_are_not_used_again_when_waiting_for_them_was_interrupted(
    make: Any, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What they still send belongs to the loop that was left, and not to the next one."""
    loader = make(LMDBDataset(store, slow), batch_size=4, shuffle=True, workers="processes", num_workers=1)
    expected = [loader.order.batch(0, step).tolist() for step in range(len(loader))]
    batches = iter(loader)
    next(batches)

    def interrupted(_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(process_workers.ProcessWorkers, "drain", interrupted)
        with pytest.raises(KeyboardInterrupt):
            batches.close()
    loader.set_epoch(1)
    loader.set_epoch(0)
    assert [batch["pair"][0].tolist() for batch in loader] == expected


def test_a_copy_of_a_loader_has_a_place_of_its_own(make: Any) -> None:
    loader = make(batch_size=8, workers="inline")
    other = copy.copy(loader)
    next(iter(loader))
    assert (loader.state_dict()["position"], other.state_dict()["position"]) == (8, 0)


def test_a_dataset_that_grew_is_an_error(make: Any) -> None:
    values = [1, 2, 3]
    loader = make(values, batch_size=2, workers="inline")
    list(loader)
    values.append(4)
    with pytest.raises(LoaderError, match="list has 4 samples now, and had 3"):
        iter(loader)


def test_page_locked_memory_without_cuda_is_said_once_and_left_out(make: Any) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    with pytest.warns(UserWarning, match="pin_memory=True has no effect without a CUDA device"):
        loader = make(batch_size=8, workers="threads", pin_memory=True)
    assert len(list(loader)) == 7


def test_a_pickled_loader_does_not_carry_its_order(make: Any) -> None:
    loader = make(range(200_000), batch_size=8, shuffle=True, workers="inline")
    next(iter(loader))
    assert len(pickle.dumps(loader)) < 5000
    assert next(iter(pickle.loads(pickle.dumps(loader)))).tolist() == next(iter(loader)).tolist()


@pytest.mark.parametrize("epoch", [None, -1])
def test_what_is_no_state_is_refused(make: Any, epoch: int | None) -> None:
    state = {} if epoch is None else {**make().state_dict(), "epoch": epoch}
    with pytest.raises(ValueError, match=r"no state of a RingLoader: it lacks|epoch must be at least 0"):
        make().load_state_dict(state)


def _with_small_files(path: Path, limit: int) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    loader = RingLoader(
        LMDBDataset(path, doubled), batch_size=8, workers="processes", num_workers=2, start_method="fork"
    )
    try:
        print([int(batch[0]) for batch in loader])
    except LoaderError as error:
        print(error)


@pytest.mark.parametrize(
    ("limit", "printed"), [(1 << 31, "[0, 16, 32, 48, 64, 80, 96]"), (1 << 20, "Raise the limit of this process")]
)
def test_limits_of_the_process(store: Path, limit: int, printed: str) -> None:
    end, out, err = output_of_fork(lambda: _with_small_files(store, limit), measured=False)
    assert (end, err) == ("returned", "")
    assert printed in out
