"""Keeps what training changes, to go back to it: weights, buffers and the state of the optimizer.

What it does: :class:`Snapshot` copies them into host memory or a file, and back in place, so that every reference to a
parameter stays good. :class:`RunningStatistics` keeps only what a forward pass changes, the running statistics of
normalisation layers, on their device. When it helps: to undo steps that did harm. What it costs: host memory, or disk,
for the weights and the optimizer's state (three times the weights with Adam), and the time to copy them; from CUDA
the copy goes to pinned memory and the host does not wait for it.

Learning rates and other settings in the optimizer's groups are no part of it: schedules go on. What some optimizers
count there (schedule-free ones, Prodigy) is.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["RunningStatistics", "Snapshot"]

# What optimizers change in their groups by themselves: ScheduleFreeAdamW; the schedulefree package; Prodigy
_COUNTS = ("steps", "sum_of_squares", "k", "weight_sum", "lr_max", "d", "d_max", "d_numerator")


class Snapshot:
    """The weights, buffers and optimizer state of one moment.

    Of a sharded parameter (DTensor) the part of this rank is kept, so each rank takes one of its own.

    >>> weight = nn.Linear(1, 1)
    >>> optimizer = torch.optim.SGD(weight.parameters(), lr=0.1, momentum=0.9)
    >>> snapshot = Snapshot.take(weight, optimizer)
    >>> before = weight.weight.item()
    >>> weight(torch.ones(1)).sum().backward()
    >>> optimizer.step()
    >>> snapshot.restore(weight, optimizer)
    >>> weight.weight.item() == before, len(optimizer.state)
    (True, 0)
    """

    def __init__(
        self, tensors: dict[str, Tensor], states: dict[str, dict[str, Any]], counts: list[dict[str, Any]]
    ) -> None:
        self.tensors = tensors  # by name
        self.states = states  # of each parameter for which the optimizer had one, by name
        self.counts = counts  # of each group of the optimizer

    @classmethod
    @torch.no_grad()
    def take(cls, module: nn.Module, optimizer: torch.optim.Optimizer, into: Snapshot | None = None) -> Snapshot:
        """A new one, or ``into`` an old one, whose memory is used again."""
        old = {} if into is None else into.tensors
        tensors = {name: _to_host(tensor, old.get(name)) for name, tensor in _tensors(module)}
        old_states = {} if into is None else into.states
        states = {
            name: _state_to_host(optimizer.state[parameter], old_states.get(name, {}))
            for name, parameter in _parameters(module, optimizer)
            if parameter in optimizer.state
        }
        counts = [_counts(group) for group in optimizer.param_groups]
        return cls(tensors, states, counts)

    @torch.no_grad()
    def restore(self, module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Bring the module and the optimizer back to it, in place.

        Parameters that the optimizer was given since then are as it was given them: without a state.

        Raises:
            ValueError: The module's parameters or buffers have other names or shapes. Nothing was changed.
        """
        self._check(module)
        for name, tensor in _tensors(module):
            _local(tensor).copy_(self.tensors[name], non_blocking=True)
        for place, group in enumerate(optimizer.param_groups):
            kept_counts = self.counts[place] if place < len(self.counts) else _counts(optimizer.defaults)
            group.update(copy.deepcopy(kept_counts))
        for name, parameter in _parameters(module, optimizer):
            kept = self.states.get(name)
            if kept is None:
                optimizer.state.pop(parameter, None)
                continue
            state = optimizer.state[parameter]
            for key in set(state) - set(kept):
                del state[key]
            for key, value in kept.items():
                if isinstance(value, Tensor) and isinstance(state.get(key), Tensor):
                    _local(state[key]).copy_(value, non_blocking=True)
                elif not isinstance(value, Tensor):
                    state[key] = copy.deepcopy(value)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it; what was at the path is replaced when it is complete."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # the copy to the host may not have ended
        part = Path(f"{os.fspath(path)}.part")
        torch.save({"tensors": self.tensors, "states": self.states, "counts": self.counts}, part)
        part.replace(path)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Snapshot:
        """Read what :meth:`save` wrote."""
        content = torch.load(path, map_location="cpu", weights_only=True)
        return cls(content["tensors"], content["states"], content["counts"])

    def _check(self, module: nn.Module) -> None:
        found = {name: _local(tensor).shape for name, tensor in _tensors(module)}
        kept = {name: tensor.shape for name, tensor in self.tensors.items()}
        if found != kept:
            kinds = {
                "new": found.keys() - kept.keys(),
                "gone": kept.keys() - found.keys(),
                "of another shape": {name for name in found.keys() & kept.keys() if found[name] != kept[name]},
            }
            what = "; ".join(f"{kind}: {', '.join(sorted(names))}" for kind, names in kinds.items() if names)
            raise ValueError(
                f"The module cannot go back to the snapshot, since its parameters or buffers are others ({what}). Add, "
                "prune or resize layers before training starts, or take a new snapshot after it."
            )


