"""A run that is told to stop saves once, on all ranks at the same step, and ends; started again, it goes on exactly.

What it does: spot and preemptible machines, SLURM and Kubernetes send SIGTERM and kill some seconds later. Lightning's
own handler talks to the other ranks from within the signal, in the middle of whatever collective is under way, and
listens to rank 0 only; the run ends with an error of the backend and without a checkpoint (Lightning #20825). Here the
handler only makes a note. After each optimizer step the ranks tell each other, so all of them leave at the same step.
The checkpoint is written beside its name and renamed, so it is never half there; it has the random states of all
ranks, which Lightning's lacks. What it costs: a message of some bytes between the hosts per step.

Source: Lightning's signal connector and ``OnExceptionCheckpoint``, of which the latter saves at any error, on the rank
that failed, and so waits for the others.
"""

from __future__ import annotations

import logging
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities import CombinedLoader, rank_zero_info, rank_zero_warn
from lightning.pytorch.utilities.exceptions import SIGTERMException
from typing_extensions import override

from lightning_speedkit.measure.host_group import HostGroup
from lightning_speedkit.measure.lightning_internals import is_accumulating
from lightning_speedkit.parallel.rank_random import gather_random_states, restore_random_states
from lightning_speedkit.parallel.resume import publish_checkpoint
from lightning_speedkit.parallel.signal_note import SIGNALS, SignalNote

__all__ = ["SpotInterruption"]

_STATE = "lightning_speedkit.random_states"
_LOST = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "NCCL communicator was aborted")
_log = logging.getLogger(__name__)


