"""Schedule-free AdamW: no learning-rate schedule and no length of training to settle beforehand.

What it does: gradients are taken at a point between the optimizer's sequence and its running average, and the average
is what is validated, saved and kept. It takes the place of a decaying schedule. When it helps: the length of the run is
not known, or is to be changed while it runs. What it costs: two states per weight, as AdamW has; one more copy of the
weights during validation, and in a checkpoint.

Source: Defazio et al., The Road Less Scheduled, arXiv 2405.15682. With x the average, z the sequence and y where the
gradient is taken, step t with rate r, after c = r^2 / (sum of r^2 so far) and u = g / (sqrt(v) + eps) + decay * y::

    z' = z - r u        x' = (1 - c) x + c z'        y' = (1 - b1) z' + b1 x'

Written here and not taken from the package ``schedulefree``, so that a validation leaves the run bit for bit as it was:
there the training weights are computed back from the average, with a rounding each time, here they are kept.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_speedkit.optimize.optimizer_options import checked_number

__all__ = ["ScheduleFreeAdamW"]


class ScheduleFreeAdamW(Optimizer):
    """AdamW with a running average in place of a schedule.

    The parameters hold the point where gradients are taken. :meth:`eval` puts the average there, :meth:`train` takes
    it out again; in a Trainer, ``ScheduleFreeSwitch`` calls them. ``state_dict()`` holds the training weights too, and
    ``load_state_dict()`` puts them into the parameters, so that a checkpoint may hold the averaged weights.

    Args:
        params: Parameters, or groups.
        lr: Best 1 to 10 times AdamW's, says the paper. It is not to be scheduled.
        betas: The first is how near to the average gradients are taken; 0.95 to 0.98 for long runs.
        eps: Added to the root of the second moment.
        weight_decay: Decoupled, at the point where the gradient is taken.
        warmup_steps: The rate rises over so many optimizer steps. The paper warms up always.

    Raises:
        ValueError: A number is out of range.
        RuntimeError: :meth:`step` between :meth:`eval` and :meth:`train`.

    >>> weight = torch.nn.Parameter(torch.tensor([1.0]))
    >>> optimizer = ScheduleFreeAdamW([weight], lr=0.1)
    >>> for _ in range(3):  # the gradient of AdamW is 1 in each step
    ...     weight.grad = torch.ones(1)
    ...     optimizer.step()
    >>> optimizer.eval()
    >>> round(weight.item(), 4)  # the mean of 0.9, 0.8 and 0.7
    0.8
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 2.5e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        warmup_steps: int = 0,
    ) -> None:
        checked_number("lr", lr, 0)
        checked_number("eps", eps, 0)
        checked_number("weight_decay", weight_decay, 0)
        checked_number("warmup_steps", warmup_steps, 0)
        if not (0 < betas[0] < 1 and 0 <= betas[1] < 1):
            raise ValueError(f"betas={betas!r}: the first must lie between 0 and 1, the second be 0 or more, below 1.")
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "warmup_steps": warmup_steps,
            "steps": 0,
            "sum_of_squares": 0.0,
        }
        self._averaged = False  # the average is in place, and the training weights are "y" of the state
        super().__init__(params, defaults)

    @property
    def is_training(self) -> bool:
        """Whether the parameters hold the training weights."""
        return not self._averaged

    @torch.no_grad()
    def eval(self) -> None:
        """Put the average into the parameters, and keep the training weights."""
        if not self._averaged:
            for p, average in self.averages().items():
                self.state[p]["y"] = p.detach().clone()  # in the state, so that whoever moves that moves it too
                p.copy_(average)
            self._averaged = True

    @torch.no_grad()
    def train(self) -> None:
        """Put the training weights back, bit for bit."""
        if self._averaged:
            for p, state in self.state.items():
                if "y" in state:
                    p.copy_(state.pop("y"))
            self._averaged = False

    @torch.no_grad()
    def averages(self) -> dict[Tensor, Tensor]:
        """The average of each parameter that has been stepped with, in new tensors."""
        found = {}
        for group in self.param_groups:
            weight = 1 - 1 / group["betas"][0]
            for p in group["params"]:
                if p in self.state:
                    y = self.state[p].get("y", p)
                    found[p] = y.detach().lerp(self.state[p]["z"], weight)
        return found

    @override
    def state_dict(self) -> dict[str, Any]:
        saved = super().state_dict()
        for number, p in enumerate(p for group in self.param_groups for p in group["params"]):
            if p in self.state:
                saved["state"][number] = {"y": p.detach(), **saved["state"][number]}
        return saved

    @override
    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_averaged": self._averaged}

    @override
    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._averaged = False
        for group in self.param_groups:
            for p in group["params"]:
                if p in self.state:
                    p.copy_(self.state[p].pop("y"))

    @override
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        if self._averaged:
            raise RuntimeError(
                "ScheduleFreeAdamW was asked for a step while the averaged weights are in place. Call its train() "
                "before the forward pass; in a Trainer, add the callback ScheduleFreeSwitch."
            )
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            alike: dict[tuple[torch.device, torch.dtype], list[Tensor]] = defaultdict(list)
            for p in group["params"]:
                if p.grad is not None:
                    alike[p.device, p.dtype].append(p)
            if alike:
                group["steps"] += 1
                rate = float(group["lr"]) * min(1.0, group["steps"] / max(group["warmup_steps"], 1))
                group["sum_of_squares"] += rate * rate
                share = rate * rate / group["sum_of_squares"] if rate else 0.0
                for parameters in alike.values():
                    self._step_alike(parameters, group, rate, share)
        return loss

    def _step_alike(self, parameters: list[Tensor], group: dict[str, Any], rate: float, share: float) -> None:
        """One step of parameters of one device and type; ``share`` is that of the new point in the average."""
        beta1, beta2 = group["betas"]
        gradients = [p.grad for p in parameters if p.grad is not None]
        for p in parameters:
            if p not in self.state:
                self.state[p]["z"] = p.detach().clone(memory_format=torch.preserve_format)
                self.state[p]["exp_avg_sq"] = torch.zeros_like(p, memory_format=torch.preserve_format)
        z = [self.state[p]["z"] for p in parameters]
        v = [self.state[p]["exp_avg_sq"] for p in parameters]
        torch._foreach_mul_(v, beta2)
        torch._foreach_addcmul_(v, gradients, gradients, value=1 - beta2)
        denominator = torch._foreach_div(v, 1 - beta2 ** group["steps"])
        torch._foreach_sqrt_(denominator)
        torch._foreach_add_(denominator, group["eps"])
        update = torch._foreach_div(gradients, denominator)
        if group["weight_decay"]:
            torch._foreach_add_(update, parameters, alpha=group["weight_decay"])
        # y' of the formulas above, with x eliminated
        torch._foreach_lerp_(parameters, z, share)
        torch._foreach_add_(parameters, update, alpha=-rate * (1 - beta1 * (1 - share)))
        torch._foreach_add_(z, update, alpha=-rate)
