"""Measures settings of a DataLoader in a process of its own, which reads the dataset in the place of the caller.

Nothing of the caller's is touched: its random states, the dataset's own state, and the files that a dataset opens when
it is first read, which must not be open before workers are forked. The process and its workers form one group, so that
whatever hangs in it can be ended, and Ctrl-C ends all of it.

What to know: the process is started as the workers would be. Where that is a fork, it computes with one thread, as
forked workers do, so a dataset that uses several threads of torch in the training process is faster there than it is
measured here.
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
import warnings
from collections.abc import Sequence
from typing import Any

import torch

from lightning_speedkit.data.settings.loader_settings import LoaderLimits, LoaderTrial, next_trial
from lightning_speedkit.data.settings.trial_measurement import (
    LoaderJob,
    error_text,
    measure_setting,
    with_short_batches,
)

__all__ = ["run_trials"]

_TRIALS = 8.0  # the time is meant for about so many


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


def _failed(trials: Sequence[LoaderTrial], failure: str) -> LoaderTrial:
    """A failure after these trials: of the training process alone if nothing was measured, else of some workers."""
    return LoaderTrial(num_workers=trials[-1].num_workers + 1 if trials else 0, failure=failure)


def _end(process: Any) -> None:
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
        short = with_short_batches(job, seconds / _TRIALS)
    except Exception as error:
        sender.send(LoaderTrial(num_workers=0, failure=error_text(error)))
        return
    while (setting := next_trial(trials, limits)) is not None:
        if time.perf_counter() - begin > (seconds if _enough(trials) else patience):
            break
        trial = measure_setting(short, *setting, seconds=seconds / _TRIALS, seed=len(trials))
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
