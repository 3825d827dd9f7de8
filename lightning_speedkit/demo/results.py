"""What the demo measured, as plain frozen data: the report tells it, ``results.json`` keeps it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from lightning_speedkit.facts import Hardware, StepTiming

__all__ = ["DemoResults", "DiskResult", "Latency", "QuantizationResult", "TrainingResult"]

SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingResult:
    """One training: what it read, how long its steps took, how good the model became.

    ``test_accuracy`` is a share from 0 to 1. ``seconds_fit`` runs from the start of training to its end, with
    validation and everything that :class:`StepTiming` leaves out. ``weights_digest`` is the SHA-256 of the trained
    state: equal for two trainings only if every weight is.
    """

    name: str
    description: str
    precision: str
    timing: StepTiming
    seconds_fit: float
    test_accuracy: float
    weights_digest: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskResult:
    """The same images in three forms, in bytes: files, decoded arrays with int64 labels, and the LMDB stores."""

    files: int
    file_bytes: int
    file_allocated_bytes: int
    payload_bytes: int
    store_bytes: int
    seconds_packing: float

    @property
    def store_overhead(self) -> float:
        """Store over payload; 1 would be nothing but the images and labels."""
        return self.store_bytes / self.payload_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Latency:
    """Seconds for one call of the model with ``batch_size`` images, in float and in int8."""

    batch_size: int
    seconds_float: float
    seconds_int8: float

    @property
    def speedup(self) -> float:
        """How many times faster int8 is; below 1 it is slower."""
        return self.seconds_float / self.seconds_int8


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizationResult:
    """What quantizing the last model gave. Where ``kept`` is false, ``reason`` says why, and nothing else is set."""

    kept: bool
    reason: str = ""
    backend: str = ""
    layers_quantized: int = 0
    layers_total: int = 0
    bytes_float: int = 0
    bytes_int8: int = 0
    latencies: tuple[Latency, ...] = ()
    test_accuracy_float: float = 0.0
    test_accuracy_int8: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoResults:
    """The whole run of the demo. ``trainings`` are, in this order: from files, from files with
    two workers, from LMDB, and from LMDB with the preset ``bundle``. Each is the faster of ``rounds`` trainings."""

    hardware: Hardware
    versions: Mapping[str, str]
    quick: bool
    seed: int
    epochs: int
    batch_size: int
    bundle: str
    disk: DiskResult
    trainings: tuple[TrainingResult, ...]
    quantization: QuantizationResult
    seconds_total: float
    rounds: int = 1
    image_size: int = 0
    samples: Mapping[str, int] = field(default_factory=dict)

    def to_json(self) -> str:
        """Everything above as JSON, with the derived rates that a reader would have to work out otherwise."""
        content: dict[str, Any] = {"schema": "speedkit-demo", "schema_version": SCHEMA_VERSION, **asdict(self)}
        for entry, training in zip(content["trainings"], self.trainings, strict=True):
            entry["samples_per_second"] = training.timing.samples_per_second
            entry["seconds_per_step"] = training.timing.seconds_per_step
        content["disk"]["store_overhead"] = self.disk.store_overhead
        return json.dumps(content, indent=2, allow_nan=False) + "\n"
