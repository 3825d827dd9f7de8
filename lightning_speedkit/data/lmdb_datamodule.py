"""A LightningDataModule over a folder of stores, which can pack the data by itself the first time.

When it helps: training from many small files or from samples that are slow to decode. ``root/train.lmdb``,
``val.lmdb``, ``test.lmdb`` and ``predict.lmdb`` are served, as far as they are there. A subclass that defines
:meth:`LMDBDataModule.samples` has the missing ones packed in ``prepare_data``: once per node, by one process, while
others wait; a run that is killed meanwhile leaves no half store.

What it costs: the packing once, and the disk space of the stores.

Source: Lightning's ``prepare_data`` protocol; litData#562 (only one rank indexes).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from typing_extensions import override

from lightning_speedkit.data.argument_checks import a_type
from lightning_speedkit.data.datamodule import SPLIT_OF_STAGE, SPLITS, SpeedkitDataModule
from lightning_speedkit.data.loading.collate import collate_samples
from lightning_speedkit.data.store.encoded_pictures import encoded_pictures
from lightning_speedkit.data.store.lmdb_dataset import LMDBDataset
from lightning_speedkit.data.store.lmdb_pack import write_lmdb
from lightning_speedkit.data.store.write_lock import exclusive_lock
from lightning_speedkit.errors import EmptyStoreError, StoreError, StoreWriteError

if TYPE_CHECKING:
    from lightning_speedkit.data.images.image_field import ImageField

__all__ = ["LMDBDataModule"]


class LMDBDataModule(SpeedkitDataModule):
    """Serves ``train.lmdb``, ``val.lmdb``, ``test.lmdb`` and ``predict.lmdb`` of a folder.

    Args:
        root: the folder with the stores, ``~`` for the home folder; made by ``prepare_data`` if there are samples to
            pack.
        batch_size, loader, num_workers, pin_memory, prefetch_factor, shuffle, drop_last, remainder, seed, start_method:
            see :class:`SpeedkitDataModule`.

    Example::

        >>> import tempfile
        >>> folder = tempfile.TemporaryDirectory()
        >>> class Squares(LMDBDataModule):
        ...     def samples(self, split):
        ...         return ((float(i), i * i) for i in range(6)) if split == "train" else None
        >>> data = Squares(folder.name, batch_size=3, shuffle=False)
        >>> data.prepare_data()
        >>> next(iter(data.train_dataloader()))
        (tensor([0., 1., 2.]), tensor([0, 1, 4]))
    """

    def __init__(
        self,
        root: str | Path,
        *,
        batch_size: int = 32,
        loader: str = "auto",
        num_workers: int | None = None,
        pin_memory: bool | None = None,
        prefetch_factor: int = 2,
        shuffle: bool | str = True,
        drop_last: bool = False,
        remainder: str = "pad",
        seed: int = 0,
        start_method: str | None = None,
    ) -> None:
        super().__init__(
            batch_size=batch_size,
            loader=loader,
            num_workers=num_workers,
            pin_memory=pin_memory,
            prefetch_factor=prefetch_factor,
            shuffle=shuffle,
            drop_last=drop_last,
            remainder=remainder,
            seed=seed,
            start_method=start_method,
        )
        self.root = Path(root).expanduser().absolute()
        self.prepare_data_per_node = True
        self._told_of_pictures = False

    def samples(self, split: str) -> Any | None:
        """The samples to pack for a split that has no store yet: an iterable or map-style dataset, or ``None``.

        Called in ``prepare_data``, on one process of each node; do not keep state here. A store that is there is
        served as it is, also after this method has changed: remove the file to have it packed again.
        """
        return None

    def transform(self, split: str) -> Callable[[Any], Any] | None:
        """What is applied to each sample of a split when it is read, such as augmentation for ``"train"``."""
        return None

    def fields(self, split: str) -> Mapping[str | int, ImageField] | None:
        """Which fields of a split are encoded pictures, and how they are decoded, see :class:`LMDBDataset`."""
        return None

    def path(self, split: str) -> Path:
        """The file of a split."""
        return self.root / f"{split}.lmdb"

    @override
    def dataset(self, split: str) -> LMDBDataset | None:
        path = self.path(split)
        if not path.exists():
            return None
        dataset = LMDBDataset(path, self.transform(split), self.fields(split))
        if not self._told_of_pictures:
            self._tell_of_pictures(dataset)
        return dataset

    @override
    def prepare_data(self) -> None:
        """Pack the splits that have no store but samples. Two processes do not pack at once: the second waits.

        A store that is there is never compared with :meth:`samples`; which ones are used again is logged.
        """
        there = [split for split in SPLITS if self.path(split).exists()]
        if there and type(self).samples is not LMDBDataModule.samples:
            names = ", ".join(self.path(split).name for split in there)
            rank_zero_info(f"Using {names} of {self.root} as packed before; delete a store to pack its samples again.")
        for split in SPLITS:
            if split in there:
                continue
            samples = self.samples(split)
            if samples is not None:
                self._pack(samples, split)

    @override
    def setup(self, stage: str) -> None:
        split = SPLIT_OF_STAGE.get(stage)
        if split is None:
            raise ValueError(f"stage must be one of {', '.join(map(repr, SPLIT_OF_STAGE))}, got {stage!r}.")
        if not self.path(split).exists():
            raise MisconfigurationException(self._missing(split))

    def _pack(self, samples: Any, split: str) -> None:
        path, where = self.path(split), f"samples({split!r}) of {type(self).__name__}"
        if isinstance(samples, Mapping | str | bytes):
            raise TypeError(
                f"{where} returned {a_type(samples)}: return an iterable of samples or a map-style dataset, "
                f"for this split alone."
            )
        with ExitStack() as held:
            try:
                self.root.mkdir(parents=True, exist_ok=True)
                held.enter_context(exclusive_lock(self.root / f".{split}.prepare.lock", wait=True))
            except OSError as error:
                raise StoreWriteError(
                    f"{path} is not there and cannot be packed ({error}): root must be a folder that can be written, "
                    f"or hold all stores that samples() has samples for."
                ) from error
            if path.exists():  # another process has packed it while this one waited
                return
            rank_zero_info(f"Packing the split {split!r} into {path}.")
            try:
                write_lmdb(samples, path, progress=self._shows_progress())
            except EmptyStoreError:
                raise EmptyStoreError(f"{where} yielded nothing to write to {path}; {self._hint()}") from None

    def _hint(self) -> str:
        if inspect.isgeneratorfunction(self.samples):
            return (
                "samples is a generator function, which never returns None, as a split that is not there needs: move "
                "its yield into another method, and return None or that generator."
            )
        return "return None if there is no such split."

    def _tell_of_pictures(self, dataset: LMDBDataset) -> None:
        """Warn once of encoded pictures that nothing of this DataModule decodes."""
        if dataset.transform is not None or dataset.leaf_fields() or self._collate_fn() is not collate_samples:
            return
        try:
            found = encoded_pictures(dataset.path)
        except StoreError:  # whoever reads the sample is told
            return
        if found:
            self._told_of_pictures = True
            key = next((place[1:-1] if typed != place else repr(place)) for place, typed in found.items())
            rank_zero_warn(
                f"The samples of {dataset.path} hold encoded pictures at {key}, and nothing of {type(self).__name__} "
                f"decodes them, so a batch has a list of bytes there. Let fields(split) return "
                f"{{{key}: ImageField(224)}}, or decode them in transform(split) or collate(samples)."
            )

    def _shows_progress(self) -> bool:
        return self.trainer is None or self.trainer.progress_bar_callback is not None

    @override
    def _missing(self, split: str) -> str:
        source, folder = "SOURCE", self.root
        if self.root.suffix == ".lmdb" and self.root.is_file():
            where = f"root={str(self.root)!r} is a file; give the folder that it is in."
            folder = self.root.parent
        elif self.root.is_file():
            where = f"root={str(self.root)!r} is a file; pack it into a folder, and give that as root."
            source, folder = str(self.root), self.root.with_name(f"{self.root.stem}_lmdb")
        elif not self.root.is_dir():
            where = f"There is no folder {self.root}."
        else:
            there = ", ".join(sorted(path.name for path in self.root.glob("*.lmdb")))
            where = f"In that folder: {there or 'no .lmdb file'}."
        return (
            f"{type(self).__name__} has no {self.path(split)}. {where} Make it with the command "
            f"`speedkit pack {source} {folder}` or with write_lmdb(samples, path), or define samples({split!r})."
        )
