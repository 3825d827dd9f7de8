"""Measures settings of a DataLoader in a process of its own, which reads the dataset in the place of the caller.

Nothing of the caller's is touched: its random states, the dataset's own state, and the files that a dataset opens when
it is first read, which must not be open before workers are forked. The process and its workers form one group, so that
whatever hangs in it can be ended, and Ctrl-C ends all of it.

What to know: the process is started as the workers would be. Where that is a fork, it computes with one thread, as
forked workers do, so a dataset that uses several threads of torch in the training process is faster there than it is
measured here. Batches are not copied to pinned memory.
"""

from __future__ import annotations

import contextlib
import dataclasses
import multiprocessing
import os
import pickle
import signal
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from lightning_speedkit.data.loading.batch_task import message_of
from lightning_speedkit.data.settings.loader_orders import EndlessOrder
from lightning_speedkit.data.settings.loader_settings import LoaderLimits, LoaderTrial, next_trial

__all__ = ["LoaderJob", "bytes_of", "run_trials"]

_TRIALS = 8.0  # the time is meant for about so many
_PROBES = 4  # samples, of which the fastest says how many fit in a batch


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderJob:
    """What a loader loads, as far as its speed depends on it. No ``batch_size``: the dataset gives whole batches."""

    dataset: Any
    batch_size: int | None
    collate_fn: Callable[[list[Any]], Any] | None = None
    worker_init_fn: Callable[[int], None] | None = None
    start_method: str | None = None
    shuffle: bool = True


def run_trials(job: LoaderJob, limits: LoaderLimits, *, seconds: float, patience: float) -> list[LoaderTrial]:
    """Measure settings for about ``seconds``; a trial that says nothing for ``patience`` seconds is ended.

    Slow samples and slow starts may take longer, up to ``patience``, until two workers were tried. Failures are trials
    too. The list is never empty, and its first one is that of the training process alone.
    """
    context = multiprocessing.get_context(job.start_method)
    trials: list[LoaderTrial] = []
    receiver, sender = context.Pipe(duplex=False)
    process: Any = None
    try:
        forked = context.get_start_method() == "fork"
        # pickled here: torch's own way would move the tensors of the dataset to shared memory
        sent = job if forked else pickle.dumps(job)
        process = context.Process(target=_work, args=(sender, sent, limits, seconds, patience, forked), daemon=False)  # type: ignore[attr-defined]
        process.start()
        sender.close()
        while receiver.poll(patience):
            trials.append(receiver.recv())
        trials.append(_failed(trials, f"nothing came within {patience:g} s"))
    except EOFError:
        process.join(1.0)
        if not trials or process.exitcode:
            trials.append(_failed(trials, f"the process ended with exit code {process.exitcode}"))
    except (pickle.PicklingError, AttributeError, TypeError, AssertionError, OSError) as error:
        trials.append(_failed(trials, f"{type(error).__name__}: {error}"))  # not picklable, or no process to be had
    finally:
        receiver.close()
        sender.close()
        if process is not None and process.pid is not None:
            _end(process)
    return trials


def bytes_of(batch: Any) -> int:
    """The bytes of all tensors, arrays and byte strings in a batch, however nested.

    >>> bytes_of({"image": torch.zeros(2, 3), "names": ["a", b"bc"]})
    26
    """
    if isinstance(batch, (torch.Tensor, np.ndarray)):
        return int(batch.nbytes)
    if isinstance(batch, (bytes, bytearray)):
        return len(batch)
    if isinstance(batch, Mapping):
        return sum(map(bytes_of, batch.values()))
    if isinstance(batch, Sequence) and not isinstance(batch, str):
        return sum(map(bytes_of, batch))
    if dataclasses.is_dataclass(batch):
        return sum(bytes_of(getattr(batch, field.name)) for field in dataclasses.fields(batch))
    return 0


def _failed(trials: Sequence[LoaderTrial], failure: str) -> LoaderTrial:
    """A failure after these trials: of the training process alone if nothing was measured, else of some workers."""
    return LoaderTrial(num_workers=trials[-1].num_workers + 1 if trials else 0, failure=failure)


def _end(process: Any) -> None:
    process.join(0.0 if process.exitcode is None else 1.0)
    if hasattr(os, "killpg"):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)  # its workers too, also when it has ended before them
    process.kill()
    process.join()
    process.close()


def _work(sender: Any, sent: Any, limits: LoaderLimits, seconds: float, patience: float, forked: bool) -> None:
    """The process: measure what :func:`next_trial` asks for, and send each trial."""
    if hasattr(os, "setsid"):
        os.setsid()
    threading.Thread(target=_end_with_parent, daemon=True).start()
    if forked:
        torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    trials: list[LoaderTrial] = []
    begin = time.perf_counter()
    try:
        job = sent if forked else pickle.loads(sent)  # noqa: S301  # what run_trials pickled
        short = _with_short_batches(job, seconds / _TRIALS)
    except Exception as error:
        sender.send(LoaderTrial(num_workers=0, failure=_text(error)))
        return
    while (setting := next_trial(trials, limits)) is not None:
        if time.perf_counter() - begin > (seconds if _enough(trials) else patience):
            break
        trial = _trial(short, *setting, seconds=seconds / _TRIALS, seed=len(trials))
        whole = (job.batch_size or 1) // (short.batch_size or 1)  # about so many times the bytes of a short batch
        trials.append(dataclasses.replace(trial, batch_bytes=trial.batch_bytes * whole))
        sender.send(trials[-1])
        if trials[0].failure:
            break


