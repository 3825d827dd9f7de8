"""What was measured, as frozen dataclasses: plain data that needs neither torch nor lightning."""

from lightning_speedkit.facts.codec import read_run, run_from_json, run_to_json, write_json, write_run
from lightning_speedkit.facts.hardware import Hardware
from lightning_speedkit.facts.run import RunFacts
from lightning_speedkit.facts.storage import FileSystem, StorageSpeed
from lightning_speedkit.facts.timing import StepTiming

__all__ = [
    "FileSystem",
    "Hardware",
    "RunFacts",
    "StepTiming",
    "StorageSpeed",
    "read_run",
    "run_from_json",
    "run_to_json",
    "write_json",
    "write_run",
]
