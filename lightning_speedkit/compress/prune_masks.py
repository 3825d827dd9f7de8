"""Masks over the weights of a model: chosen to an exact count, applied in place, kept in a checkpoint.

The model is not re-parametrized. A pruned weight is a zero in the tensor where it always was, so names, references,
compiled code and checkpoints stay as they are. What keeps it a zero is :meth:`PruningMasks.apply` after each step.

Sources: Han et al., Learning both weights and connections, 2015 (magnitude); Evci et al., Rigging the lottery, 2020
(arXiv 1911.11134): drop by magnitude, grow by the gradient of the dense model, at one sparsity.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy
import torch
from torch import Tensor, nn

from lightning_speedkit.compress.prune_scores import count_for, mark_lowest_together, mark_two_of_four

__all__ = ["PruningMasks", "is_two_of_four"]

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes


class PruningMasks:
    """Which weights are pruned; usable in a loop of your own.

    ``pruned`` has a tensor of bool for each weight, true where it is pruned.

    Args:
        weights: By name, as :func:`~lightning_speedkit.compress.prune_targets.prunable_weights` gives them.
        scope: ``"global"`` ranks all weights together, so that layers end with different sparsities; ``"layer"`` gives
            each layer the same.
        pattern: ``"2:4"`` prunes at most two of four consecutive inputs, and at a sparsity of 0.5 exactly two.

    >>> layer = nn.Linear(4, 1, bias=False)
    >>> layer.weight.data = torch.tensor([[0.4, -0.1, 0.3, 0.2]])
    >>> masks = PruningMasks({"weight": layer.weight})
    >>> masks.prune_to(0.5)
    >>> masks.apply()
    >>> layer.weight.data, masks.sparsity()
    (tensor([[0.4000, 0.0000, 0.3000, 0.0000]]), 0.5)
    """

    def __init__(self, weights: Mapping[str, Tensor], scope: str = "global", pattern: str | None = None) -> None:
        self.weights = dict(weights)
        self.scope, self.pattern = scope, pattern
        self.pruned = {name: torch.zeros_like(w, dtype=torch.bool) for name, w in self.weights.items()}
        self._bits: dict[str, tuple[Tensor, Tensor]] = {}  # of each mask, with the mask that they are of

    def count(self) -> int:
        """How many weights are pruned; on a device, this waits for it."""
        return sum(self.counts().values())

    def counts(self) -> dict[str, int]:
        """How many weights are pruned, by name."""
        found = [marked.sum().to("cpu", non_blocking=True) for marked in self.pruned.values()]
        for device in {marked.device for marked in self.pruned.values() if marked.is_cuda}:
            torch.cuda.synchronize(device)
        return {name: int(number) for name, number in zip(self.pruned, found, strict=True)}

    def total(self) -> int:
        """How many weights there are."""
        return sum(weight.numel() for weight in self.weights.values())

    def sparsity(self) -> float:
        """The share of pruned weights."""
        return self.count() / max(self.total(), 1)

    @torch.no_grad()
    def take_zeros(self) -> None:
        """Take weights that are zero as pruned already, but for weights that are zero as a whole, as some are at first.

        With a pattern, no more than it allows.
        """
        for name, weight in self.weights.items():
            zeros = weight.detach() == 0
            if self.pattern is not None:
                zeros &= mark_two_of_four(weight.detach().abs())
            if not bool((weight.detach() == 0).all()):
                self.pruned[name] = zeros

    def refuse_below(self, sparsity: float) -> None:
        """Raise if clearly more weights are pruned than this sparsity has.

        Raises:
            ValueError: There are, by more than a hundredth of the weights.
        """
        now = self.counts()
        for group in self._groups():
            size, gone = sum(self.weights[name].numel() for name in group), sum(now[name] for name in group)
            where = "The model" if self.scope == "global" else f"{group[0]!r}"
            if gone > count_for(sparsity, size) + size / 100:
                raise ValueError(
                    f"{where} has a sparsity of {gone / size:.3f} already, and {sparsity:g} is below it. Pruned "
                    "weights do not come back: ask for more, or begin with a model that has fewer zeros."
                )
            if gone > count_for(sparsity, size):  # a few that are zero by chance
                self.pruned.update({name: torch.zeros_like(self.pruned[name]) for name in group})

    @torch.no_grad()
    def prune_to(self, sparsity: float, scores: Mapping[str, Tensor] | None = None) -> None:
        """Mark the lowest scores until exactly this share of the weights is pruned; what is pruned stays so.

        Args:
            sparsity: From 0 to 1; with a pattern, to 0.5. Below what is reached already, nothing changes.
            scores: By name; the magnitudes of the weights if not given.
        """
        now = self.counts()
        for group in self._groups():
            wanted = count_for(sparsity, sum(self.weights[name].numel() for name in group))
            if wanted > sum(now[name] for name in group):
                marks = mark_lowest_together([self._ranked(name, scores) for name in group], wanted)
                self.pruned.update(zip(group, marks, strict=True))

    @torch.no_grad()
    def regrow(self, share: float, gradients: Mapping[str, Tensor], scores: Mapping[str, Tensor] | None = None) -> None:
        """Prune the lowest ``share`` of the weights that are left, and give back as many where gradients are largest.

        Those come from the weights that were pruned before, and start at zero. The sparsity stays what it is.

        Args:
            share: From 0 to 1, rounded down to whole weights.
            gradients: Of the loss with respect to all weights, the pruned ones too; without an entry they are 0.
            scores: By name; the magnitudes of the weights if not given.
        """
        now = self.counts()
        for group in self._groups():
            before = [self.pruned[name] for name in group]
            gone = sum(now[name] for name in group)
            number = min(math.floor(share * (sum(m.numel() for m in before) - gone)), gone)
            if number == 0:
                continue
            live = [self._score(n, scores).masked_fill(m, math.inf) for n, m in zip(group, before, strict=True)]
            wanted = [
                (-gradients[n].detach().float().abs() if n in gradients else torch.zeros_like(m, dtype=torch.float32))
                .nan_to_num(0.0)
                .masked_fill(~m, math.inf)
                for n, m in zip(group, before, strict=True)
            ]
            dropped, grown = mark_lowest_together(live, number), mark_lowest_together(wanted, number)
            for name, marked, drop, grow in zip(group, before, dropped, grown, strict=True):
                self.pruned[name] = (marked | drop) & ~grow

    @torch.no_grad()
    def apply(self) -> None:
        """Set the pruned weights to zero, in place."""
        for name, weight in self.weights.items():
            self._set_to_zero(name, weight.detach())

    @torch.no_grad()
    def apply_to_gradients(self) -> None:
        """Set the gradients of the pruned weights to zero: they then count neither for clipping nor for momentum."""
        for name, weight in self.weights.items():
            if weight.grad is not None and weight.grad.layout is torch.strided:
                self._set_to_zero(name, weight.grad)

    @torch.no_grad()
    def apply_to_state(self, optimizer: torch.optim.Optimizer) -> None:
        """Set what the optimizer keeps for each pruned weight, momentum above all, to zero."""
        for name, weight in self.weights.items():
            for value in optimizer.state[weight].values() if weight in optimizer.state else ():
                plain = type(value) in (Tensor, nn.Parameter) and value.layout is torch.strided
                if plain and value.shape == weight.shape:
                    value.masked_fill_(self.pruned[name].to(value.device), 0.0)

    def hold(self, optimizer: torch.optim.Optimizer) -> Any:
        """Apply the masks after each step of this optimizer, until ``remove()`` of what is returned is called."""
        return optimizer.register_step_post_hook(lambda *_: self.apply())

    def to_weights(self) -> None:
        """Bring the masks to where the weights are now."""
        self.pruned = {name: marked.to(self.weights[name].device) for name, marked in self.pruned.items()}

    def packed(self) -> dict[str, Tensor]:
        """The masks for a checkpoint, a bit for each weight."""
        return {
            name: torch.from_numpy(numpy.packbits(marked.detach().cpu().numpy().reshape(-1)))
            for name, marked in self.pruned.items()
        }

    def unpack(self, packed: Mapping[str, Tensor]) -> None:
        """Take what :meth:`packed` gave.

        Raises:
            ValueError: It was of other weights.
        """
        sizes = {name: math.ceil(weight.numel() / 8) for name, weight in self.weights.items()}
        if sizes != {name: bits.numel() for name, bits in packed.items()}:
            wrong = sorted({name for name, _ in sizes.items() ^ {n: b.numel() for n, b in packed.items()}.items()})
            raise ValueError(
                f"The masks are of other weights: {', '.join(wrong[:6])}. Use the model and the skip that they were "
                "saved with."
            )
        for name, weight in self.weights.items():
            bits = numpy.unpackbits(packed[name].cpu().numpy(), count=weight.numel()).astype(bool)
            self.pruned[name] = torch.from_numpy(bits).view(weight.shape).to(weight.device)

    def _set_to_zero(self, name: str, values: Tensor) -> None:
        """By the bits of the numbers, which is many times as fast as ``masked_fill_`` on a CPU, and as exact."""
        pruned = self.pruned[name]
        if not values.is_floating_point():
            values.masked_fill_(pruned, 0)
            return
        kind = _INTEGERS[values.element_size()]
        known = self._bits.get(name)
        if known is None or known[0] is not pruned or known[1].dtype is not kind:
            known = self._bits[name] = (pruned, (~pruned).to(kind).neg_())  # all bits of what stays
        values.view(kind).bitwise_and_(known[1])

    def _groups(self) -> list[list[str]]:
        """The names of weights that compete with each other."""
        return [list(self.weights)] if self.scope == "global" else [[name] for name in self.weights]

    def _score(self, name: str, scores: Mapping[str, Tensor] | None) -> Tensor:
        found = self.weights[name].detach().abs() if scores is None else scores[name]
        return found.float().nan_to_num(nan=math.inf, posinf=math.inf, neginf=-math.inf)

    def _ranked(self, name: str, scores: Mapping[str, Tensor] | None) -> Tensor:
        """The scores, with what is pruned lowest, and what the pattern does not let go highest."""
        ranked = self._score(name, scores).masked_fill(self.pruned[name], -math.inf)
        return ranked if self.pattern is None else ranked.masked_fill(~mark_two_of_four(ranked), math.inf)


def is_two_of_four(weight: Tensor) -> bool:
    """Whether at least two of each four consecutive inputs are zero.

    >>> is_two_of_four(torch.tensor([[1.0, 0.0, 0.0, 2.0]])), is_two_of_four(torch.ones(1, 4))
    (True, False)
    """
    if weight.ndim < 2 or weight.shape[1] % 4:
        return False
    return bool(((weight.detach() == 0).movedim(1, -1).reshape(-1, 4).sum(1) >= 2).all())
