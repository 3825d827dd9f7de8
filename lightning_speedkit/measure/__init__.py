"""Clocks and probes that turn a machine or a run into facts."""

from lightning_speedkit.measure.file_system import read_file_system
from lightning_speedkit.measure.hardware import read_hardware
from lightning_speedkit.measure.out_of_memory import is_out_of_memory, out_of_memory_source, release_memory
from lightning_speedkit.measure.run_recorder import RunRecorder
from lightning_speedkit.measure.samples import count_samples
from lightning_speedkit.measure.storage import measure_storage
from lightning_speedkit.measure.versions import read_versions

__all__ = [
    "RunRecorder",
    "count_samples",
    "is_out_of_memory",
    "measure_storage",
    "out_of_memory_source",
    "read_file_system",
    "read_hardware",
    "read_versions",
    "release_memory",
]
