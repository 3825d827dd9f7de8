"""Pruning along a schedule while a model trains: what happens before and after a step, and when masks change.

Everything is asked of the optimizers themselves, so it is right for several of them, for steps that the module takes
by itself, for accumulated gradients, and for steps that a gradient scaler or a guard leaves out: these move no score.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn

from lightning_speedkit.compress.module_names import plain_name
from lightning_speedkit.compress.prune_masks import PruningMasks
from lightning_speedkit.compress.prune_scores import sparsity_at

__all__ = ["FitPruning"]


class FitPruning:
    """The pruning of one run.

    Args:
        masks: Over the weights to prune, with nothing pruned yet.
        target: The sparsity in the end.
        movement: Whether weights go by their movement, and not by their magnitude.
        start: Optimizer steps before the first weights go.
        end: Optimizer steps until the target is reached.
        every: Steps between changes of the masks.
        regrow: The share of the weights left that changes places at ``start``.
    """

    def __init__(
        self,
        masks: PruningMasks,
        *,
        target: float,
        movement: bool = False,
        start: int,
        end: int,
        every: int,
        regrow: float = 0.0,
    ) -> None:
        self.masks, self.target, self.regrow = masks, target, regrow
        self.frozen: dict[str, nn.Parameter] = {}  # weights that the masks leave out because they are not trained
        self.start, self.end, self.every = start, max(end, 1) if movement else end, every
        self.is_done = False  # the target is reached
        self.is_told = False  # that it will not be
        self._initial, self._last = 0.0, 0
        self._movement = self._zeros() if movement else None
        self._pending: dict[str, Tensor] = {}  # of the step in progress
        self._gradients: dict[str, Tensor] = {}  # of the step after which weights come back
        self._handles: WeakKeyDictionary[torch.optim.Optimizer, Any] = WeakKeyDictionary()

    def begin(self, loaded: Mapping[str, Any]) -> None:
        """Take up what a checkpoint had, if there is something, and else what is zero already.

        Raises:
            ValueError: That is more than the target, or of other weights.
        """
        masks = self.masks
        if loaded:
            masks.unpack(loaded["masks"])
        else:
            masks.take_zeros()
        masks.refuse_below(self.target)
        if loaded and loaded["target"] == self.target:
            self._initial, self._last, self.is_done = loaded["initial"], loaded["last"], loaded["is_done"]
        else:
            self._initial = masks.sparsity()
        if loaded and self._movement is not None:
            for name, kept in loaded["movement"].items():
                self._movement[name].copy_(kept)

    def follow(self, optimizer: torch.optim.Optimizer) -> None:
        """Apply the masks after each step of this optimizer."""
        if optimizer not in self._handles:
            self._handles[optimizer] = optimizer.register_step_post_hook(self._after_step)

    @torch.no_grad()
    def before_step(self, optimizer: torch.optim.Optimizer, soonest: int) -> None:
        """Look at the gradients of a step, and take those of pruned weights away; ``soonest`` is its number."""
        self.follow(optimizer)
        self._check_shapes(self.masks.weights)
        wants_gradients = self.regrow > 0 and self.is_due(soonest)
        if wants_gradients or self._movement is not None:
            own = {parameter for group in optimizer.param_groups for parameter in group["params"]}
            found = {
                name: (weight.detach(), weight.grad)
                for name, weight in self.masks.weights.items()
                if weight in own and weight.grad is not None
            }
            if wants_gradients:
                self._gradients.update({name: gradient.clone() for name, (_, gradient) in found.items()})
            if self._movement is not None:
                self._pending = {name: _towards_zero(weight, gradient) for name, (weight, gradient) in found.items()}
        self.masks.apply_to_gradients()

    def is_due(self, step: int) -> bool:
        """Whether the masks change after this step."""
        if self.is_done:
            return False
        return step >= self.end or (step > self.start and (step - self.start) // self.every > self._last)

    def prune_if_due(self, step: int, optimizers: Iterable[torch.optim.Optimizer]) -> bool:
        """Change the masks if it is time; whether it was."""
        if not self.is_due(step):
            return False
        self.is_done = step >= self.end
        self._last = max(step - self.start, 0) // self.every
        self.masks.prune_to(sparsity_at(step, self.start, self.end, self._initial, self.target), self._movement)
        if self.regrow and not self.is_done and self._gradients:
            self._regrow(step)
        self._gradients = {}
        self.masks.apply()
        for optimizer in optimizers:
            self.masks.apply_to_state(optimizer)
        return True

    def find_weights(self, module: nn.Module) -> None:
        """Go on with the module's parameters, if somebody has replaced them by others.

        Raises:
            MisconfigurationException: One is gone, or has another shape.
        """
        parameters = {plain_name(name): parameter for name, parameter in module.named_parameters()}
        self._check_shapes(parameters)
        self.masks.weights.update({name: parameters[name] for name in self.masks.weights})
        if late := [name for name, weight in self.frozen.items() if weight.requires_grad]:
            self.frozen = {}
            rank_zero_warn(
                f"Pruning leaves {len(late)} weights as they are that were frozen when the fit started and are trained "
                f"now ({', '.join(late[:3])}): its target holds for the others. Let them be pruned in a second fit, of "
                "the unfrozen model."
            )

    def masked_state(self, module: nn.Module, state: Mapping[str, Any]) -> dict[str, Any]:
        """A ``state_dict`` of the module with zeros where weights are pruned, under all names of shared ones."""
        pruned = {id(weight): self.masks.pruned[name] for name, weight in self.masks.weights.items()}
        masked = dict(state)
        for name, parameter in module.named_parameters(remove_duplicate=False):
            if id(parameter) in pruned and name in masked:
                value = masked[name]
                masked[name] = value.detach().masked_fill(pruned[id(parameter)].to(value.device), 0.0)
        return masked

    def state_dict(self) -> dict[str, Any]:
        """Tensors and plain values: a bit for each weight, and the scores of movement."""
        return {
            "masks": self.masks.packed(),
            "movement": {name: score.detach().clone() for name, score in (self._movement or {}).items()},
            "target": self.target,
            "initial": self._initial,
            "start": self.start,
            "end": self.end,
            "last": self._last,
            "is_done": self.is_done,
        }

    def finish(self) -> None:
        """Leave the optimizers, and bring what is kept to where the weights are now."""
        for handle in self._handles.values():
            handle.remove()
        self._handles.clear()
        self._pending, self._gradients = {}, {}
        self.masks.to_weights()
        if self._movement is not None:
            self._movement = {n: score.to(self.masks.weights[n].device) for n, score in self._movement.items()}

    @torch.no_grad()
    def _after_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        pending, self._pending = self._pending, {}
        # where a fused optimizer takes the loss scale off by itself, the scaler leaves these two on it for the step
        scale, found_inf = getattr(optimizer, "grad_scale", None), getattr(optimizer, "found_inf", None)
        for name, product in pending.items():
            if self._movement is None or self.masks.weights[name].grad is None:  # a guard has dropped it
                continue
            moved = product if scale is None else product / scale.to(product.device)
            if found_inf is not None:
                moved = torch.where(found_inf.to(product.device) == 0, moved, torch.zeros_like(moved))
            self._movement[name].add_(moved)
        self.masks.apply()

    def _check_shapes(self, parameters: Mapping[str, Tensor]) -> None:
        for name, pruned in self.masks.pruned.items():
            found = parameters.get(name)
            if found is None or found.shape != pruned.shape:
                now = "is gone" if found is None else f"has the shape {tuple(found.shape)} now"
                raise MisconfigurationException(
                    f"Pruning has a mask of shape {tuple(pruned.shape)} for {name!r}, which {now}. What changes layers "
                    "while a model trains, and Pruning, belong in two runs, one after the other."
                )

    def _regrow(self, step: int) -> None:
        share = self.regrow * (1 + math.cos(math.pi * (step - self.start) / (self.end - self.start))) / 2
        before = dict(self.masks.pruned)
        self.masks.regrow(share, self._gradients, self._movement)
        for name, score in (self._movement or {}).items():
            score.masked_fill_(before[name] & ~self.masks.pruned[name], 0.0)

    def _zeros(self) -> dict[str, Tensor]:
        return {name: torch.zeros_like(w.detach(), dtype=torch.float32) for name, w in self.masks.weights.items()}


def _towards_zero(weight: Tensor, gradient: Tensor) -> Tensor:
    """How far a small step along the gradient moves each weight away from zero; negative if towards it."""
    dense = gradient if gradient.layout is torch.strided else gradient.to_dense()
    return -(weight.float() * dense.float())
