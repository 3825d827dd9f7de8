"""Clocks and probes that turn a machine or a run into facts."""

from lightning_speedkit.measure.hardware import read_hardware
from lightning_speedkit.measure.run_recorder import RunRecorder
from lightning_speedkit.measure.samples import count_samples
from lightning_speedkit.measure.versions import read_versions

__all__ = ["RunRecorder", "count_samples", "read_hardware", "read_versions"]
