"""Where a loader is in its epochs, counted by the batches that were given out, and its form in a checkpoint."""

from __future__ import annotations

from typing import Any

from lightning_speedkit.data.argument_checks import checked_integer
from lightning_speedkit.data.loading.epoch_order import EpochOrder

__all__ = ["LoaderPosition"]

_NEEDED = ("epoch", "position", "samples", "seed", "shuffle")
_SAME = ("samples", "seed", "shuffle", "blocks")  # without which the rest of an epoch is another one


class LoaderPosition:
    """An epoch, and how far it has come. ``given`` counts the batches since ``start``, a position of the global order
    that is not 0 after a resume; ``before`` counts those that were given before it. ``turn`` numbers the iterations:
    only the newest one counts.

    >>> position, order = LoaderPosition(), EpochOrder(samples=10, batch_size=4)
    >>> position.given = 1
    >>> state = position.state(order)
    >>> state["epoch"], state["position"]
    (0, 4)
    >>> position.load(order, {**state, "position": 8})
    >>> position.start, position.before, position.given
    (8, 2, 0)
    """

    def __init__(self) -> None:
        self.epoch = self.start = self.before = self.given = self.turn = 0

    def begin(self, epoch: int) -> None:
        """Go to the beginning of an epoch."""
        self.epoch, self.start, self.before, self.given = epoch, 0, 0, 0

    def state(self, order: EpochOrder) -> dict[str, Any]:
        """Plain numbers, with what tells this order from others."""
        position = self.start
        if self.given:
            done = self.given >= order.global_steps(self.start)  # this rank may have nothing in the last step
            position = order.samples if done else order.span(self.given, self.start)[0]
        return {
            "version": 1,
            "epoch": self.epoch,
            "position": position,
            "samples": order.samples,
            "seed": order.seed,
            "shuffle": order.shuffle,
            "blocks": order.block_digest(),
        }

    def load(self, order: EpochOrder, state: dict[str, Any]) -> None:
        """Go to where a state says; an iteration under way counts no more.

        Raises:
            ValueError: it is no such state, or lies within an epoch of another order.
        """
        missing = set(_NEEDED) - state.keys()
        if missing:
            raise ValueError(f"This is no state of a RingLoader: it lacks {', '.join(sorted(missing))}.")
        epoch, position = (checked_integer(name, state[name], 0) for name in ("epoch", "position"))
        within = 0 < position < state["samples"]
        if within:
            _check_same(state, self.state(order))
        self.turn += 1
        self.begin(epoch if within or not position else epoch + 1)
        if within:
            self.start = position
            # With the batch size and the number of ranks of the state these are the batches that were given.
            self.before = order.global_steps() - order.global_steps(position)


def _check_same(state: dict[str, Any], mine: dict[str, Any]) -> None:
    for name in _SAME:
        if state.get(name, 0) != mine[name]:
            raise ValueError(
                f"The checkpoint was made by a loader with {name}={state.get(name)!r}, this one has {mine[name]!r}: "
                f"the rest of the epoch is not defined. Use the same, or begin anew."
            )