class RunningStatistics:
    """The buffers of layers with running statistics (BatchNorm, InstanceNorm), which a forward pass changes.

    A batch that is not finite spoils them though its step is skipped. Without such layers it does nothing.

    >>> norm = nn.BatchNorm1d(1)
    >>> statistics = RunningStatistics(norm)
    >>> statistics.keep()
    >>> _ = norm(torch.full((2, 1), float("nan")))
    >>> norm.running_mean
    tensor([nan])
    >>> statistics.restore()
    >>> norm.running_mean
    tensor([0.])
    """

    def __init__(self, module: nn.Module) -> None:
        layers = (m for m in module.modules() if getattr(m, "running_mean", None) is not None)
        self._buffers = [buffer for layer in layers for buffer in layer.buffers(recurse=False)]
        self._kept: list[Tensor] = []

    @torch.no_grad()
    def keep(self) -> None:
        """Remember them as they are."""
        if not self._kept:
            self._kept = [buffer.clone() for buffer in self._buffers]
        elif self._buffers:
            torch._foreach_copy_(self._kept, self._buffers)

    def hand_over(self) -> list[Tensor]:
        """What was last kept, to restore it after more has been kept."""
        kept, self._kept = self._kept, []
        return kept

    @torch.no_grad()
    def restore(self, kept: list[Tensor] | None = None) -> None:
        """Bring them back to what was last kept, or to what was handed over, which is then what was last kept."""
        if kept is not None:
            self._kept = kept
        if self._kept:
            torch._foreach_copy_(self._buffers, self._kept)

    @contextmanager
    def as_kept(self) -> Iterator[None]:
        """Inside the ``with``, they are what was last kept, if anything was."""
        now = [buffer.clone() for buffer in self._buffers] if self._kept else []
        self.restore()
        try:
            yield
        finally:
            if now:
                with torch.no_grad():
                    torch._foreach_copy_(self._buffers, now)


def _tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()


def _parameters(module: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, Tensor]]:
    """Those of the optimizer, by their names in the module; a place in the optimizer names one of no module."""
    names = {parameter: name for name, parameter in module.named_parameters()}
    parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
    return ((names.get(parameter, f"parameter {place}"), parameter) for place, parameter in enumerate(parameters))


def _counts(group: dict[str, Any]) -> dict[str, Any]:
    return {key: copy.deepcopy(group[key]) for key in _COUNTS if key in group}


def _local(tensor: Tensor) -> Tensor:
    local: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local


def _to_host(tensor: Tensor, into: Tensor | None) -> Tensor:
    local = _local(tensor.detach())
    if into is None or into.shape != local.shape or into.dtype != local.dtype:
        into = torch.empty_like(local, device="cpu", pin_memory=local.device.type == "cuda")
    return into.copy_(local, non_blocking=True)


def _state_to_host(state: dict[str, Any], old: dict[str, Any]) -> dict[str, Any]:
    kept = {}
    for key, value in state.items():
        if isinstance(value, Tensor):
            before = old.get(key)
            kept[key] = _to_host(value, before if isinstance(before, Tensor) else None)
        else:
            kept[key] = copy.deepcopy(value)
    return kept
