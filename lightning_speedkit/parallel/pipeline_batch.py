"""How a batch is cut into micro-batches, and how what they logged becomes one value again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

__all__ = ["MicroBatches", "merge_logged"]


class MicroBatches:
    """A batch cut by index into micro-batches, all padded to the size of the largest by rows that are cut off again.

    Args:
        batch: Tensors in tuples, lists or dicts; the first dimension of each counts the samples.
        count: How many micro-batches to make; some are empty if there are fewer samples.

    Raises:
        ValueError: There is no tensor, or tensors differ in their first dimension.

    Example:

        >>> cut = MicroBatches([torch.arange(5), torch.tensor(3.0)], 3)
        >>> [cut.padded(i)[0].tolist() for i in range(3)], [cut.real(i)[0].tolist() for i in range(3)]
        ([[0, 1], [2, 3], [4, 4]], [[0, 1], [2, 3], [4]])
    """

    def __init__(self, batch: Any, count: int) -> None:
        sizes: list[int] = []
        apply_to_collection(batch, Tensor, lambda tensor: sizes.append(len(tensor)) if tensor.ndim else None)
        if not sizes or len(set(sizes)) > 1 or not sizes[0]:
            raise ValueError(
                f"The first dimensions of the batch's tensors are {sizes}: a pipeline cuts a batch along them, so they "
                "must be one number of samples, at least 1."
            )
        self.batch, self.samples = batch, sizes[0]
        self._rows = torch.arange(self.samples).tensor_split(count)
        self.size = len(self._rows[0])

    def rows(self, index: int) -> int:
        """How many samples the micro-batch has without padding."""
        return len(self._rows[index])

    def real(self, index: int) -> Any:
        """The samples of a micro-batch."""
        return self._take(self._rows[index])

    def padded(self, index: int) -> Any:
        """The same, filled up by repeating the last sample of the batch."""
        rows = self._rows[index]
        return self._take(torch.cat([rows, rows.new_full((self.size - len(rows),), self.samples - 1)]))

    def _take(self, rows: Tensor) -> Any:
        return apply_to_collection(
            self.batch, Tensor, lambda tensor: tensor[rows.to(tensor.device)] if tensor.ndim else tensor
        )


def merge_logged(values: Sequence[tuple[float, int]], reduce_fx: Any) -> float:
    """One value of those that the micro-batches logged, each with its number of samples.

    >>> merge_logged([(1.0, 3), (5.0, 1)], "mean"), merge_logged([(1.0, 3), (5.0, 1)], "sum")
    (2.0, 6.0)
    """
    name = reduce_fx if isinstance(reduce_fx, str) else getattr(reduce_fx, "__name__", "mean")
    if name in ("sum", "max", "min"):
        alone = [value for value, _ in values]
        return sum(alone) if name == "sum" else max(alone) if name == "max" else min(alone)
    return sum(value * rows for value, rows in values) / sum(rows for _, rows in values)
