"""Ranks with different numbers of batches train to the end, and no gradient is lost.

What it does: a rank that has no batch left repeats its last one, and its gradient counts nothing, until no rank has
one. The gradient is the mean over the ranks that have a batch, as in one process on the batches of all. All ranks run
the same number of steps, so that accumulation, validation, checkpoints and whatever else ranks do together line up.

When it helps: iterable datasets that are split over ranks, files of different sizes, samplers of one's own. Without it
the ranks that have more batches wait for the others until a timeout (Lightning #3325). What it costs: nothing where all
ranks have as many batches and know it; else the ranks tell each other before each batch whether they have one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch.utils.data import IterableDataset

__all__ = ["EvenLoader", "RankFlags", "even_loader", "take_share"]


class RankFlags:
    """Numbers that ranks tell each other over the host, in a group of their own.

    It is made on all ranks at the same point, as is each call.
    """

    def __init__(self) -> None:
        self.rank, self.size = torch.distributed.get_rank(), torch.distributed.get_world_size()
        self._group: Any = torch.distributed.new_group(backend="gloo")  # its type differs between torch versions

    def all(self, number: int) -> list[int]:
        """The number of each rank; waits for all."""
        numbers = torch.zeros(self.size, dtype=torch.int64)
        numbers[self.rank] = number
        torch.distributed.all_reduce(numbers, group=self._group)
        return [int(one) for one in numbers]

    def share(self, thing: Any, source: int) -> Any:
        """The thing of rank ``source``, on all ranks. It has to pickle."""
        things = [thing if self.rank == source else None]
        torch.distributed.broadcast_object_list(things, src=source, group=self._group, device=torch.device("cpu"))
        return things[0]

    def close(self) -> None:
        """Leave the group."""
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group(self._group)


def even_loader(loader: Any, flags: RankFlags) -> Any:
    """The loader itself where all ranks have as many batches and know it; else one that all ranks can end together."""
    try:
        length = len(loader)
    except (TypeError, NotImplementedError):
        length = -1
    lengths = flags.all(length)
    promised = isinstance(getattr(loader, "dataset", None), IterableDataset)  # its length is only what someone says
    if any(flags.all(promised)) or min(lengths) < 0 or len(set(lengths)) > 1:
        return EvenLoader(loader, flags, None if min(lengths) < 0 else max(lengths))
    return loader


class EvenLoader:
    """As many batches on each rank as on the rank with the most.

    It has the attributes of the loader that it is made of, and sets them there.

    Args:
        loader: The batches of this rank.
        flags: How the ranks tell each other.
        length: The largest number of batches of a rank; ``None`` if it is not known.

    Attributes:
        shares: What each batch counts that was given out and not yet taken from here: the number of ranks by the
            number of those that have a batch, or 0 for a repeated one.
    """

    _OWN = frozenset({"loader", "flags", "length", "shares"})

    def __init__(self, loader: Any, flags: RankFlags, length: int | None) -> None:
        self.loader, self.flags, self.length = loader, flags, length
        self.shares: deque[float] = deque()

    def __getattr__(self, name: str) -> Any:
        if name in EvenLoader._OWN:  # while it is unpickled
            raise AttributeError(name)
        return getattr(self.loader, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in EvenLoader._OWN:
            object.__setattr__(self, name, value)
        else:
            setattr(self.loader, name, value)

    def __len__(self) -> int:
        if self.length is None:
            raise TypeError("The number of batches is not known on all ranks.")
        return self.length

    def __iter__(self) -> Iterator[Any]:
        self.shares = deque()
        return self._batches(iter(self.loader), self.shares)

    def _batches(self, own: Iterator[Any], shares: deque[float]) -> Iterator[Any]:
        last: Any = None
        has, all_had = True, True
        while True:
            if has:
                try:
                    last = next(own)
                except StopIteration:
                    has = False
            owners = self.flags.all(has)
            if not any(owners):
                return
            if all_had and not all(owners):
                last, all_had = self._first_of_another(last, owners), False
            shares.append(len(owners) / sum(owners) if has else 0.0)
            yield last

    def _first_of_another(self, last: Any, owners: list[int]) -> Any:
        """A batch of another rank, for those that never had one."""
        lacking = self.flags.all(last is None)
        if not any(lacking):
            return last
        batch = self.flags.share(last, owners.index(1))
        return batch if last is None else last


def take_share(loader: Any) -> float:
    """What the next batch of a Trainer's training loader counts: 1 unless it is an :class:`EvenLoader`.

    Raises:
        MisconfigurationException: There are several loaders, or the module takes its batches from the loader itself.
    """
    if isinstance(loader, EvenLoader):
        if loader.shares:
            return loader.shares.popleft()
        asked = "training_step(dataloader_iter) takes its batches itself"
    else:
        several = loader.values() if isinstance(loader, dict) else loader if isinstance(loader, list | tuple) else ()
        if not any(isinstance(one, EvenLoader) for one in several):
            return 1.0
        asked = "there are several training loaders"
    raise MisconfigurationException(
        f"The ranks have different numbers of batches, or cannot know, and {asked}; that does not go together. Use one "
        "loader and training_step(batch, batch_idx); or SpeedkitDDPStrategy(uneven_inputs=False), if all ranks have as "
        "many batches."
    )
