"""Batches made by processes that are killed, fail, draw random numbers and leave nothing behind."""

from __future__ import annotations

import faulthandler
import gc
import io
import os
import signal
import threading
import time
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lightning_speedkit.data.loading import process_workers, worker_process
from lightning_speedkit.data.loading.batch_layout import restore
from lightning_speedkit.data.loading.batch_task import BatchTask
from lightning_speedkit.data.loading.process_workers import ProcessWorkers
from lightning_speedkit.data.loading.ring import Ring, SharedMemory
from lightning_speedkit.data.loading.sample_batches import SampleBatches
from lightning_speedkit.errors import LoaderError, StoreCorruptError
from tests.data.forked import running_fork
from tests.data.processes import alive, wait_until
from tests.data.samples import same

pytestmark = pytest.mark.timeout(120)


class Crew:
    """Workers with their ring, which hand out batches."""

    def __init__(
        self,
        dataset: Any,
        workers: int = 1,
        *,
        method: str = "fork",
        collate: Any = None,
        slots: int = 16,
        slot_bytes: int = 1 << 16,
    ) -> None:
        shared = SharedMemory(Ring.shared_bytes(slots, slot_bytes))
        self.ring = Ring(slots, slot_bytes, shared=shared)
        self.workers = ProcessWorkers(SampleBatches(dataset, collate), self.ring, shared, workers, method)
        self.slots: dict[int, int] = {}

    def submit(self, number: int, samples: Any = None) -> None:
        slot = self.ring.take()
        assert slot is not None
        self.slots[number] = slot
        indices = np.array([number] if samples is None else samples, dtype=np.int64)
        self.workers.submit(BatchTask(number, indices, (7, 0, 0, number)), slot)

    def result(self, number: int) -> Any:
        slot = self.slots.pop(number)
        try:
            tree, _ = self.workers.result(number)
        except BaseException:
            self.ring.give_back(slot)
            raise
        return restore(tree, self.ring.memory(slot), self.ring.lend(slot))

    def batches(self, numbers: Any) -> list[Any]:
        """One after the other, some ahead."""
        numbers, found = list(numbers), []
        for position in range(len(numbers) + 3):
            if position < len(numbers):
                self.submit(numbers[position])
            if position >= 3:
                found.append(self.result(numbers[position - 3]))
        return found


@pytest.fixture
def crew() -> Iterator[Callable[..., Crew]]:
    made: list[Crew] = []

    def make(*arguments: Any, **settings: Any) -> Crew:
        made.append(Crew(*arguments, **settings))
        return made[-1]

    yield make
    for one in made:
        pids = one.workers.pids
        one.workers.close()
        assert not any(map(alive, pids))


class Mixed:
    """Samples with random numbers and texts."""

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"x": torch.full((5,), index), "drawn": torch.rand(2), "text": str(index), "also": np.random.rand()}


class Impatient(Mixed):
    """Lets a worker that unpickles it look for its parent often."""

    def __reduce__(self) -> Any:
        return impatient, ()


def impatient() -> Impatient:
    worker_process._LOOK = 0.1
    return Impatient()


def expected(number: int, samples: Any = None) -> Any:
    task = BatchTask(number, np.array([number] if samples is None else samples), (7, 0, 0, number))
    return SampleBatches(Mixed(), None).build(task, None, "put back")[0]


@pytest.mark.parametrize("method", ["fork", "forkserver", pytest.param("spawn", marks=pytest.mark.slow)])
def test_every_start_method_makes_the_same_batches(crew: Callable[..., Crew], method: str) -> None:
    one = crew(Impatient(), 2 if method == "fork" else 1, method=method)
    for _ in range(2):
        assert same(one.batches(range(9)), [expected(number) for number in range(9)])
    one.submit(3, [5, 900, 5])
    assert same(one.result(3), expected(3, [5, 900, 5]))
    assert one.ring.free == 16
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        time.sleep(0.5)  # longer than between two looks for the parent
        assert same(one.batches([4]), [expected(4)])


