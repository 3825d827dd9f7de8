"""Everything that was measured of one run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from lightning_speedkit.facts.hardware import Hardware
from lightning_speedkit.facts.timing import StepTiming

__all__ = ["RunFacts"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """One ``fit`` as one process saw it.

    ``train`` has only steady steps. Left out of it, and kept beside it: the first batches of each epoch
    (``seconds_warmup``), validation (``seconds_validation``) and the saving of checkpoints (``seconds_checkpoint``).
    ``seconds_fit`` is the whole, from the start of training to its end. ``epochs`` and ``optimizer_steps`` count what
    was done in this ``fit``, not before a resume. ``outcome`` is ``"running"``, ``"completed"``, or the name of the
    exception that ended it.

    >>> facts = RunFacts(
    ...     hardware=Hardware(accelerator="cpu", device_name="a CPU"),
    ...     train=StepTiming(steps=2, samples=8, seconds_wall=0.5),
    ...     world_size=4,
    ... )
    >>> facts.samples_per_second
    64.0
    """

    hardware: Hardware
    train: StepTiming
    epochs: int = 0
    optimizer_steps: int = 0
    seconds_fit: float = 0.0
    seconds_warmup: float = 0.0
    seconds_validation: float = 0.0
    seconds_checkpoint: float = 0.0
    outcome: str = "completed"
    precision: str = ""
    strategy: str = ""
    world_size: int = 1
    accumulate_grad_batches: int = 1
    versions: Mapping[str, str] = field(default_factory=dict)

    @property
    def samples_per_second(self) -> float:
        """Of all ranks together, taking them to be equally fast, as synchronous training makes them."""
        return self.train.samples_per_second * self.world_size
