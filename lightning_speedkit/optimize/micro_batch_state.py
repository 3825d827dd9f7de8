"""What a step changes beside gradients and weights, so that a failed one leaves no trace: random numbers, buffers and
metrics.

What it costs: copies of the random states, of the metrics, and of buffers: of those up to 1 MiB all, since some kernels
(BatchNorm's) write to them without a trace; of larger ones those that a step is known to change. On the first step of
each kind (training, evaluation), before that is known, the larger ones are copied to the host once. One that a later
step changes for the first time is not put back if just that step fails.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torchmetrics import Metric

__all__ = ["SavedState", "StateKeeper"]

_SMALL = 2**20  # bytes


@dataclass(frozen=True, slots=True)
class SavedState:
    """A state as it was; made by :meth:`StateKeeper.save`."""

    random: tuple[Any, ...]
    buffers: tuple[tuple[nn.Module, str, Tensor | None, Tensor | None], ...]  # owner, name, the tensor, a copy of it
    metrics: tuple[tuple[Metric, dict[str, Any]], ...]


class StateKeeper:
    """Saves and restores the state of a module and of the generators of random numbers.

    The generators are those of Python, NumPy and torch, on the CPU and on the device.

    Args:
        module: The module; its structure is read once.
        device: The device that it runs on.

    Example:

        >>> norm = nn.BatchNorm1d(1)
        >>> keeper = StateKeeper(norm, torch.device("cpu"))
        >>> before = keeper.save()
        >>> first, _ = torch.rand(2), norm(torch.ones(4, 1))
        >>> keeper.restore(before)
        >>> torch.equal(torch.rand(2), first), norm.num_batches_tracked.item()
        (True, 0)
    """

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        self._device = device
        self._slots = [(owner, name) for owner in module.modules() for name, _ in owner._buffers.items()]
        self._metrics = [owner for owner in module.modules() if isinstance(owner, Metric)]
        self._seen: list[tuple[Tensor | None, int]] | None = None  # at the last save
        self._kinds: set[str] = set()  # of the steps that there were saves before
        self._changing: set[int] = set()  # slots

    def save(self, kind: str = "") -> SavedState:
        """The state as it is now, before a step of this kind; the first one of a kind copies every buffer."""
        copied = self._copied_buffers(everything=kind not in self._kinds)
        self._kinds.add(kind)
        return SavedState(self._random_states(), copied, tuple(map(_copied_metric, self._metrics)))

    def restore(self, saved: SavedState) -> None:
        """Make the state what it was."""
        of_python, of_numpy, of_torch, on_device = saved.random
        random.setstate(of_python)
        numpy.random.set_state(of_numpy)
        torch.set_rng_state(of_torch)
        if on_device is not None:
            self._of_device("set_rng_state", on_device)
        with torch.no_grad():
            for owner, name, tensor, copy in saved.buffers:
                if tensor is not None and copy is not None:
                    tensor.copy_(copy)
                if name in owner._buffers:
                    setattr(owner, name, tensor)  # a step may have put another tensor in its place
                else:
                    owner.register_buffer(name, tensor)
        for metric, state in saved.metrics:
            vars(metric).update(_copied(state))

    def _random_states(self) -> tuple[Any, ...]:
        on_device = self._of_device("get_rng_state")
        return random.getstate(), numpy.random.get_state(), torch.get_rng_state(), on_device

    def _of_device(self, function: str, *arguments: Any) -> Any:
        """Call a function of the accelerator's module; ``None`` where there is none."""
        call = getattr(getattr(torch, self._device.type, None), function, None)
        if call is None:
            return None
        return call(*arguments) if self._device.type == "mps" else call(*arguments, self._device)

    def _copied_buffers(self, everything: bool) -> tuple[tuple[nn.Module, str, Tensor | None, Tensor | None], ...]:
        tensors = [getattr(owner, name, None) for owner, name in self._slots]  # one may be removed by now
        seen = [(tensor, _version(tensor)) for tensor in tensors]
        if self._seen is not None:
            self._changing.update(
                slot
                for slot, ((tensor, version), (last, before)) in enumerate(zip(seen, self._seen, strict=True))
                if tensor is not last or version != before or version < 0
            )
        saved: list[tuple[nn.Module, str, Tensor | None, Tensor | None]] = []
        for slot, tensor in enumerate(tensors):
            owner, name = self._slots[slot]
            if tensor is None:
                if name in owner._buffers:  # and has not been removed
                    saved.append((owner, name, None, None))
            elif slot in self._changing or tensor.nbytes <= _SMALL:
                saved.append((owner, name, tensor, tensor.detach().clone()))
            elif everything:
                saved.append((owner, name, tensor, tensor.detach().to("cpu", copy=True)))
        self._seen = seen
        return tuple(saved)


def _version(tensor: Tensor | None) -> int:
    if tensor is None:
        return 0
    return -1 if tensor.is_inference() else tensor._version


def _copied(state: dict[str, Any]) -> dict[str, Any]:
    return {
        name: value.detach().clone() if isinstance(value, Tensor) else list(value) if type(value) is list else value
        for name, value in state.items()
    }


def _copied_metric(metric: Metric) -> tuple[Metric, dict[str, Any]]:
    return metric, _copied(vars(metric))