def test_results_in_any_order(crew: Callable[..., Crew]) -> None:
    one = crew(Mixed(), 3)
    for number in range(6):
        one.submit(number)
    for number in (5, 0, 3, 1, 4, 2):
        assert same(one.result(number), expected(number))


def test_a_full_and_a_half_batch(crew: Callable[..., Crew]) -> None:
    one = crew(range(1000), slot_bytes=8 * 1000 + 8 * 1000)
    one.submit(0, range(1000))
    assert one.result(0).tolist() == list(range(1000))
    one.submit(1, range(500))
    assert one.result(1).tolist() == list(range(500))


def test_a_batch_that_does_not_fit_its_slot_travels_down_the_pipe(crew: Callable[..., Crew]) -> None:
    def collate(samples: list[int]) -> Any:
        large = torch.full((1000,), samples[0], dtype=torch.uint16)
        return OrderedDict(large=large), large.float(), torch.eye(3).to_sparse(), [large, torch.ones(2)]

    one = crew(range(10), slot_bytes=256, collate=collate)
    one.submit(4)
    found, meant = one.result(4), collate([4])
    assert torch.equal(found[2].to_dense(), torch.eye(3))
    assert same((found[0], found[1], found[3]), (meant[0], meant[1], meant[3]))


class Texts:
    def __getitem__(self, index: int) -> Any:
        return "x" * 1000, index


@pytest.mark.parametrize("workers", [1, 3])
def test_large_batches_and_large_results_do_not_block_each_other(crew: Callable[..., Crew], workers: int) -> None:
    """20,000 indices down, 3 MB of text up, for all slots at once."""
    one = crew(Texts(), workers, slot_bytes=1 << 19)
    for number in range(6):
        one.submit(number, np.arange(20_000) % 3000)
    for number in reversed(range(6)):
        texts, numbers = one.result(number)
        assert texts == ["x" * 1000] * 20_000
        assert numbers.tolist() == (np.arange(20_000) % 3000).tolist()
    for number in range(6):
        one.submit(number, np.arange(3000))
    one.workers.drain()  # nobody has asked for them


class Deadly:
    """Sample 5 kills its process, so many times."""

    def __init__(self, folder: Path, times: int, how: Callable[[], Any]) -> None:
        self.folder = folder
        self.times = times
        self.how = how

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index == 5 and len(list(self.folder.iterdir())) < self.times:
            (self.folder / f"{time.time_ns()}").touch()
            self.how()
        return Mixed()[index]


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def segfault() -> None:
    faulthandler.disable()  # would tell of it at length
    os.kill(os.getpid(), signal.SIGSEGV)


def leave() -> None:
    os._exit(3)


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize(
    ("how", "told"),
    [(kill, "killed by SIGKILL. The machine"), (segfault, "killed by SIGSEGV"), (leave, "ended with 3")],
)
def test_a_worker_that_dies_is_started_again(
    crew: Callable[..., Crew], tmp_path: Path, workers: int, how: Callable[[], Any], told: str
) -> None:
    one = crew(Deadly(tmp_path, 1, how), workers)
    with pytest.warns(RuntimeWarning, match=rf"A worker of the loader \(process \d+\) (was )?{told}") as caught:
        assert same(one.batches(range(12)), [expected(number) for number in range(12)])
    assert len(caught) == 1
    assert len(one.workers.pids) == workers
    assert all(map(alive, one.workers.pids))


def test_a_batch_that_kills_twice_is_an_error_of_that_batch(crew: Callable[..., Crew], tmp_path: Path) -> None:
    one = crew(Deadly(tmp_path, 2, kill))
    for number in (4, 5, 6, 7):
        one.submit(number, [number, 9])
    with pytest.warns(RuntimeWarning, match="It is started again"):
        assert same(one.result(7), expected(7, [7, 9]))  # the others are made all the same
    with pytest.raises(LoaderError, match=r"SIGKILL.*second time with the batch of the samples 5, 9\."):
        one.result(5)
    assert same([one.result(4), one.result(6)], [expected(4, [4, 9]), expected(6, [6, 9])])
    one.workers.drain()  # a new epoch, in which deaths are counted anew
    next(tmp_path.iterdir()).unlink()
    with pytest.warns(RuntimeWarning, match="It is started again"):
        assert same(one.batches([5]), [expected(5)])