class SpotInterruption(pl.Callback):
    """Saves a checkpoint and ends the process on all ranks when one of them, or what started them, is told to stop.

    ``fit`` then raises ``SystemExit``, as Lightning does for SIGTERM, so what follows in the script does not run. The
    checkpoint is ``dirpath/filename.ckpt``; go on with ``trainer.fit(..., ckpt_path=newest_checkpoint(dirpath))``. The
    random states are in every checkpoint of the run and are put back at its resume, with as many ranks.

    A machine can vanish without a signal: let a ``ModelCheckpoint`` save now and then too.

    Args:
        dirpath: The folder of the checkpoint; with several machines one that all of them see.
        filename: Its name, without ``.ckpt``.
        signals: What tells the run to stop: names such as ``"SIGTERM"``, or ``"SIGUSR1"`` for SLURM's ``--signal``.
        every_n_steps: After how many optimizer steps the ranks ask each other.
        exit_code: Of the process after the checkpoint, 0 to 255.

    Raises:
        ValueError: An argument is not allowed.
        TypeError: A number is no whole number.
        MisconfigurationException: In ``fit``: there are two of these callbacks, the ranks are not joined by
            ``torch.distributed``, or they go on from different checkpoints.

    Example:

        >>> from lightning.pytorch import Trainer
        >>> from lightning.pytorch.callbacks import ModelCheckpoint
        >>> saves = ModelCheckpoint("checkpoints", every_n_train_steps=500, save_top_k=1)
        >>> trainer = Trainer(callbacks=[saves, SpotInterruption("checkpoints")], accelerator="cpu", logger=False)
    """

    def __init__(
        self,
        dirpath: str | Path,
        filename: str = "interrupted",
        signals: Sequence[str] = ("SIGTERM",),
        every_n_steps: int = 1,
        exit_code: int = 0,
    ) -> None:
        super().__init__()
        if not filename or Path(filename).name != filename or filename.startswith("."):
            raise ValueError(f"filename={filename!r} must be a plain name without a folder, such as 'interrupted'.")
        if "://" in str(dirpath):
            raise ValueError(f"dirpath={str(dirpath)!r} must be a folder; a checkpoint there is renamed when complete.")
        if isinstance(signals, str) or not signals or not set(signals) <= set(SIGNALS):
            raise ValueError(f"signals={signals!r} must be a list of names from {', '.join(SIGNALS)}.")
        for name, value, least, most in (
            ("every_n_steps", every_n_steps, 1, 10**9),
            ("exit_code", exit_code, 0, 255),
        ):
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"{name}={value!r} must be a whole number.")
            if not least <= value <= most:
                raise ValueError(f"{name}={value!r} must be from {least} to {most}.")
        self.dirpath = Path(dirpath)
        self.filename = filename
        self.signals = tuple(dict.fromkeys(signals))
        self.every_n_steps = every_n_steps
        self.exit_code = exit_code
        self._note: SignalNote | None = None
        self._listens = False
        self._steps = 0
        self._group: HostGroup | None = None
        self._random_states: list[dict[str, Any]] = []

    @property
    def ckpt_path(self) -> str:
        """The checkpoint that an interruption writes."""
        return str(self.dirpath / f"{self.filename}.ckpt")

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]
        if sum(isinstance(callback, SpotInterruption) for callback in callbacks) > 1:
            raise MisconfigurationException(
                "There are two SpotInterruption callbacks, and the first would end the run. Keep one; signals=[...] "
                "takes several."
            )
        # What the others do after a batch has to be done before it is saved. A new list: this one is being iterated.
        trainer.callbacks = sorted(callbacks, key=lambda callback: callback is self)  # type: ignore[attr-defined]
        self._note = SignalNote(self.signals)
        self._steps = 0
        self._random_states = []

    @override
    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._go_on_with_random_numbers(trainer)  # a loader that begins an epoch draws from them

    @override
    def on_sanity_check_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._listen(trainer)

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._listen(trainer)
        if not self._listens:
            return
        if trainer.world_size > 1:
            if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
                raise MisconfigurationException(
                    f"SpotInterruption needs ranks that are joined by torch.distributed, and the strategy is "
                    f"{type(trainer.strategy).__name__}."
                )
            self._group = HostGroup("during training")
            self._check_same_start(trainer)
        if trainer.fit_loop.restarted_mid_epoch:  # one that goes on has drawn, and had not in the run before
            self._go_on_with_random_numbers(trainer)
        if not all(map(_is_stateful, CombinedLoader(trainer.train_dataloader).flattened)):
            rank_zero_warn(
                "The training loader has no state_dict: a run that is interrupted within an epoch sees samples of it "
                "again and misses others. SpeedkitDataModule and RingLoader have one."
            )

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if not self._listens or is_accumulating(trainer):
            return
        self._steps += 1
        # What follows at the end of an epoch and of the run would be left out when it goes on: there it waits.
        if self._steps % self.every_n_steps or trainer.is_last_batch or _is_over(trainer):
            return
        self._leave_if_told(trainer)

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._listens:
            self._leave_if_told(trainer)

    @override
    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        checkpoint[_STATE] = gather_random_states(trainer.world_size)

    @override
    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        self._random_states = checkpoint.get(_STATE, [])

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        # The handler stays until Lightning puts back the one from before the fit: its own would talk to other ranks.
        self._listens = False
        self._leave_group()
        if trainer.world_size > 1 and any(part in str(exception) for part in _LOST):
            # At once: Lightning's launcher may kill this process before the error is shown.
            _log.error("Rank %d ends: another rank has ended.", trainer.global_rank)
            exception.args = (  # it is on its way already, and its last line is what is read
                f"Another rank has ended, and its own message, if it left one, says why. Rank {trainer.global_rank} "
                f"cannot go on without it and ends. Start all of them again with the newest checkpoint in "
                f"{self.dirpath}. Here: {exception}",
            )

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        listened, self._listens = self._listens, False
        self._leave_group()
        if listened and self._note is not None:
            self._note.pass_on()  # it came when all was done, and is for what follows in the script

    def _leave_group(self) -> None:
        if self._group is not None:
            self._group.close()
            self._group = None

    def _listen(self, trainer: pl.Trainer) -> None:
        """Take the place of Lightning's handlers, which it has just set and takes away itself after the fit."""
        if self._listens or trainer.fast_dev_run or trainer.barebones:  # type: ignore[attr-defined]
            return
        self._listens = True
        if self._note is None or not self._note.listen():
            rank_zero_warn("fit runs in a thread, where Python sets no signal handlers: this process hears no signal.")

    def _go_on_with_random_numbers(self, trainer: pl.Trainer) -> None:
        if len(self._random_states) == trainer.world_size:
            restore_random_states(self._random_states[trainer.global_rank])
        elif self._random_states:
            rank_zero_info(
                f"The checkpoint has the random states of {len(self._random_states)} ranks, and there are "
                f"{trainer.world_size}: random numbers begin anew."
            )
            self._random_states = []

    def _check_same_start(self, trainer: pl.Trainer) -> None:
        assert self._group is not None
        step = float(trainer.global_step)
        most, least = self._group.largest([step, -step])
        if most != -least:
            raise MisconfigurationException(
                f"Rank {trainer.global_rank} goes on at step {int(step)}, and others between steps {int(-least)} and "
                f"{int(most)}. Let all of them load the same checkpoint, from a folder that all machines see."
            )

    def _leave_if_told(self, trainer: pl.Trainer) -> None:
        told = 0.0 if self._note is None else float(self._note.number)
        by = float(trainer.global_rank) if told else -1.0
        if self._group is not None:
            told, by = self._group.largest([told, by])
        if not told:
            return
        self._save(trainer)
        rank_zero_info(
            f"{signal.Signals(int(told)).name} came to rank {int(by)}. All ranks have saved {self.ckpt_path} at step "
            f"{trainer.global_step} and end."
        )
        raise SIGTERMException(self.exit_code)

    def _save(self, trainer: pl.Trainer) -> None:
        part = self.dirpath / f".{self.filename}.part"
        trainer.save_checkpoint(part)
        if trainer.is_global_zero:
            publish_checkpoint(part, Path(self.ckpt_path))
        trainer.strategy.barrier("SpotInterruption")


def _is_stateful(loader: Any) -> bool:
    return all(callable(getattr(loader, name, None)) for name in ("state_dict", "load_state_dict"))


def _is_over(trainer: pl.Trainer) -> bool:
    """Whether no step follows this one, be it within an epoch."""
    steps, loop = trainer.global_step, trainer.fit_loop
    may_stop = trainer.current_epoch >= (loop.min_epochs or 0) and steps >= (loop.min_steps or 0)
    return (trainer.should_stop and may_stop) or (loop.max_steps != -1 and steps >= loop.max_steps)
