"""What was measured, as frozen dataclasses: plain data that needs neither torch nor lightning."""

from lightning_speedkit.facts.cluster import Cluster, Link, read_cluster, write_cluster
from lightning_speedkit.facts.codec import read_run, run_from_json, run_to_json, write_json, write_run
from lightning_speedkit.facts.hardware import Hardware
from lightning_speedkit.facts.run import RunFacts
from lightning_speedkit.facts.storage import FileSystem, StorageSpeed
from lightning_speedkit.facts.timing import StepTiming

__all__ = [
    "Cluster",
    "FileSystem",
    "Hardware",
    "Link",
    "RunFacts",
    "StepTiming",
    "StorageSpeed",
    "read_cluster",
    "read_run",
    "run_from_json",
    "run_to_json",
    "write_cluster",
    "write_json",
    "write_run",
]
