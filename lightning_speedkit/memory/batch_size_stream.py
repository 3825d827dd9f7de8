"""Whole batches of a stream: while sizes are tried, the last batch is left out if there are not samples enough for it.

A dataset without length does not say when it ends. Its last batch may be much smaller than the size that is tried, fit
where a whole one would not, and take less time. What it costs: a size that is not there reads the stream to its end.
"""

from __future__ import annotations

import copy
from typing import Any

from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import DataLoader, IterableDataset

__all__ = ["NoWholeBatch", "only_whole_batches"]


class NoWholeBatch(ValueError):
    """There is no training batch of the size that is tried."""


def only_whole_batches(combined: CombinedLoader) -> bool:
    """Let each DataLoader of a stream, as if it had ``drop_last=True``, give whole batches; whether there is any.

    The loaders in ``combined`` are replaced by copies, with the dataset of the original. Each worker leaves out its
    own last batch.

    >>> class Stream(IterableDataset):
    ...     def __iter__(self):
    ...         return iter(range(5))
    >>> given = DataLoader(Stream(), batch_size=2)
    >>> combined = CombinedLoader([given])
    >>> only_whole_batches(combined), [batch[0].tolist() for batch, *_ in combined], len(list(given))
    (True, [[0, 1], [2, 3]], 3)
    """
    combined.flattened = [_whole(loader) if _is_stream(loader) else loader for loader in combined.flattened]
    return any(map(_is_stream, combined.flattened))


def _is_stream(loader: Any) -> bool:
    return isinstance(loader, DataLoader) and isinstance(loader.dataset, IterableDataset)


def _whole(loader: Any) -> Any:
    whole = copy.copy(loader)
    vars(whole).update(drop_last=True, _iterator=None)  # a DataLoader refuses the assignment once it is made
    return whole
