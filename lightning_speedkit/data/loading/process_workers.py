"""Processes that make batches in one piece of shared memory: for transforms and datasets that are Python code.

The tensors of a batch are written where the training process reads them. Only a small description travels, down a pipe;
what is no tensor travels pickled. A batch depends on its task alone, so a worker that dies is started again and its
batches are made anew; twice in a row with the same batch is an error, and so is a worker that cannot begin. Workers end
when the loader is closed, when the training process ends in whatever way, and never because of Ctrl-C, which is for the
training process.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import socket
import time
import warnings
import weakref
from collections import deque
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from typing import Any

from lightning_speedkit.data.loading.batch_task import BatchBuilder, BatchTask, listed
from lightning_speedkit.data.loading.quiet_start import start_quietly
from lightning_speedkit.data.loading.ring import Ring, SharedMemory
from lightning_speedkit.data.loading.worker_process import Failure, index_area, work
from lightning_speedkit.errors import LoaderError

__all__ = ["ProcessWorkers"]

_LOOK = 5.0  # seconds between two looks whether the workers are still there
_ENDING = 5.0  # seconds the workers are given to end before they are killed

_CANNOT_BEGIN = (
    "It had not begun; what stopped it is printed above. A worker that is not forked imports the script that was "
    'started: what a script does must stand under `if __name__ == "__main__":`, and one that is read from standard '
    "input cannot be imported. Or take start_method='fork', or workers='threads' or 'inline'."
)


class ProcessWorkers:
    """A few processes, each of which makes whole batches in the slots of a ring over ``shared``.

    The last ``8 * batch_size`` bytes of a slot are for the numbers of the samples on their way to the worker: nothing
    that the loader sends is large, so it never waits for a worker that waits for the loader.
    """

    def __init__(
        self, builder: BatchBuilder, ring: Ring, shared: SharedMemory, workers: int, start_method: str | None
    ) -> None:
        self._context: Any = get_context(start_method)
        self._arguments = (builder, shared, ring.slots, ring.slot_bytes)
        self._ring = ring
        self._owner = os.getpid()
        self._results: dict[int, Any] = {}
        self._tasks: dict[int, tuple[BatchTask, int]] = {}
        self._deaths: dict[int, int] = {}
        self._workers: list[_Worker] = []
        self._close = weakref.finalize(self, _end, self._workers, self._owner)
        for _ in range(workers):
            self._workers.append(self._start())

    def submit(self, task: BatchTask, slot: int) -> None:
        """Hand a task to the worker that has the fewest."""
        if not self._workers:
            raise LoaderError("The workers of this loader were closed.")
        self._tasks[task.number] = task, slot
        self._send(min(self._workers, key=lambda worker: len(worker.numbers)), task.number)

    def result(self, number: int) -> tuple[Any, int]:
        """Wait for a batch; raises what its worker raised."""
        while number not in self._results:
            self._receive()
        self._tasks.pop(number)
        found = self._results.pop(number)
        if isinstance(found, Failure):
            raise found.error()
        tree: tuple[Any, int] = pickle.loads(found)  # noqa: S301  # of our own worker
        return tree

    def drain(self) -> None:
        """Wait until nobody writes into a slot any more."""
        self._tasks.clear()  # a worker that dies now has nothing to make anew
        self._deaths.clear()
        while any(worker.numbers for worker in self._workers):
            self._receive()
        self._results.clear()

    def close(self) -> None:
        """End the processes."""
        self._close()

    @property
    def pids(self) -> list[int]:
        """The processes at work."""
        return [worker.process.pid for worker in self._workers]

    def _start(self) -> _Worker:
        ours, theirs = self._context.Pipe()
        inherited = [worker.pipe for worker in self._workers] + [ours]
        forks = self._context.get_start_method() == "fork"
        process = self._context.Process(
            target=work,
            args=(theirs, *self._arguments, inherited if forks else []),
            name="speedkit-loader",
            daemon=True,
        )
        try:
            start_quietly(process)
        except (AssertionError, OSError) as error:
            ours.close()
            raise LoaderError(
                f"A worker cannot be started: {error}. Take workers='threads' or 'inline', or fewer "
                f"workers if the machine is at a limit."
            ) from error
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            ours.close()
            raise LoaderError(
                f"The dataset, its transform or collate cannot be sent to a worker: {error}. Make them classes or "
                f"functions of a module, or choose workers='threads' or 'inline'."
            ) from error
        finally:
            theirs.close()
        return _Worker(process, ours)

    def _send(self, worker: _Worker, number: int) -> None:
        worker.numbers.append(number)
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # dead: _receive finds out
            task, slot = self._tasks[number]
            index_area(self._ring.memory(slot), len(task.samples))[:] = task.samples
            worker.pipe.send((task.number, task.key, len(task.samples), slot))

    def _receive(self) -> None:
        """Take in what the workers have sent, waiting for at least one of them."""
        if not self._workers:
            raise LoaderError("The workers were closed while one of their batches was waited for.")
        by_pipe = {worker.pipe: worker for worker in self._workers}
        ready = wait(list(by_pipe), _LOOK)
        if not ready:  # the pipe of a dead worker stays open as long as a process that it has forked
            for worker in [worker for worker in self._workers if worker.process.exitcode is not None]:
                self._replace(worker)
        for pipe in ready:
            worker = by_pipe[pipe]  # type: ignore[index]
            try:
                number, data = worker.pipe.recv()
            except (EOFError, ConnectionResetError, OSError):
                self._replace(worker)
                continue
            worker.begun = True
            if number is None:  # it has told just that
                continue
            worker.numbers.remove(number)
            self._deaths.pop(number, None)
            self._results[number] = data

    def _replace(self, dead: _Worker) -> None:
        numbers = [number for number in dead.numbers if number in self._tasks]
        told = _end_of(dead)
        place = self._workers.index(dead)
        del self._workers[place]  # also if no other can be started
        if not dead.begun and dead.process.exitcode >= 0 and self._context.get_start_method() != "fork":
            failed = Failure(LoaderError(f"{told} {_CANNOT_BEGIN}"))  # as any other would
            self._results.update(dict.fromkeys(numbers, failed))
            return
        try:
            new = self._start()
        except LoaderError as error:
            raise LoaderError(f"{told} {error}") from error.__cause__
        self._workers.insert(place, new)
        first = numbers[0] if numbers else None  # what it was at when it died
        if first is not None:
            self._deaths[first] = self._deaths.get(first, 0) + 1
        if first is not None and self._deaths[first] > 1:
            samples = listed(self._tasks[first][0].samples)
            failure = LoaderError(f"{told} It happened for the second time with the batch of the samples {samples}.")
            self._results[numbers.pop(0)] = Failure(failure)
            told = ""
        for number in numbers:
            self._send(new, number)
        if told:
            warnings.warn(f"{told} It is started again, and its batches are made anew.", RuntimeWarning, stacklevel=2)


class _Worker:
    def __init__(self, process: Any, pipe: Connection) -> None:
        self.process = process
        self.pipe = pipe
        self.numbers: deque[int] = deque()
        self.begun = False


def _end(workers: list[_Worker], owner: int) -> None:
    if os.getpid() != owner:
        return
    for worker in workers:
        _hang_up(worker.pipe)
    last = time.monotonic() + _ENDING
    for worker in workers:
        worker.process.join(max(last - time.monotonic(), 0))
        _kill(worker.process)
    workers.clear()


def _end_of(dead: _Worker) -> str:
    """How a worker ended, in words; one that has closed its pipe and lives on is killed."""
    _hang_up(dead.pipe)
    dead.process.join(_ENDING)
    _kill(dead.process)
    code = dead.process.exitcode
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with {code}"
    hint = " The machine may be out of memory." if code == -signal.SIGKILL else ""
    return f"A worker of the loader (process {dead.process.pid}) {how}.{hint}"


def _hang_up(pipe: Connection) -> None:
    """Closing alone does not reach the worker while a fork of this process has the same end of the pipe."""
    if pipe.closed:
        return
    with socket.socket(fileno=os.dup(pipe.fileno())) as end, contextlib.suppress(OSError):
        end.shutdown(socket.SHUT_RDWR)
    pipe.close()


def _kill(process: Any) -> None:
    if process.exitcode is None:
        process.kill()
        process.join()
