"""Says where each rank is when a run stands still.

What it does: a thread per rank looks whether batches go on. If none does for some time, all ranks tell where they are:
the collective that they wait in, if it is one, and the stack. Rank 0 writes it all down, with the ranks that the others
wait for named first.

When it helps: a run with several ranks that hangs, which says nothing for half an hour and then which collective timed
out, but not which rank did not come. What it costs: a thread per rank that looks four times a second.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch import Callback
from typing_extensions import override

from lightning_speedkit.parallel.argument_checks import check_number, check_switch
from lightning_speedkit.parallel.rank_store import TCPStore, open_store

__all__ = ["HangWatch", "hang_report", "where_it_is"]

_EVERY, _ANSWER = 0.25, 5.0  # seconds: between two looks, and for the other ranks to answer
_PLACES = {  # by file and function, the innermost first
    ("nn/parallel/distributed.py", "_sync_buffers"): "the broadcast of buffers before the forward of DDP",
    ("nn/parallel/distributed.py", "_pre_forward"): "the start of the forward of DDP",
    ("autograd/graph.py", "_engine_run_backward"): "the backward, in which DDP averages the gradients",
    ("utils/data/dataloader.py", "_try_get_data"): "",
}


def where_it_is(frames: traceback.StackSummary) -> str:
    """The collective that a thread waits in, by its stack; an empty text if it is in none.

    >>> where_it_is(traceback.extract_stack())
    ''
    """
    for frame in reversed(frames):
        file = frame.filename.replace(os.sep, "/")
        if file.endswith("torch/distributed/distributed_c10d.py") and not frame.name.startswith("_"):
            return frame.name if frame.name != "wait" else "the wait for a collective"
        for (place, name), told in _PLACES.items():
            if frame.name == name and file.endswith(f"torch/{place}"):
                return told
    return ""


def hang_report(seconds: float, ranks: dict[int, dict[str, str]], size: int) -> str:
    """What is known of a run that stands still, as a text.

    Args:
        seconds: For how long it has.
        ranks: Of each rank that answered: ``last``, what it did last; ``collective``, or an empty text; ``stack``.
        size: How many ranks there are.

    >>> print(hang_report(60, {0: {"last": "batch 3 began", "collective": "all_reduce", "stack": "..."}}, 2))
    No rank has come further for 60 s.
    Rank 1 does not answer: its process is gone or stopped.
    <BLANKLINE>
    Rank 0 waits in all_reduce. Last: batch 3 began.
    ...
    """
    lines = [f"No rank has come further for {seconds:g} s."]
    outside = [rank for rank, told in ranks.items() if not told["collective"]]
    lines += [
        f"Rank {rank} does not answer: its process is gone or stopped." for rank in range(size) if rank not in ranks
    ]
    if outside and len(outside) < len(ranks):
        named = ", ".join(map(str, outside))
        lines.append(f"The others wait for rank {named}, which is in no collective.")
    elif not outside and len({told["collective"] for told in ranks.values()}) > 1:
        lines.append("The ranks wait in different collectives, so none of them ends.")
    for rank, told in ranks.items():
        place = f"waits in {told['collective']}" if told["collective"] else "is in no collective"
        lines.append(f"\nRank {rank} {place}. Last: {told['last']}.\n{told['stack'].rstrip()}")
    return "\n".join(lines)


class HangWatch(Callback):
    """Write down where each rank is when no batch goes on.

    Args:
        seconds: For how long nothing may happen: longer than the longest batch, checkpoint or epoch end.
        folder: Where rank 0 writes ``hang.txt``; it is written to stderr in any case.
        end: End the processes of all ranks then, with exit code 1. If not, they go on to wait.

    Raises:
        ValueError: ``seconds`` is not above 0 and finite.
        TypeError: An argument is of another type.

    Attributes:
        report: The last report, on rank 0; ``None`` if there was none.

    Example:

        >>> from lightning.pytorch import Trainer
        >>> trainer = Trainer(callbacks=[HangWatch(seconds=300)], logger=False)
    """

    def __init__(self, seconds: float = 600.0, folder: str | None = None, end: bool = False) -> None:
        check_number("seconds", seconds)
        if not 0 < seconds < float("inf"):
            raise ValueError(f"seconds={seconds!r} must be above 0 and finite.")
        if folder is not None and not isinstance(folder, str | os.PathLike):
            raise TypeError(f"folder={folder!r} must be a path or None.")
        check_switch("end", end)
        self.seconds, self.folder, self.end = seconds, folder, end
        self.report: str | None = None
        self._last, self._since = "the run began", 0.0
        self._closed: threading.Event | None = None
        self._thread: threading.Thread | None = None

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._stop()
        self.report, self._closed = None, threading.Event()
        environment = getattr(trainer.strategy, "cluster_environment", None)
        ready = torch.distributed.is_available() and torch.distributed.is_initialized()
        stores = open_store(environment.main_address) if ready and environment is not None else None
        self._happened(f"setup of {stage}")
        arguments = (self._closed, stores, trainer.global_rank, trainer.world_size, threading.get_ident())
        self._thread = threading.Thread(target=self._watch, args=arguments, name="hang watch", daemon=True)
        self._thread.start()

    def _happened(self, what: str) -> None:
        self._last, self._since = what, time.monotonic()

    def _watch(self, closed: threading.Event, stores: Any, rank: int, size: int, thread: int) -> None:
        store: TCPStore | None = stores[1] if stores else None
        hangs = 0
        try:
            while not closed.wait(_EVERY):
                over = time.monotonic() - self._since > self.seconds
                if over or (store is not None and store.check([f"hang {hangs}"])):
                    self._tell(closed, store, rank, size, hangs, thread)
                    hangs += 1
        except RuntimeError:  # rank 0 has left
            return

    def _tell(self, closed: threading.Event, store: Any, rank: int, size: int, hangs: int, thread: int) -> None:
        frame = sys._current_frames().get(thread)
        frames = traceback.extract_stack(frame)
        mine = {"last": self._last, "collective": where_it_is(frames), "stack": "".join(frames.format())}
        ranks = {rank: mine}
        if store is not None:
            store.set(f"stack {hangs} {rank}", json.dumps(mine))
            store.set(f"hang {hangs}", "")
        if rank == 0:
            if store is not None:
                ranks = _gather(store, size, hangs)
            self._write(hang_report(self.seconds, ranks, size))
            if store is not None:
                store.set(f"told {hangs}", "")
        elif self.end:
            _wait_for(store, f"told {hangs}", 2 * _ANSWER)
        if self.end:
            os._exit(1)
        since = self._since
        while self._since == since and not closed.wait(_EVERY):
            pass  # once for each hang
        self._since = time.monotonic()

    def _write(self, report: str) -> None:
        self.report = report
        sys.stderr.write(f"\n{report}\n")
        sys.stderr.flush()
        if self.folder is not None:
            path = Path(self.folder, "hang.txt")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"{report}\n")

    def _stop(self) -> None:
        if self._thread is not None and self._closed is not None:
            self._closed.set()
            self._thread.join()
            self._thread = None

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._happened(f"training batch {batch_idx} of epoch {trainer.current_epoch} began")

    @override
    def on_before_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: Any) -> None:
        self._happened("a backward began")

    @override
    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._happened("a backward ended")

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._happened(f"training batch {batch_idx} of epoch {trainer.current_epoch} ended")

    @override
    def on_validation_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self._happened("a validation batch ended")

    @override
    def on_test_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self._happened("a test batch ended")

    @override
    def on_predict_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self._happened("a batch of predict ended")

    @override
    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._happened(f"training epoch {trainer.current_epoch} ended")

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._stop()

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._stop()

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_thread": None, "_closed": None}


def _gather(store: TCPStore, size: int, hangs: int) -> dict[int, dict[str, str]]:
    """What the ranks say that answer in time."""
    end, found = time.monotonic() + _ANSWER, {}
    for rank in range(size):
        key = f"stack {hangs} {rank}"
        if _wait_for(store, key, max(0.01, end - time.monotonic())):
            found[rank] = json.loads(store.get(key))
    return found


def _wait_for(store: TCPStore | None, key: str, seconds: float) -> bool:
    if store is None:
        return False
    try:
        store.wait([key], timedelta(seconds=seconds))
    except RuntimeError:
        return False
    return True
