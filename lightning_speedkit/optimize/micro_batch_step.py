"""An optimizer step that runs again after it found no memory, and never half twice.

An optimizer finds no memory in its first step, where it makes its state, or where it needs room for intermediate
results. Before the second try the allocator's unused blocks are given back, and a step that has the option goes
parameter by parameter (``foreach=False``), which needs less room and computes the same; a fused one stays as it is.

A step that fails after it changed something can only run again if it is undone. Small models are copied before each
step and put back. For large ones a copy would need the memory that is missing, so there the error says what happened.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial, wraps
from types import MethodType
from typing import Any

import torch
from torch import Tensor

from lightning_speedkit.measure.out_of_memory import out_of_memory_source, release_memory

__all__ = ["OptimizerState", "RepeatableSteps", "step_with_retry"]


class OptimizerState:
    """An optimizer's weights and state as they are, to see whether a step changed them, and to undo it.

    Args:
        optimizer: The optimizer.
        copy_bytes: Copy weights and state if they are not larger than this.

    Example:

        >>> weight = torch.nn.Parameter(torch.ones(1))
        >>> weight.grad = torch.ones(1)
        >>> optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
        >>> before = OptimizerState(optimizer, copy_bytes=100)
        >>> optimizer.step()
        >>> before.is_unchanged(), before.restore(), weight.item(), len(optimizer.state)
        (False, True, 1.0, 0)
    """

    def __init__(self, optimizer: torch.optim.Optimizer, copy_bytes: float = 0) -> None:
        self._optimizer = optimizer
        apart = ("params", "foreach")  # a step parameter by parameter has foreach=False for its own time only
        self._groups = [{k: v for k, v in group.items() if k not in apart} for group in optimizer.param_groups]
        self._state = {parameter: dict(state) for parameter, state in optimizer.state.items()}
        self._versions = [(tensor, tensor._version) for tensor in self._tensors()]
        size = sum(tensor.nbytes for tensor, _ in self._versions)
        self._copies = [tensor.detach().clone() for tensor, _ in self._versions] if size <= copy_bytes else None

    def is_unchanged(self) -> bool:
        """Whether all is as it was, apart from state that is new and says that no step was taken."""
        if any(self._has_stepped(state) for p, state in self._optimizer.state.items() if p not in self._state):
            return False  # a fused step leaves no other trace on the weights
        same_groups = all(
            all(group.get(name) is value for name, value in before.items())
            for group, before in zip(self._optimizer.param_groups, self._groups, strict=True)
        )
        same_state = all(
            self._optimizer.state[parameter].get(name) is value
            for parameter, state in self._state.items()
            for name, value in state.items()
        )
        return same_groups and same_state and all(tensor._version == before for tensor, before in self._versions)

    def restore(self) -> bool:
        """Make all as it was, and drop new state; ``False`` if something changed and there is no copy of it."""
        if self._copies is None:
            if not self.is_unchanged():
                return False
        else:
            with torch.no_grad():
                for (tensor, _), copy in zip(self._versions, self._copies, strict=True):
                    tensor.copy_(copy)
            for group, before in zip(self._optimizer.param_groups, self._groups, strict=True):
                group.update(before)
        self._optimizer.state.clear()
        self._optimizer.state.update({parameter: dict(state) for parameter, state in self._state.items()})
        return True

    @staticmethod
    def _has_stepped(state: Any) -> bool:
        return isinstance(state, dict) and bool(state.get("step", 0) > 0)

    def _tensors(self) -> Iterator[Tensor]:
        for group in self._optimizer.param_groups:
            yield from group["params"]
        for state in self._state.values():
            yield from (value for value in state.values() if isinstance(value, Tensor))


@contextmanager
def _one_by_one(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    changed = [group for group in optimizer.param_groups if "foreach" in group and not group.get("fused")]
    found = [group["foreach"] for group in changed]
    for group in changed:
        group["foreach"] = False
    try:
        yield
    finally:
        for group, value in zip(changed, found, strict=True):
            group["foreach"] = value


def step_with_retry(
    optimizer: torch.optim.Optimizer,
    step: Callable[..., Any],
    closure: Callable[[], Any] | None = None,
    *,
    device: torch.device,
    copy_bytes: float = 0,
    one_by_one: Callable[[], bool] = lambda: False,
) -> tuple[Any, bool]:
    """Call an optimizer's ``step``, and once more if it finds no memory.

    The closure runs once; a step that ran it several times (LBFGS) is not repeated.

    Args:
        optimizer: The optimizer.
        step: Its bound ``step``.
        closure: What computes the gradients, or ``None``.
        device: Where memory is to be freed.
        copy_bytes: Copy weights and state before the step if they are not larger than this.
        one_by_one: Whether to go parameter by parameter at the first try; asked after the closure.

    Returns:
        What the step returned, and whether it needed the second try.

    Raises:
        torch.OutOfMemoryError: The second try failed too, or the first one had changed something of which there is
            no copy.
    """
    calls: list[Any] = []
    before = None if closure is not None else OptimizerState(optimizer, copy_bytes)

    def once(undo: ExitStack) -> Any:
        nonlocal before
        assert closure is not None
        calls.append(None)
        calls[-1] = (closure(),)
        before = OptimizerState(optimizer, copy_bytes)
        if one_by_one() and len(calls) == 1:
            undo.enter_context(_one_by_one(optimizer))  # optimizers look at their options after the closure
        return calls[-1][0]

    def run(again: bool = False) -> Any:
        with ExitStack() as undo:
            if again or (closure is None and one_by_one()):
                undo.enter_context(_one_by_one(optimizer))
            if closure is None:
                return step()
            return step(closure=(lambda: calls[0][0]) if calls else partial(once, undo))

    try:
        return run(), False
    except (RuntimeError, MemoryError, OSError) as error:
        failed_inside = len(calls) > 1 or (calls and calls[0] is None)  # in the closure, or it ran several times
        if failed_inside or out_of_memory_source(error) in (None, "NCCL"):
            raise
        if before is not None and not before.restore():
            raise torch.OutOfMemoryError(
                f"{type(optimizer).__name__}.step() ran out of memory after it had changed some weights, so it cannot "
                f"be repeated: {error} Go on from the last checkpoint, with a fused optimizer or foreach=False, which "
                "need less memory in the step."
            ) from error
        reason = str(error)
    release_memory(device)
    try:
        return run(again=True), True
    except (RuntimeError, MemoryError, OSError) as error:
        if out_of_memory_source(error) is None:
            raise
        raise torch.OutOfMemoryError(
            f"{type(optimizer).__name__}.step() ran out of memory twice, parameter by parameter too: {reason} Smaller "
            "batches do not help here: use an optimizer with a smaller state, or shard it over devices."
        ) from error


class RepeatableSteps:
    """Gives optimizers a ``step`` that is repeated if it finds no memory.

    Args:
        copy_bytes: Copy weights and state before each step if they are not larger than this.

    Attributes:
        one_by_one: Whether steps go parameter by parameter at the first try, as they do after the first repeated one.
        agreed: Whether all ranks know of it.

    Example:

        >>> steps, weight = RepeatableSteps(copy_bytes=0), torch.nn.Parameter(torch.ones(1))
        >>> weight.grad = torch.ones(1)
        >>> steps.step_of(torch.optim.SGD([weight], lr=0.5), torch.device("cpu"))()
        >>> weight.item(), steps.one_by_one
        (0.5, False)
    """

    def __init__(self, copy_bytes: float) -> None:
        self.one_by_one = self.agreed = False
        self._copy_bytes = copy_bytes

    def step_of(self, optimizer: torch.optim.Optimizer, device: torch.device) -> MethodType:
        """What to put in the place of ``optimizer.step``; has the mark that a learning-rate schedule leaves there."""
        original = optimizer.step

        def step(of: torch.optim.Optimizer, closure: Any, options: dict[str, Any]) -> Any:
            result, repeated = step_with_retry(
                of,
                partial(original, **options),
                closure,
                device=device,
                copy_bytes=self._copy_bytes,
                one_by_one=lambda: self.one_by_one,
            )
            self.one_by_one |= repeated
            return result

        like_it = wraps(original)(lambda of, closure=None, **options: step(of, closure, options))
        return MethodType(like_it, optimizer)
