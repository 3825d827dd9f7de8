"""What a run says when it has to compute in pieces: once, and again when the size changes."""

from __future__ import annotations

from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

__all__ = ["Messages"]


class Messages:
    """Remembers what was said.

    Args:
        counts_samples: Whether pieces weigh as many samples as they have.

    >>> messages = Messages()
    >>> messages.tell(None, False, nn.Identity())  # every batch fits: nothing to say
    """

    def __init__(self, counts_samples: bool = False) -> None:
        self._counts_samples = counts_samples
        self._size: int | None = None
        self._one_by_one = False

    def knows_size(self, size: int | None) -> None:
        """Take this size as said; ``None`` starts anew."""
        self._size = size

    def tell(self, size: int | None, one_by_one: bool, module: nn.Module) -> None:
        """Say what is news, and the first time what it means.

        Args:
            size: The most samples that are computed at once.
            one_by_one: Whether an optimizer step was repeated.
            module: Its BatchNorms are warned about.
        """
        if one_by_one and not self._one_by_one:
            rank_zero_warn(
                "An optimizer step ran out of memory and was repeated; from now on steps go parameter by parameter "
                "where the optimizer has the option (foreach=False, not fused), which needs less memory."
            )
        self._one_by_one |= one_by_one
        if size == self._size:
            return
        if self._size is not None:
            rank_zero_info(f"AutoMicroBatch: at most {size} samples are computed at once from now on.")
        else:
            norm = any(isinstance(part, _BatchNorm) for part in module.modules())
            but = " Except for BatchNorm, whose statistics are those of pieces: use GroupNorm, or freeze it." * norm
            mean = (
                " where the loss is a mean over samples; for a mean over labels or tokens pass count='labels'"
                if self._counts_samples
                else ""
            )
            rank_zero_warn(
                f"Memory ran out. The batch was computed in pieces, and at most {size} samples are computed at once "
                f"from now on; the steps stay those of whole batches{mean}.{but}"
            )
        self._size = size
