"""What a worker process does: it makes batches in shared memory, and tells what went wrong."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import traceback
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from lightning_speedkit.data.loading.batch_layout import pickled
from lightning_speedkit.data.loading.batch_task import BatchBuilder, BatchTask
from lightning_speedkit.data.loading.epoch_order import Integers
from lightning_speedkit.data.loading.quiet_start import ignore_interrupts
from lightning_speedkit.data.loading.ring import Ring, SharedMemory
from lightning_speedkit.errors import LoaderError, SpeedkitError

__all__ = ["BEGUN", "Failure", "index_area", "work"]

BEGUN = (None, None)  # the first message of a worker, in the place of a number and a batch

_LOOK = 5.0  # seconds between two looks whether the training process is still there


def work(
    pipe: Connection,
    builder: BatchBuilder,
    shared: SharedMemory,
    slots: int,
    slot_bytes: int,
    inherited: list[Connection],
) -> None:
    """A worker's life: it says that it has begun, and takes tasks from its pipe until the other end is closed.

    ``inherited`` are the other ends of pipes that came with a fork: while a worker holds one, another does not see that
    it is closed.
    """
    parent = os.getppid()  # the training process, or the fork server
    ignore_interrupts()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    for other in inherited:
        other.close()
    torch.set_num_threads(1)
    ring = Ring(slots, slot_bytes, shared=shared)
    if not _send(pipe, BEGUN):
        return
    while True:
        try:
            while not pipe.poll(_LOOK):
                if os.getppid() != parent:
                    return
            number, key, count, slot = pipe.recv()
        except (EOFError, OSError):
            return
        memory = ring.memory(slot)
        samples = index_area(memory, count)
        task = BatchTask(number, samples.copy(), key)
        try:
            answer: Any = pickled(builder.build(task, memory[: -samples.nbytes], "set"))
        except BaseException as error:
            answer = Failure(error)
            if not isinstance(error, Exception):  # SystemExit and the like end this worker after it has told
                _send(pipe, (task.number, answer))
                raise
        if not _send(pipe, (task.number, answer)):
            return


class Failure:
    """An exception on its way to the training process: an error of the kit as it is, any other as its traceback.

    >>> print(Failure(KeyError("x")).error())
    A worker of the loader failed:
    KeyError: 'x'
    <BLANKLINE>
    """

    def __init__(self, error: BaseException) -> None:
        self._pickled: bytes | None = None
        self._message = "".join(traceback.format_exception(error))
        if isinstance(error, SpeedkitError):
            self._message = str(error)
            with contextlib.suppress(Exception):
                sent = pickle.dumps(error)
                pickle.loads(sent)  # noqa: S301  # made a line before
                self._pickled = sent

    def error(self) -> SpeedkitError:
        """What to raise; what does not travel as it is, is a :class:`LoaderError`."""
        if self._pickled is not None:
            error: SpeedkitError = pickle.loads(self._pickled)  # noqa: S301  # of our own worker
            return error
        return LoaderError(f"A worker of the loader failed:\n{self._message}")


def index_area(memory: NDArray[np.uint8], count: int) -> Integers:
    """The end of a slot, where the numbers of the samples of its task are written."""
    return memory[len(memory) - 8 * count :].view(np.int64)


def _send(pipe: Connection, message: Any) -> bool:
    try:
        pipe.send(message)
    except OSError:
        return False
    return True