def _enough(trials: Sequence[LoaderTrial]) -> bool:
    """Whether workers had their chance: one of them alone never shows what two can do."""
    return any(trial.num_workers >= 2 for trial in trials)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        if hasattr(os, "killpg"):
            os.killpg(0, signal.SIGKILL)
        os._exit(1)


def _with_short_batches(job: LoaderJob, seconds: float) -> LoaderJob:
    """The job with batches of so few samples that several of them are loaded in that time."""
    if job.batch_size is None:
        return job
    single = dataclasses.replace(job, batch_size=1)
    samples = iter(_loader(single, 0, 0, seed=0))
    times: list[float] = []
    try:
        next(samples)  # opens files
        begin = time.perf_counter()
        while not times or (len(times) < _PROBES and time.perf_counter() - begin < seconds):
            start = time.perf_counter()
            next(samples)
            times.append(time.perf_counter() - start)
    except Exception:
        return single  # the first trial reads the same samples, and tells what is wrong
    fitting = seconds / 4 / max(min(times), 1e-9)
    return dataclasses.replace(job, batch_size=min(job.batch_size, max(1, int(fitting))))


def _trial(job: LoaderJob, workers: int, prefetch: int, *, seconds: float, seed: int) -> LoaderTrial:
    factor = prefetch if workers else None
    iterator: Any = None
    loader: DataLoader[Any] | None = None
    try:
        start = time.perf_counter()
        loader = _loader(job, workers, prefetch, seed)
        iterator = iter(loader)
        size = bytes_of(next(iterator))
        seconds_start = time.perf_counter() - start
        rate = _batches_per_second(iterator, max(workers, 1), seconds)
        return LoaderTrial(
            num_workers=workers,
            prefetch_factor=factor,
            samples_per_second=rate * (job.batch_size or 1),
            seconds_start=seconds_start,
            batch_bytes=size,
            worker_bytes=max((_private_bytes(child.pid) for child in multiprocessing.active_children()), default=0),
        )
    except Exception as error:
        to_try = "" if workers or loader is None else _to_try(job, loader)
        return LoaderTrial(num_workers=workers, prefetch_factor=factor, failure=_text(error), to_try=to_try)
    finally:
        del iterator  # ends the workers


def _to_try(job: LoaderJob, loader: DataLoader[Any]) -> str:
    """What fails in the batch that was asked for last, as Python, from loading its samples one by one."""
    order: Any = loader.sampler if job.batch_size is None else loader.batch_sampler
    for index in order.last:
        try:
            job.dataset[index]
        except Exception:
            return f"dataset[{index}]"
    collate = "collate_fn" if job.collate_fn else "default_collate"
    return f"{collate}([dataset[i] for i in {order.last}])" if job.batch_size else ""


def _batches_per_second(iterator: Iterator[Any], together: int, seconds: float) -> float:
    """Counted in whole rounds of the batches that workers load side by side, since these arrive in one go."""
    for _ in range(together):
        next(iterator)
    count, start = 0, time.perf_counter()
    while True:
        for _ in range(together):
            next(iterator)
        count += together
        elapsed = time.perf_counter() - start
        if elapsed >= seconds or (count > together and elapsed >= 2 * seconds):
            return count / elapsed


def _loader(job: LoaderJob, workers: int, prefetch: int, seed: int) -> DataLoader[Any]:
    order = EndlessOrder(len(job.dataset), job.batch_size, job.shuffle, seed)
    places: dict[str, Any] = {"batch_sampler": order} if job.batch_size else {"sampler": order, "batch_size": None}
    return DataLoader(
        job.dataset,
        num_workers=workers,
        collate_fn=job.collate_fn,
        worker_init_fn=job.worker_init_fn if workers else None,
        multiprocessing_context=job.start_method if workers else None,
        prefetch_factor=prefetch if workers else None,
        generator=torch.Generator().manual_seed(seed),
        **places,
    )


def _private_bytes(pid: int | None) -> int:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(("Private_Clean", "Private_Dirty")))


def _text(error: BaseException) -> str:
    last = traceback.extract_tb(error.__traceback__)[-1:]
    place = f" ({Path(last[0].filename).name}:{last[0].lineno})" if last else ""
    message = message_of(error).strip().splitlines()
    # what a worker raised comes as the text of its traceback, whose last line has the error
    return f"{type(error).__name__}: {message[-1] if message else 'no message'}{place}"
