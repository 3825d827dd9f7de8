"""Finds the largest batch that really trains, or the smallest that trains as fast, when ``fit`` starts.

What it does: batches of growing size go through forward, backward, the optimizer's step and validation, until memory
runs out; after each trial everything is put back. The size that is set has been tried.
What it costs: some steps of each size, and one copy of weights and optimizer state on the host while it runs.

When it helps: on a device whose memory is not full, and before changing anything else about memory.
Source: asked of Lightning in #19789 (ranks), #8028, #9625, #20231 (sizes that run out of memory later), #13696.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch.utils.data import DataLoader
from typing_extensions import override

from lightning_speedkit.measure.learning_rates import scale_rates
from lightning_speedkit.measure.lightning_batch_size import (
    forget_train_loaders,
    loader_owner,
    made_train_loader,
    made_val_loaders,
)
from lightning_speedkit.measure.lightning_loaders import change_train_dataloaders
from lightning_speedkit.measure.one_of_a_kind import OneOfAKind
from lightning_speedkit.measure.one_run import refuse_second
from lightning_speedkit.memory.batch_size_find import (
    BatchSizeTrial,
    FoundBatchSize,
    check_search,
    samples_for,
    search_sizes,
    trial_table,
)
from lightning_speedkit.memory.batch_size_loaders import (
    resized,
    samples_at_hand,
    set_size_of_owner,
    size_of_loaders,
    size_of_owner,
)
from lightning_speedkit.memory.batch_size_rate import RULES, rate_factor
from lightning_speedkit.memory.batch_size_run import refuse, trials
from lightning_speedkit.memory.batch_size_trial import Trial

__all__ = ["BatchSizeSearch"]


class BatchSizeSearch(OneOfAKind):
    """Tries batch sizes before training starts, and trains with the largest that fits, or with the fastest.

    The training batches come from a DataModule or module with a ``batch_size`` (attribute or hyperparameter), which is
    set, or from any plain DataLoader, which is made anew with its sampler, collate function and workers. Ranks take the
    same size. A run that is resumed goes on with the size of its checkpoint.

    Args:
        start: The first size that is tried, in samples per rank.
        limit: No larger size; by default the samples that a rank has. Needed for a dataset without length; if that ends
            before a batch is full, the size does not count as tried.
        target: ``"memory"`` for the largest size, ``"throughput"`` for the smallest whose samples per second are within
            5 % of the best, among those tried.
        margin: Trials use batches that are larger by this part, 0.1 for a tenth: room for samples of unlike size.
        scale_lr: Multiply learning rates by the ratio of the new size to the old one (``"linear"``), or by its root
            (``"sqrt"``). By default they stay.
        steps: Training steps of each trial, at least 2: from the second one on the optimizer has its state.

    Attributes:
        batch_size: What was found, in samples per rank, or ``None``.
        trials: The :class:`BatchSizeTrial` of each size tried in this ``fit``, in order.

    Raises:
        ValueError: An argument is outside its range.
        torch.OutOfMemoryError: At ``fit``: not even one sample fits.
        MisconfigurationException: At ``fit``: a loader that cannot be given another batch size, a ``training_step``
            that takes ``dataloader_iter``, a strategy other than one device and DDP, SyncBatchNorm on several ranks, a
            second search in the Trainer.

    Example:

        >>> from lightning.pytorch.demos.boring_classes import BoringModel, RandomDataset
        >>> search = BatchSizeSearch(start=8, limit=20)
        >>> quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "max_epochs": 1}
        >>> trainer = pl.Trainer(callbacks=search, accelerator="cpu", enable_model_summary=False, **quiet)
        >>> trainer.fit(BoringModel(), DataLoader(RandomDataset(32, 64), batch_size=4))
        >>> search.batch_size, [trial.size for trial in search.trials], trainer.global_step
        (20, [8, 16, 20], 4)
    """

    def __init__(
        self,
        start: int = 2,
        limit: int | None = None,
        target: str = "memory",
        margin: float = 0.0,
        scale_lr: str | None = None,
        steps: int = 3,
    ) -> None:
        super().__init__()
        check_search(start, limit, target, margin, steps)
        if scale_lr is not None and scale_lr not in RULES:
            raise ValueError(f"scale_lr={scale_lr!r} is unknown; use 'linear', 'sqrt' or None.")
        self.start, self.limit, self.target, self.margin = start, limit, target, margin
        self.scale_lr, self.steps = scale_lr, steps
        self.batch_size: int | None = None
        self.trials: tuple[BatchSizeTrial, ...] = ()
        self._size: int | None = None  # of the loaders that the Trainer gets now; None for those of the user
        self._undo: Callable[[], None] | None = None

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        if stage == "fit":
            refuse_second(trainer, BatchSizeSearch, "would both set the batch size. Keep one of them.")
            self._put_back()
            self.batch_size, self.trials = None, ()
            self._undo = change_train_dataloaders(trainer, self._changed)

    @override
    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        size = checkpoint.get("callbacks", {}).get(self.state_key, {}).get("batch_size")
        if size is None or self._undo is None:  # a resumed fit only
            return
        self._set(trainer, size)
        data = trainer.datamodule  # type: ignore[attr-defined]
        state = checkpoint.get(type(data).__qualname__)
        if data is not None and state is not None:  # it has read its position with the size of before
            data.load_state_dict(state)

    @override
    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        plain = trainer.fast_dev_run or trainer.barebones or not trainer.limit_train_batches  # type: ignore[attr-defined]
        if plain or trainer.ckpt_path:
            kept = "" if self._size is None else f" It keeps the batch size of its checkpoint, {self._size}."
            rank_zero_info(
                "BatchSizeSearch tries nothing in a resumed run, without batches, under fast_dev_run or barebones."
                + kept
            )
            return
        refuse(trainer, pl_module)
        before, found = self._search(trainer, pl_module)
        self.batch_size = found.batch_size
        made = before != found.batch_size and forget_train_loaders(trainer)
        self._size = None
        if before != found.batch_size:
            self._set(trainer, found.batch_size)
        self._tell(trainer, before, found, made)

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._put_back()

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._put_back()

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"batch_size": self.batch_size}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.batch_size = state_dict["batch_size"]

    def _put_back(self) -> None:
        if self._undo is not None:
            self._undo()
        self._undo = self._size = None

    def _changed(self, given: Any) -> Any:
        return given if self._size is None else resized(given, self._size)

    def _set(self, trainer: pl.Trainer, size: int) -> None:
        """Let the Trainer's next loaders have batches of this size."""
        set_size_of_owner(loader_owner(trainer), size)
        self._size = size

    def _search(self, trainer: pl.Trainer, module: pl.LightningModule) -> tuple[int, FoundBatchSize]:
        """The batch size of the user's loaders, and what was found; all is as it was, also after an error."""
        owner = loader_owner(trainer)
        owned = size_of_owner(owner)
        with trials(trainer, module) as (kept, ranks):
            try:
                loaders = list(made_train_loader(trainer).flattened)
                before = size_of_loaders(loaders)
                for loader in (*loaders, *made_val_loaders(trainer)):
                    if isinstance(loader, DataLoader):
                        kept.loader(loader)
                length = samples_at_hand(loaders, trainer.world_size)
                least = -ranks.largest([-float(length or 0)])[0]
                at_hand = int(least) or None
                limits = [most for most in (self.limit, at_hand) if most is not None]
                if not limits:
                    raise MisconfigurationException(
                        "BatchSizeSearch cannot see how many samples there are, since the dataset has no length. Set "
                        "its limit to the largest batch size to try."
                    )
                trial = Trial(trainer, ranks, self.steps)

                def attempt(size: int) -> BatchSizeTrial:
                    samples = samples_for(size, self.margin)
                    samples = samples if at_hand is None else max(size, min(samples, at_hand))
                    self._set(trainer, samples)
                    try:
                        return trial.run(size, samples, at_hand)
                    finally:
                        trainer.training = True
                        kept.restore()

                return before, search_sizes(attempt, self.start, min(limits), self.target, self._note)
            finally:
                self._size = None
                if owned is not None:
                    set_size_of_owner(owner, owned)

    def _note(self, trial: BatchSizeTrial) -> None:
        self.trials = (*self.trials, trial)

    def _tell(self, trainer: pl.Trainer, before: int, found: FoundBatchSize, made: bool) -> None:
        size = found.batch_size
        rank_zero_info(f"BatchSizeSearch: {size} samples per batch, {before} before.\n{trial_table(found.trials)}")
        ended = [trial.size for trial in found.trials if trial.failed_in == "loading"]
        if ended:
            rank_zero_warn(
                f"BatchSizeSearch got no whole batch of {min(ended)} samples: the stream is too short. It takes "
                f"{size}, which was tried; a larger one may have room."
            )
        schedulers = [config.scheduler for config in trainer.lr_scheduler_configs]
        if made and schedulers:
            rank_zero_warn(
                f"The number of steps was read before BatchSizeSearch changed the batch size from {before} to {size}, "
                "so a schedule may have been made for another number of them. Set that batch size in your code, and "
                "remove the callback."
            )
        factor = rate_factor(self.scale_lr, before, size)
        if factor != 1.0:
            scale_rates(trainer.optimizers, schedulers, factor)
            rank_zero_info(
                f"BatchSizeSearch multiplied the learning rates by {factor:.6g} (scale_lr={self.scale_lr!r})."
            )
