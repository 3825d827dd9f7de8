"""Clocks and probes that turn a machine or a run into facts."""

from lightning_speedkit.measure.file_system import read_file_system
from lightning_speedkit.measure.hardware import read_hardware
from lightning_speedkit.measure.run_recorder import RunRecorder
from lightning_speedkit.measure.samples import count_samples
from lightning_speedkit.measure.storage import measure_storage
from lightning_speedkit.measure.versions import read_versions

__all__ = [
    "RunRecorder",
    "count_samples",
    "measure_storage",
    "read_file_system",
    "read_hardware",
    "read_versions",
]