def test_killed_from_outside_at_any_moment(crew: Callable[..., Crew]) -> None:
    one = crew(Mixed(), 2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        for turn in range(8):
            for number in range(5):
                one.submit(number)
            if turn % 2:
                time.sleep(0.005 * turn)
            os.kill(one.workers.pids[turn % 2], signal.SIGKILL)
            assert same([one.result(number) for number in range(5)], [expected(number) for number in range(5)])
            one.workers.drain()


def test_killed_while_idle_and_while_drained(crew: Callable[..., Crew]) -> None:
    one = crew(Mixed())
    os.kill(one.workers.pids[0], signal.SIGKILL)
    assert wait_until(lambda: not alive(one.workers.pids[0]))
    with pytest.warns(RuntimeWarning):
        assert same(one.batches([3]), [expected(3)])
    one.submit(1)
    os.kill(one.workers.pids[0], signal.SIGKILL)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        one.workers.drain()
        one.ring.give_back(one.slots.pop(1))
        assert same(one.batches([3]), [expected(3)])


def refuse(process: Any) -> None:
    raise BlockingIOError(11, "Resource temporarily unavailable")


@pytest.mark.parametrize("workers", [1, 2])
def test_a_worker_that_cannot_be_started_again(
    crew: Callable[..., Crew], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    """The machine is at a limit: the error says so, and the other workers are as good as before."""
    one = crew(Deadly(tmp_path, 1, kill), workers)
    with monkeypatch.context() as patch:
        patch.setattr(process_workers, "start_quietly", refuse)
        one.submit(5)
        words = r"was killed by SIGKILL.* cannot be started: .*temporarily unavailable.*fewer workers"
        with pytest.raises(LoaderError, match=words):
            one.result(5)
    one.workers.drain()
    assert len(one.workers.pids) == workers - 1
    if workers > 1:
        assert same(one.batches([5, 6]), [expected(5), expected(6)])


def test_one_that_dies_at_work_is_started_again_also_if_it_was_not_forked(
    crew: Callable[..., Crew], tmp_path: Path
) -> None:
    one = crew(Deadly(tmp_path, 1, leave), method="forkserver")
    with pytest.warns(RuntimeWarning, match=r"ended with 3\. It is started again"):
        assert same(one.batches([5]), [expected(5)])


class CannotArrive(Mixed):
    """Ends a worker before it has begun, and says so in a file."""

    def __init__(self, file: Path, how: str) -> None:
        self.file = file
        self.how = how

    def __reduce__(self) -> Any:
        return arrive, (self.file, self.how)


def arrive(file: Path, how: str) -> Any:
    with file.open("a") as lines:
        lines.write("started\n")
    if how == "raise":
        raise ImportError("no module of that name")
    if how == "exit":
        os._exit(0)
    if file.read_text() == "started\n":  # killed the first time
        kill()
    return Mixed()


@pytest.mark.parametrize("how", ["raise", "exit"])
def test_a_worker_that_cannot_begin_is_not_started_again(crew: Callable[..., Crew], tmp_path: Path, how: str) -> None:
    file = tmp_path / "started"
    one = crew(CannotArrive(file, how), method="forkserver")
    one.submit(0)
    one.submit(1)
    words = rf"ended with {int(how == 'raise')}\. It had not begun.*__main__.*'fork'"
    for number in (0, 1):
        with pytest.raises(LoaderError, match=words):
            one.result(number)
    one.workers.drain()
    assert one.workers.pids == []
    assert file.read_text() == "started\n"


def test_a_worker_that_is_killed_before_it_has_begun_is_started_again(
    crew: Callable[..., Crew], tmp_path: Path
) -> None:
    one = crew(CannotArrive(tmp_path / "started", "killed once"), method="forkserver")
    with pytest.warns(RuntimeWarning, match="SIGKILL.*It is started again"):
        assert same(one.batches([3]), [expected(3)])


class ForksAndDies:
    """Leaves a process that holds the worker's end of the pipe open."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __getitem__(self, index: int) -> int:
        mark = self.folder / "forked"
        if not mark.exists():
            child = os.fork()
            if child == 0:
                time.sleep(60)
                os._exit(0)
            mark.write_text(str(child))
            kill()
        return index


def test_a_worker_whose_pipe_stays_open_when_it_dies(
    crew: Callable[..., Crew], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_workers, "_LOOK", 0.1)
    one = crew(ForksAndDies(tmp_path))
    try:
        with pytest.warns(RuntimeWarning, match="SIGKILL"):
            assert one.batches([3])[0].tolist() == [3]
        assert alive(int((tmp_path / "forked").read_text()))
    finally:
        os.kill(int((tmp_path / "forked").read_text()), signal.SIGKILL)


class Unpicklable(Exception):
    def __init__(self, first: int, second: int) -> None:
        super().__init__("cannot travel")
        self.handle = threading.Lock()


class Raises:
    def __init__(self, error: Callable[[], BaseException]) -> None:
        self.error = error

    def __getitem__(self, index: int) -> int:
        if index == 5:
            raise self.error()
        return index


ERRORS: dict[str, tuple[Callable[[], BaseException], type[Exception], str]] = {
    "picklable": (lambda: ValueError("bad value"), LoaderError, r"(?s)Sample 5 \(Raises\): ValueError.*in __getitem__"),
    "not picklable": (lambda: Unpicklable(1, 2), LoaderError, r"Unpicklable: cannot travel(.|\n)*in __getitem__"),
    "of the kit": (lambda: StoreCorruptError("block 3 is damaged"), StoreCorruptError, "^block 3 is damaged$"),
    "keyboard interrupt": (KeyboardInterrupt, LoaderError, r"(?s)worker of the loader failed.*KeyboardInterrupt"),
    "system exit": (lambda: SystemExit(4), LoaderError, r"(?s)worker of the loader failed.*SystemExit: 4"),
    "memory": (MemoryError, LoaderError, "MemoryError"),
    "stop iteration": (StopIteration, LoaderError, "StopIteration"),
}  # fmt: skip


@pytest.mark.parametrize("name", ERRORS)
def test_an_exception_is_told_with_its_traceback(crew: Callable[..., Crew], name: str) -> None:
    error, kind, words = ERRORS[name]
    one = crew(Raises(error))
    for number in (4, 5, 6):
        one.submit(number)
    assert one.result(4).tolist() == [4]
    with pytest.raises(kind, match=words):
        one.result(5)
    ends = name in ("keyboard interrupt", "system exit")
    with pytest.warns(RuntimeWarning, match="ended with") if ends else warnings.catch_warnings():
        assert one.result(6).tolist() == [6]
    assert one.ring.free == 16


def test_a_batch_that_cannot_be_sent_is_told(crew: Callable[..., Crew]) -> None:
    one = crew(range(10), collate=lambda samples: threading.Lock())
    one.submit(1)
    with pytest.raises(LoaderError, match="cannot pickle"):
        one.result(1)


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
@pytest.mark.parametrize(
    "dataset",
    [[lambda: None], [threading.Lock()], [io.BufferedReader(io.FileIO(os.devnull))]],
    ids=["lambda", "lock", "file"],
)
def test_what_cannot_be_sent_to_a_spawned_worker(method: str, dataset: Any) -> None:
    gc.collect()
    resource_tracker.ensure_running()  # of the standard library, once per process
    if method == "forkserver":
        forkserver.ensure_running()
    before = descriptors()
    with pytest.raises(LoaderError, match=r"cannot be sent to a worker: .*Make them classes or functions of a module"):
        Crew(dataset, method=method)
    gc.collect()
    assert descriptors() == before


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


class Slow:
    def __getitem__(self, index: int) -> int:
        time.sleep(60)
        return index


@pytest.mark.parametrize("way", ["closed", "forgotten", "failed", "never used", "in use"])
def test_nothing_is_left_behind(way: str) -> None:
    def run() -> list[int]:
        one = Crew(Raises(lambda: ValueError("no")), 2)
        pids = one.workers.pids
        if way == "closed":
            one.batches(range(5))
        elif way != "never used":
            for number in range(5):
                one.submit(number)
            one.result(3)
        if way == "failed":
            one.submit(5)
            with pytest.raises(LoaderError):
                one.result(5)
        if way in ("closed", "in use"):
            one.workers.close()
            one.workers.close()
            assert one.workers.pids == []
        return pids

    run()  # whatever is opened once
    gc.collect()
    before = descriptors()
    pids = run()
    gc.collect()
    assert wait_until(lambda: not any(map(alive, pids)))
    assert descriptors() == before
    names = [path.name for path in Path("/dev/shm").iterdir()]
    assert not [name for name in names for pid in (os.getpid(), *pids) if f"_{pid}_" in name or "speedkit" in name]


def test_a_busy_worker_is_given_a_moment_in_all_and_then_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_workers, "_ENDING", 0.5)
    one = Crew(Slow(), 3)
    for number in range(3):
        one.submit(number)
    pids = one.workers.pids
    one.workers.close()
    assert not any(map(alive, pids))
    with pytest.raises(LoaderError, match="closed while"):
        one.result(0)


def test_closing_while_the_workers_of_another_loader_hold_the_same_pipes(monkeypatch: pytest.MonkeyPatch) -> None:
    """They end by themselves: none has to be killed."""
    killed: list[Any] = []
    monkeypatch.setattr(process_workers, "_kill", killed.append)
    monkeypatch.setattr(process_workers, "_ENDING", 60)
    first = Crew(Mixed(), 2)
    second = Crew(Mixed(), 1)  # forked later: inherits the pipes of the first
    processes = [worker.process for worker in (*first.workers._workers, *second.workers._workers)]
    first.workers.close()
    assert [process.exitcode for process in killed] == [0, 0]
    assert same(second.batches([2]), [expected(2)])
    second.workers.close()
    assert [process.exitcode for process in processes] == [0, 0, 0]


def train_until_killed() -> None:
    """Prints the workers' numbers, with one at work, and waits."""
    first, second = Crew(Slow(), 1), Crew(Mixed(), 1)
    first.submit(0)
    second.batches([1])
    print(*first.workers.pids, *second.workers.pids, flush=True)
    time.sleep(120)


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM])
def test_workers_end_with_the_training_process(end: signal.Signals) -> None:
    with running_fork(train_until_killed) as (parent, lines):
        busy, idle = map(int, lines.readline().split())
        assert alive(busy)
        assert alive(idle)
        time.sleep(0.1)
        os.kill(parent, end)
        os.waitpid(parent, 0)
        assert wait_until(lambda: not alive(idle), 30)
        os.kill(busy, signal.SIGKILL)  # in the middle of a sample that takes a minute


