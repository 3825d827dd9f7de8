"""What a Trainer is told about accumulation windows, and what it is asked about them.

What it does: it answers the Trainer's questions about the windows of a run: which batch clears gradients, which one
steps, how many steps there will be. When it helps: Lightning answers them by divisions that hold for one factor only.
What it costs: a comparison or two per question.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from lightning_speedkit.measure.lightning_internals import is_accumulating
from lightning_speedkit.optimize.accumulation_plan import WindowPlan
from lightning_speedkit.optimize.accumulation_ranks import DataRanks
from lightning_speedkit.optimize.accumulation_run import AccumulationRun

__all__ = ["TrainerWindows", "loss_scale_of", "parameters_of", "progress_of"]


class TrainerWindows:
    """The windows of a run, as :func:`~lightning_speedkit.measure.lightning_windows.follow_windows` asks for them.

    Args:
        trainer: The Trainer that is told.
        callback: The callback that keeps the run; the rules hold while the Trainer has it. A learning-rate or
            batch-size finder puts it aside.
        plan: How long windows are.
        run: The run; set the attribute ``run`` where another one begins.
        counts_samples: Whether windows count samples, so that the loader's batch size tells how many steps a target
            leads to.
        start: Called with the number and the data of a batch that no hook has told of.
        opened: Called where gradients will be cleared.
    """

    def __init__(
        self,
        trainer: pl.Trainer,
        callback: Callback,
        plan: WindowPlan,
        run: AccumulationRun,
        counts_samples: bool,
        start: Callable[[int, Any], None],
        opened: Callable[[], None],
    ) -> None:
        self.run = run
        self.start, self.open = start, opened
        self.counts_steps = plan.accumulates()
        self.settled, self.accumulates = -1, False
        self._trainer = trainer
        self._callback = callback
        self._plan = plan
        self._counts_samples = counts_samples

    def hold(self) -> bool:
        """Whether the Trainer has the callback now."""
        return self._callback in self._trainer.callbacks  # type: ignore[attr-defined]

    def settle(self) -> None:
        """A batch has begun: ask once whether an optimizer step follows it, until :meth:`unsettle`."""
        self.settled = -1
        self.accumulates = is_accumulating(self._trainer)
        self.settled = progress_of(self._trainer).ready

    def unsettle(self) -> None:
        """Another batch may be asked about."""
        self.settled = -1

    def opens(self) -> bool:
        """Whether gradients are cleared before the backward of this batch."""
        return self.run.window is None

    def closes(self, batch: int) -> bool | None:
        """Whether this batch of the epoch is the last one of its window; ``None`` if the rules do not hold."""
        if self._callback not in self._trainer.callbacks:  # type: ignore[attr-defined]
            return None
        return self.run.bounds.is_last(batch)

    def is_open(self) -> bool:
        """Whether there are gradients that no step has taken."""
        window = self.run.window
        return window is not None and window.batches > 0

    def steps_in(self, batches: int, epochs: int) -> int:
        """The optimizer steps of so many epochs of so many batches.

        Raises:
            MisconfigurationException: The windows have a target, the size of the batches is not known, and neither is
                ``max_steps``.
        """
        size = getattr(self._trainer.train_dataloader, "batch_size", None) if self._counts_samples else None
        if size is not None:
            size *= DataRanks.of(self._trainer).size
        steps = self._plan.steps(batches, epochs, size)
        if steps is None and self._trainer.max_steps == -1:
            raise MisconfigurationException(
                "AccumulationScheduler(target_batch=...): how many steps the run takes depends on the sizes of the "
                "batches, which are not known before. Set Trainer(max_steps=...), or use a schedule of factors."
            )
        return self._trainer.max_steps if steps is None else steps


def parameters_of(trainer: pl.Trainer) -> Iterator[Tensor]:
    """The parameters of the optimizer."""
    return (parameter for group in trainer.optimizers[0].param_groups for parameter in group["params"])


def progress_of(trainer: pl.Trainer) -> Any:
    """How many batches of the epoch are ``ready`` and ``processed``."""
    return trainer.fit_loop.epoch_loop.batch_progress.current


def loss_scale_of(trainer: pl.Trainer) -> float:
    """What losses are multiplied by before their backward: the scale of a gradient scaler, or 1."""
    scaler = getattr(trainer.precision_plugin, "scaler", None)
    return 1.0 if scaler is None else float(scaler.get_scale())
