"""The learning-rate range test: a short trial in which the rate grows with each step, and all of which is undone.

What it does: it trains for some steps while the learning rate grows exponentially, records the loss, and puts
everything back. When it helps: to find the order of magnitude of a learning rate in the time of a hundred steps. What
it costs: those steps, and one copy of the weights and of the optimizer's state while it runs.

Parameter groups keep their ratios: the rate that is reported is that of the group with the highest one. Where ranks are
joined the loss is the mean over them, so that all stop at the same step and suggest the same rate.

Sources: Smith (arXiv 1506.01186, section 3.3). The range of 1e-7 to 10, the 100 steps, and the stop at four times the
best loss are fastai's defaults. The stop here is measured from the best loss, smoothed, in units of its size or of the
fall from the mean of the first tenth of the steps, whichever is more, since losses may be negative; it is not looked
for in that tenth. Lightning 2.6.6 stops at once on a loss below 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from lightning_speedkit.measure.kept_state import keeping
from lightning_speedkit.optimize.lr_range_curve import LRRange
from lightning_speedkit.optimize.lr_range_rates import LearningRates
from lightning_speedkit.optimize.optimizer_options import checked_number

__all__ = ["again_and_again", "check_range", "lr_range_test", "sweep"]


def lr_range_test(
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss_of: Callable[[Any], Tensor],
    batches: Iterable[Any],
    lowest: float = 1e-7,
    highest: float = 10.0,
    steps: int = 100,
    divergence: float = 4.0,
) -> LRRange:
    """Train for some steps with a growing learning rate, and put everything back.

    Args:
        module: What is trained; its parameters, buffers and attributes are restored.
        optimizer: Of its parameters; its state and parameter groups are restored.
        loss_of: The loss of a batch, a scalar to go backward from.
        batches: Can be iterated again: it starts over when there are fewer than ``steps``.
        lowest: The rate of the first step, of the parameter group with the highest rate.
        highest: The rate of the last step.
        steps: At least 5.
        divergence: Stop when the loss, smoothed, is this many times its best value; see the module's text.

    Raises:
        ValueError: an argument is outside its range, or there are no batches.

    Example:

        >>> model, x = torch.nn.Linear(2, 1), torch.eye(2)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> curve = lr_range_test(model, optimizer, lambda batch: (model(batch) - 5).square().mean(), [x], steps=60)
        >>> 0.01 < curve.suggestion < 1, curve.diverged, optimizer.param_groups[0]["lr"]
        (True, True, 0.1)
    """
    check_range(lowest, highest, steps, divergence)
    with keeping() as keep, torch.enable_grad():
        keep.random_states()
        keep.module(module)
        keep.attributes(optimizer)
        keep.loader(batches)
        stream = again_and_again(batches)

        def step() -> Tensor:
            optimizer.zero_grad()
            batch = next(stream)

            def closure() -> float:
                loss = loss_of(batch)
                loss.backward()  # type: ignore[no-untyped-call]
                losses.append(loss.detach())
                return loss.item()

            losses: list[Tensor] = []
            optimizer.step(closure)
            return losses[0]

        return sweep(step, optimizer, lowest, highest, steps, divergence)


def check_range(lowest: float, highest: float, steps: int, divergence: float) -> None:
    checked_number("lowest", lowest, 0, above=True)
    checked_number("highest", highest, 0, above=True)
    checked_number("divergence", divergence, 1, above=True)
    if not lowest < highest:
        raise ValueError(f"lowest={lowest!r} and highest={highest!r} have to be two rates, the first one smaller.")
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 5:
        raise ValueError(f"steps={steps!r} is not allowed; it is a whole number, at least 5, and often 100.")


def again_and_again(batches: Iterable[Any]) -> Iterator[Any]:
    while True:
        found = False
        for batch in batches:
            found = True
            yield batch
        if not found:
            raise ValueError("There are no training batches, so learning rates cannot be tried.")


def sweep(
    step: Callable[[], Tensor | None],
    optimizer: torch.optim.Optimizer,
    lowest: float,
    highest: float,
    steps: int,
    divergence: float,
) -> LRRange:
    """Call ``step`` at each rate until the loss diverges. It returns the loss before its update, or ``None``."""
    learning_rates = LearningRates(optimizer)
    rates: list[float] = []
    losses: list[float] = []
    settled = max(5, steps // 10)  # until then, one batch that is unlike the others would look like divergence
    level, start, best, diverged = 0.0, 0.0, 0.0, False
    for number in range(steps):
        rate = lowest * (highest / lowest) ** (number / (steps - 1))
        learning_rates.set(rate)
        loss = _mean_over_ranks(step())
        if loss is None:
            continue
        if not math.isfinite(loss):
            diverged = True
            break
        rates.append(rate)
        losses.append(loss)
        level = 0.9 * level + 0.1 * loss
        smooth = level / (1.0 - 0.9 ** len(losses))
        if len(losses) <= settled:
            start = best = math.fsum(losses) / len(losses)
            continue
        best = min(best, smooth)
        diverged = smooth > best + (divergence - 1.0) * max(abs(best), start - best)
        if diverged:
            break
    return LRRange(tuple(rates), tuple(losses), diverged, learning_rates.ratios)


def _mean_over_ranks(loss: Tensor | None) -> float | None:
    """The mean of the ranks that have one. It is read here: the next step depends on it."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return None if loss is None else float(loss)
    if loss is None:
        device = "cuda" if torch.distributed.get_backend() == "nccl" else "cpu"
        pair = torch.zeros(2, device=device)
    else:
        pair = torch.stack([loss.detach().float(), torch.ones_like(loss, dtype=torch.float32)])
    torch.distributed.all_reduce(pair)
    total, ranks = pair.tolist()
    return total / ranks if ranks else None