def test_ctrl_c_is_for_the_training_process(crew: Callable[..., Crew]) -> None:
    one = crew(Mixed(), 2)
    one.batches(range(4))
    for pid in one.workers.pids:
        os.kill(pid, signal.SIGINT)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert same(one.batches(range(4)), [expected(number) for number in range(4)])


def test_one_core_for_each_worker(crew: Callable[..., Crew]) -> None:
    class Asking:
        def __getitem__(self, index: int) -> int:
            return torch.get_num_threads()

    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        one = crew(Asking(), 2)
        assert [batch.tolist() for batch in one.batches(range(4))] == [[1]] * 4
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


def test_a_child_of_the_training_process_does_not_end_the_workers(crew: Callable[..., Crew]) -> None:
    one = crew(Mixed(), 1)
    child = os.fork()
    if child == 0:
        one.workers.close()
        os._exit(0)
    os.waitpid(child, 0)
    assert same(one.batches(range(3)), [expected(number) for number in range(3)])


def test_workers_do_not_keep_what_the_parent_frees(crew: Callable[..., Crew]) -> None:
    """Batches that are kept stay as they were, also after the workers have ended."""
    one = crew(Mixed(), 1, slots=8)
    kept = one.batches(range(5))
    one.workers.close()
    del one
    gc.collect()
    assert same(kept, [expected(number) for number in range(5)])
