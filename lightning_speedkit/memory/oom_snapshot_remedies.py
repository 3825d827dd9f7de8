"""Which preset is likely to help a run that is out of memory at the least cost.

What it does: looks at which part is largest. When it helps: after an out-of-memory error. What it costs: nothing.
Source: what each technique saves by its nature; an estimate is given for none, since that depends on the run.
"""

from __future__ import annotations

from dataclasses import dataclass

from lightning_speedkit.memory.oom_snapshot_parts import MemoryParts

__all__ = ["Remedy", "suggest_remedies"]


@dataclass(frozen=True, slots=True)
class Remedy:
    """A preset by its name, or ``""`` where there is none, and what it does here."""

    preset: str
    why: str


def suggest_remedies(
    parts: MemoryParts,
    *,
    training: bool = True,
    precision: str = "32-true",
    has_tensor_cores: bool = True,
    has_torchao: bool = True,
    on_host: bool = False,
) -> tuple[Remedy, ...]:
    """What is likely to help, the cheapest first.

    Args:
        parts: What fills the memory.
        training: Whether the error came while training, where activations wait for the backward pass.
        precision: Of the Trainer.
        has_tensor_cores: Whether the device computes in bfloat16 natively.
        has_torchao: Whether that is installed, which 8-bit states need.
        on_host: Whether the memory of the host ran out.

    >>> parts = MemoryParts(device="cuda:0", parameters=1, gradients=1, optimizer_state=2, buffers=0, activations=9,
    ...                     fragmentation=0)
    >>> [remedy.preset for remedy in suggest_remedies(parts)]
    ['bf16-mixed', 'checkpoint-activations', 'auto-micro-batch', 'low-memory']
    """
    remedies: list[Remedy] = []
    held = parts.total + (parts.fragmentation or 0)
    if parts.fragmentation and parts.fragmentation > held / 4:
        remedies.append(Remedy("", _FRAGMENTED))
    if not training:
        remedies.append(Remedy("", "Give the loader of this phase a smaller batch_size: nothing is learnt from it."))
    state = parts.parameters + parts.gradients + parts.optimizer_state
    halves = precision.startswith("32") and has_tensor_cores
    if parts.activations >= state:
        if halves:
            remedies.append(Remedy("bf16-mixed", "Activations of matrix products in half the bytes, and quicker."))
        if training:
            remedies += _FOR_ACTIVATIONS
    else:
        if training and parts.optimizer_state >= parts.parameters:
            if has_torchao and not on_host:
                remedies.append(Remedy("adamw-8bit", "Optimizer states in a quarter of the bytes."))
                remedies.append(Remedy("adamw-cpu-offload", "Optimizer states, and the step, on the host."))
            remedies.append(Remedy("adafactor", "A row and a column of state in place of each matrix."))
        if halves:
            remedies.append(Remedy("bf16-true", "Weights, gradients and states in half the bytes; check the loss."))
        if training and parts.activations > held / 5:
            remedies += _FOR_ACTIVATIONS[:2]
    return tuple(remedies)


_FRAGMENTED = (
    "More than a quarter of what the allocator holds is in no tensor: set PYTORCH_CUDA_ALLOC_CONF="
    "expandable_segments:True in the environment, and let CacheRelease empty the cache between phases."
)
_FOR_ACTIVATIONS = (
    Remedy("checkpoint-activations", "Blocks keep their inputs alone and are computed again: one more forward."),
    Remedy("auto-micro-batch", "A batch that does not fit is computed in pieces, with the gradient of the whole."),
    Remedy("low-memory", "Both, and four smaller batches per step: divide your batch_size by 4."),
)
