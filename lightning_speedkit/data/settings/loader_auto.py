"""Measures the settings of the user's own training DataLoader when ``fit`` starts, and trains with the best ones.

When it helps: a DataLoader with too few workers lets the model wait, and one with too many for its samples is slower
than none; which it is depends on the machine that the run is on.

What it costs: some seconds at the start of each ``fit``. Order of the samples, random state and loss stay as they are
with the user's loader, bit for bit, as long as a sample does not depend on the process that loads it.

Source: the function is :func:`~lightning_speedkit.data.suggest_loader`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities import CombinedLoader, rank_zero_info, rank_zero_warn
from torch.utils.data import DataLoader, SequentialSampler
from typing_extensions import override

from lightning_speedkit.data.argument_checks import check_seconds, checked_integer
from lightning_speedkit.data.settings.loader_settings import LoaderSettings
from lightning_speedkit.data.settings.settled_loader import SettledLoader, settle, why_not_settled
from lightning_speedkit.data.settings.suggest_loader import suggest_loader
from lightning_speedkit.errors import LoaderError
from lightning_speedkit.facts import Hardware
from lightning_speedkit.measure import read_hardware
from lightning_speedkit.measure.lightning_loaders import change_train_dataloaders

__all__ = ["LoaderSettingsSearch", "suggest_for"]

Decision = LoaderSettings | str  # settings, or why there are none


def suggest_for(
    loader: object,
    hardware: Hardware | None = None,
    *,
    max_workers: int | None = None,
    loaders_on_machine: int = 1,
    seconds: float = 5.0,
) -> LoaderSettings | str:
    """What :func:`suggest_loader` says about the dataset of an existing DataLoader, or why it cannot be asked.

    The loader is not iterated: its sampler, generator and workers stay as they are.

    >>> suggest_for([1, 2, 3])
    'a list is no torch DataLoader'
    """
    if reason := why_not_settled(loader):
        return reason
    assert isinstance(loader, DataLoader)
    context = loader.multiprocessing_context
    try:
        return suggest_loader(
            hardware,
            loader.dataset,
            batch_size=_batch_size(loader),
            collate_fn=loader.collate_fn,
            worker_init_fn=loader.worker_init_fn,
            max_workers=max_workers,
            multiprocessing_context=None if context is None else context.get_start_method(),
            shuffle=not isinstance(loader.sampler, SequentialSampler),
            loaders_on_machine=loaders_on_machine,
            seconds=seconds,
        )
    except (LoaderError, TypeError, ValueError) as error:
        return str(error)


def _batch_size(loader: DataLoader[Any]) -> int | None:
    if loader.batch_size is not None or loader.batch_sampler is None:
        return loader.batch_size
    try:
        return max(1, len(loader.dataset) // len(loader))  # type: ignore[arg-type]  # a batch sampler of its own kind
    except TypeError:
        return 32


def _changes(loader: DataLoader[Any], settings: LoaderSettings) -> bool:
    """Whether the settings are other ones than the loader has."""
    workers = settings.num_workers
    return (
        workers != loader.num_workers
        or (settings.pin_memory and not loader.pin_memory)
        or (workers > 0 and settings.prefetch_factor != loader.prefetch_factor)
        or (workers > 0 and settings.persistent_workers and not loader.persistent_workers)
    )


class LoaderSettingsSearch(Callback):
    """Gives the training DataLoader the workers and the prefetching that load its dataset fastest on this machine.

    The loader may be given to ``fit``, come from the module or from a DataModule, or be one of several. In a
    distributed run rank 0 measures and the others do as it says. A loader that is no plain torch DataLoader, or that
    reads an IterableDataset, is left alone, and so is every loader under ``fast_dev_run``, ``barebones`` and
    ``overfit_batches``. Evaluation is not changed.

    Args:
        seconds: About how long to measure at the start of each ``fit``, for all training loaders together.
        max_workers: No more workers than these for one loader; by default the cores, divided by the number of
            training loaders and of this machine's ranks.

    Attributes:
        settings: What was chosen in the last ``fit``, for each training loader; None for one that was left alone.

    Example:

        >>> import torch
        >>> from lightning.pytorch import Trainer
        >>> from lightning.pytorch.demos.boring_classes import BoringModel, RandomDataset
        >>> search = LoaderSettingsSearch(seconds=0.1, max_workers=0)
        >>> quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
        >>> quiet |= {"enable_model_summary": False, "limit_val_batches": 0, "accelerator": "cpu"}
        >>> Trainer(callbacks=search, max_epochs=1, **quiet).fit(BoringModel(), DataLoader(RandomDataset(32, 64)))
        >>> search.settings[0].num_workers
        0
    """

    def __init__(self, seconds: float = 5.0, max_workers: int | None = None) -> None:
        super().__init__()
        check_seconds("seconds", seconds)
        self.seconds = seconds
        self.max_workers = None if max_workers is None else checked_integer("max_workers", max_workers, 0)
        self.settings: tuple[LoaderSettings | None, ...] = ()
        self._decisions: list[Decision] | None = None
        self._settled: list[SettledLoader] = []
        self._undo: Callable[[], None] | None = None

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        self._put_back()
        self.settings, self._decisions = (), None
        off = [name for name in ("fast_dev_run", "barebones", "overfit_batches") if getattr(trainer, name)]
        if off:
            rank_zero_info(f"LoaderSettingsSearch leaves the training DataLoader as it is under {off[0]}.")
            return
        self._undo = change_train_dataloaders(trainer, lambda loaders: self._changed(trainer, loaders))

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if stage == "fit":
            self._put_back()

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._put_back()

    def _put_back(self) -> None:
        if self._undo is not None:
            self._undo()
        self._undo = None
        self._close_settled()

    def _close_settled(self) -> None:
        for loader in self._settled:
            loader.close()
        self._settled.clear()

    def _changed(self, trainer: pl.Trainer, loaders: Any) -> Any:
        """The loaders with other settings, in the structure in which they came, in place of those of before."""
        self._close_settled()
        combined = copy.copy(loaders) if isinstance(loaders, CombinedLoader) else CombinedLoader(loaders)
        flat = list(combined.flattened)
        if self._decisions is None or len(self._decisions) != len(flat):
            found = self._decide(trainer, flat) if trainer.is_global_zero else []
            told = trainer.strategy.broadcast(found, src=0)
            self._decisions = [*told[: len(flat)], *["rank 0 has fewer loaders"] * (len(flat) - len(told))]
            self._tell(flat, self._decisions)
        combined.flattened = [
            self._settled_as(loader, decision) for loader, decision in zip(flat, self._decisions, strict=True)
        ]
        return combined if isinstance(loaders, CombinedLoader) else combined.iterables

    def _decide(self, trainer: pl.Trainer, flat: Sequence[Any]) -> list[Decision]:
        device = trainer.strategy.root_device.type
        hardware = read_hardware(device if device in ("cuda", "mps", "xpu") else "cpu")
        to_ask = max(1, sum(not why_not_settled(loader) for loader in flat))
        return [
            suggest_for(
                loader,
                hardware,
                max_workers=self.max_workers,
                loaders_on_machine=to_ask * trainer.num_devices,
                seconds=self.seconds / to_ask,
            )
            for loader in flat
        ]

    def _tell(self, flat: Sequence[Any], decisions: Sequence[Decision]) -> None:
        self.settings = tuple(None if isinstance(decision, str) else decision for decision in decisions)
        for loader, decision in zip(flat, decisions, strict=True):
            if not isinstance(decision, str):
                verb = "keeps" if not why_not_settled(loader) and not _changes(loader, decision) else "chose"
                rank_zero_info(f"LoaderSettingsSearch {verb} {decision.describe()}")
            elif why_not_settled(loader):
                rank_zero_info(f"LoaderSettingsSearch leaves a training loader as it is: {decision}.")
            else:
                rank_zero_warn(f"LoaderSettingsSearch leaves the training DataLoader as it is. {decision}")

    def _settled_as(self, loader: Any, decision: Decision) -> Any:
        if isinstance(decision, str) or why_not_settled(loader) or not _changes(loader, decision):
            return loader
        settled = settle(loader, decision)
        self._settled.append(settled)
        return settled
