"""The memory that a training step will need, told before a device is touched.

What it does: two training steps are run with fake tensors, which have shapes, types and devices but no data, and every
storage that an operation makes or frees is counted. So the figure holds what a formula leaves out: which activations
autograd really keeps, 16-bit copies of weights, blocks that are recomputed, and the short-lived tensors of the backward
pass and of the optimizer.

When it helps: to see whether a model, a batch size or a precision fits before a job waits in a queue, and which part of
the memory is worth an effort. What it costs: the time to go through two steps in Python, whatever the size of the
tensors, which take no memory. What it does not see: buffers inside one kernel (a cuDNN workspace), the blocks in which
an allocator rounds, the CUDA context, data loading.

Source: ``torch._subclasses.FakeTensorMode``; measured against the memory of real steps by
``benchmarks/memory_estimate.py``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lightning_speedkit.memory.checkpoint_budget_live import LiveBytes
from lightning_speedkit.memory.memory_estimate_copy import (
    Precision,
    batch_for,
    checked_device,
    checked_precision,
    copy_for,
    distinct_bytes,
    leaves_no_trace,
)
from lightning_speedkit.memory.memory_estimate_optimizer import make_optimizers
from lightning_speedkit.memory.memory_estimate_refusals import telling_what_to_do
from lightning_speedkit.memory.memory_estimate_step import loss_of
from lightning_speedkit.memory.memory_estimate_workspace import RecurrentWorkspaces
from lightning_speedkit.report import Table

__all__ = ["MemoryEstimate", "estimate_memory"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryEstimate:
    """What a training step holds, in bytes. ``peak_bytes`` is the most at any time, in ``phase``.

    ``activations`` is what the peak holds beyond weights, buffers, gradients, optimizer state and the batch: tensors
    that wait for the backward pass, and those at work. Where the peak is in the forward of a loop that clears
    gradients before it, ``gradients`` are not part of it.
    """

    parameters: int
    buffers: int
    gradients: int
    optimizer_state: int
    batch: int
    activations: int
    peak_bytes: int
    phase: Literal["forward", "backward", "optimizer step"]
    device: str
    precision: str

    def table(self) -> Table:
        """The parts in MiB, as a table of a report.

        >>> estimate_memory(nn.Linear(256, 256), torch.zeros(8, 256)).table().cells()[0]
        ('parameters', '0.251')
        """
        parts = ("parameters", "buffers", "gradients", "optimizer_state", "batch", "activations")
        rows: list[tuple[str, float]] = [(name.replace("_", " "), getattr(self, name) / 2**20) for name in parts]
        rows.append((f"peak, in the {self.phase}", self.peak_bytes / 2**20))
        return Table(["part", "MiB"], rows, caption=f"A training step on {self.device} in {self.precision}")

    def __str__(self) -> str:
        """The table as lines of text."""
        table = self.table()
        width = max(len(name) for name, _ in table.cells())
        return "\n".join([table.caption, *(f"  {name:<{width}}  {value:>9} MiB" for name, value in table.cells())])


def estimate_memory(
    module: nn.Module,
    batch: Any,
    precision: str = "32-true",
    optimizer: str | Callable[[list[nn.Parameter]], torch.optim.Optimizer] = "auto",
    loss: Callable[[Any, Any], Tensor] | None = None,
    device: str | torch.device | None = None,
    method: Literal["fake", "run"] = "fake",
) -> MemoryEstimate:
    """The peak memory of a training step of this module on such a batch, without running it on the device.

    The module, its trainer and the random state stay as they are. Modules that are checkpointed
    (:func:`~lightning_speedkit.memory.checkpoint_modules`) are so in the estimate.

    Args:
        module: A LightningModule, of which ``training_step`` runs, with gradients cleared between forward and backward
            as Lightning does; or any other module, which is called with the batch, gradients cleared before it.
        batch: As ``training_step`` gets it. For a plain module what it is called with: a tensor, a tuple or list of
            arguments, or a dict of keyword arguments; with ``loss``, a pair of those and the target.
        precision: A Lightning precision: ``"32-true"``, ``"bf16-mixed"``, ``"16-mixed"``, ``"bf16-true"``,
            ``"16-true"``.
        optimizer: ``"auto"`` (what ``configure_optimizers`` returns; AdamW for a plain module), the name of a class in
            ``torch.optim``, ``"sgd-momentum"``, ``"none"``, or a function from parameters to an optimizer.
        loss: For a plain module, from output and target to a scalar. If not given, the mean of all outputs.
        device: Where the step would run, among the devices that torch finds; the module's own if not given.
        method: ``"fake"``, or ``"run"``: really runs the two steps where the module is, for one whose operations
            depend on values. It takes the memory, and the weights once more.

    Returns:
        The estimate, in bytes.

    Raises:
        ValueError: If an argument is not one of those allowed, if the module does not take such a batch, if the loss is
            no scalar, or if the module cannot run without data; the message says which operation it was.
        TypeError: If ``module`` is no module, or ``batch`` holds no tensor.

    >>> model = nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 256))
    >>> estimate = estimate_memory(model, torch.zeros(64, 256))
    >>> estimate.parameters, estimate.optimizer_state, estimate.phase
    (2102272, 4204560, 'optimizer step')
    >>> estimate_memory(model, torch.zeros(4096, 256)).phase
    'backward'
    """
    given: Any = module
    if not isinstance(given, nn.Module):
        made = f" Make one: {given.__name__}(...)." if isinstance(given, type) else ""
        raise TypeError(f"module is a torch.nn.Module, got {getattr(given, '__name__', type(given).__name__)}.{made}")
    if not any(isinstance(leaf, Tensor) for leaf in tree_leaves(batch)):
        raise TypeError(
            f"batch is one batch of tensors, such as next(iter(loader)), got {type(batch).__name__} without a tensor."
        )
    if method not in ("fake", "run"):
        raise ValueError(f"method={method!r} is neither 'fake' nor 'run'.")
    found = next((tensor.device for tensor in (*module.parameters(), *module.buffers())), torch.device("cpu"))
    place = torch.device(device if device is not None else found)
    place, kind = checked_device(place), checked_precision(precision)
    if method == "run" and place.type != found.type:
        raise ValueError(f"method='run' runs where the module is, on {found}; device={str(place)!r} is elsewhere.")
    with leaves_no_trace(), telling_what_to_do(method, batch):
        copied = copy_for(module, kind, place, fake=method == "fake")
        with copied.mode:
            sent = batch_for(batch, kind, place, copied)
            optimizers = make_optimizers(copied.module, optimizer)
            peaks = _run(copied.module, sent, loss, kind, place, optimizers)
        weights, buffers = distinct_bytes(copied.module.parameters()), distinct_bytes(copied.module.buffers())
        gradients = distinct_bytes(p.grad for p in copied.module.parameters() if p.grad is not None)
        state = distinct_bytes(
            value
            for one in optimizers
            for of in one.state.values()
            for value in of.values()
            if isinstance(value, Tensor)
        )
        taken = distinct_bytes(sent)
    phase = max(peaks, key=lambda name: peaks[name])
    cleared = phase == "forward" and not hasattr(module, "training_step")
    known = state + (0 if cleared else gradients)
    return MemoryEstimate(
        parameters=weights,
        buffers=buffers,
        gradients=gradients,
        optimizer_state=state,
        batch=taken,
        activations=max(0, peaks[phase] - known),
        peak_bytes=weights + buffers + taken + peaks[phase],
        phase=phase,
        device=str(place),
        precision=precision,
    )


_Phase = Literal["forward", "backward", "optimizer step"]


def _run(
    module: nn.Module,
    batch: Any,
    loss: Callable[[Any, Any], Tensor] | None,
    precision: Precision,
    device: torch.device,
    optimizers: list[torch.optim.Optimizer],
) -> dict[_Phase, int]:
    """The peak of each phase of the second step, beyond what was there; the first one makes the optimizer's state."""
    lightning = hasattr(module, "training_step")
    autocast = torch.autocast(device.type, precision.autocast) if precision.autocast else contextlib.nullcontext()
    peaks: dict[_Phase, int] = {}
    with RecurrentWorkspaces(), LiveBytes() as live:
        for _ in range(2):
            if not lightning:
                module.zero_grad()
            live.peak = live.now
            with autocast:
                value = loss_of(module, batch, loss)
            peaks["forward"], live.peak = live.peak, live.now
            if lightning:
                module.zero_grad()
            go_back: Callable[[], None] = value.backward  # untyped in some torch versions
            go_back()
            del value, go_back
            peaks["backward"], live.peak = live.peak, live.now
            for one in optimizers:
                one.step()
            peaks["optimizer step"] = live.peak
    return peaks
