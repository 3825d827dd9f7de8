"""Tells when the loss scale of float16 training collapses, which is when training has stopped without a word.

The scaler halves its scale after each step whose gradients overflow, and skips the step. A run that is sick overflows
at every scale: then all steps are skipped, the weights stand still, and the loss is a straight line. Nothing says so.

Source: ``torch.amp.GradScaler``; Micikevicius et al., Mixed Precision Training, 2018. Asked for in Lightning #5558.
"""

from __future__ import annotations

from lightning.pytorch.utilities import rank_zero_warn

from lightning_speedkit.errors import DivergenceError

__all__ = ["LossScaleWatch"]

_REMEDIES = (
    "A loss or gradient that is not finite at any scale needs the preset 'guard-non-finite', which names the module it "
    "comes from; values beyond float16's range (65504) need 'bf16-mixed' or 'fp32'."
)


class LossScaleWatch:
    """Counts skipped steps, warns once when the scale falls below a floor, and raises when it stays there.

    Args:
        floor: A scale below this is a collapse.
        max_in_a_row: More skipped steps than this one after the other, with the scale below the floor, are an error.

    >>> watch = LossScaleWatch(floor=1.0, max_in_a_row=2)
    >>> watch.see_skip(4.0), watch.see_skip(2.0), watch.see_skip(1.0), watch.in_a_row
    (None, None, None, 3)
    >>> watch.see_step()
    >>> watch.in_a_row
    0
    """

    def __init__(self, floor: float = 1.0, max_in_a_row: int = 50) -> None:
        self.floor, self.max_in_a_row = floor, max_in_a_row
        self.in_a_row = 0
        self.has_warned = False

    def start(self) -> None:
        """A new run begins."""
        self.in_a_row, self.has_warned = 0, False

    def see_step(self) -> None:
        """A step was taken."""
        self.in_a_row = 0

    def see_skip(self, scale: float) -> None:
        """A step was skipped, and left this scale.

        Raises:
            DivergenceError: The scale is below the floor, and too many steps were skipped in a row.
        """
        self.in_a_row += 1
        if scale >= self.floor:
            return
        told = f"{self.in_a_row} optimizer steps in a row overflowed and were skipped"
        if self.in_a_row > self.max_in_a_row:
            raise DivergenceError(f"{told}, and the loss scale fell to {scale:g}: the run stands still. {_REMEDIES}")
        if not self.has_warned:
            self.has_warned = True
            rank_zero_warn(
                f"The loss scale of '16-mixed' fell to {scale:g}, below {self.floor:g}: {told}. After "
                f"{self.max_in_a_row} in a row the run is ended. {_REMEDIES}"
            )
