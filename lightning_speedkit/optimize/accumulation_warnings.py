"""What AccumulationScheduler warns of, each once in a ``fit``: gradients that no step takes, and windows too long."""

from __future__ import annotations

from lightning.pytorch.utilities import rank_zero_warn

__all__ = ["WindowWarnings"]


class WindowWarnings:
    """The warnings of one ``fit``.

    >>> import warnings
    >>> told = WindowWarnings()
    >>> with warnings.catch_warnings(record=True) as record:
    ...     warnings.simplefilter("always")
    ...     told.of_long_windows(8, 2)
    ...     told.of_long_windows(8, 2)
    >>> len(record)
    1
    """

    def __init__(self) -> None:
        self._told: set[str] = set()

    def of_long_windows(self, factor: int, batches: float) -> None:
        """A window has more micro-batches than an epoch."""
        self._warn(
            f"The accumulation factor is {factor} and an epoch has {batches} batches on each rank: each epoch ends "
            f"with a step, so a step takes {batches} batches. Use a factor of at most {batches}, or longer epochs."
        )

    def of_long_targets(self, target: int, samples: int) -> None:
        """An epoch does not reach the target; told once for each target."""
        self._warn(
            f"target_batch is {target} and an epoch counts {samples} over all ranks: each epoch ends with a step, so a "
            f"step takes {samples}. Use a target of at most {samples}, or longer epochs.",
            f"target {target}",
        )

    def of_lost_gradients(self) -> None:
        """The run goes on inside a window without the gradients of its start."""
        self._warn(
            "The run resumes inside an accumulation window. The gradient of the window's micro-batches before the "
            "checkpoint is lost; the next step is that of the remaining ones. Save with this callback in the "
            "Trainer, or between windows."
        )

    def of_dropped_gradients(self) -> None:
        """A window ended without a step."""
        self._warn(
            "An epoch ended early, a batch was None, or under float16 the last micro-batch had no loss, inside an "
            "accumulation window: Lightning takes no step there, and the gradient of the micro-batches since the "
            "last step is lost."
        )

    def _warn(self, message: str, key: str | None = None) -> None:
        if (key or message) not in self._told:
            self._told.add(key or message)
            rank_zero_warn(message)
