"""On an out-of-memory error: what filled the memory, written down, and what would help. Then the error goes on.

What it does: sorts what lives into parameters, gradients, optimizer state, buffers, activations and fragmentation, and
names the largest tensors, where the error came from, and presets that may help, in a text and a JSON file per process.
When it helps: the message of an allocator says how much was wanted, not what the rest is used for. What it costs:
no hook in a step, only at the error; with ``history_entries`` torch notes every allocation on the device, which takes
time and host memory. Source: torch's own memory snapshots, which need to be asked for beforehand.
"""

from __future__ import annotations

import importlib.util
import json
import os
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from typing_extensions import override

from lightning_speedkit.facts import write_json
from lightning_speedkit.measure.hardware import read_hardware
from lightning_speedkit.measure.memory_use import read_device_memory, read_host_bytes
from lightning_speedkit.measure.out_of_memory import out_of_memory_source
from lightning_speedkit.memory.leak_monitor_story import size_text
from lightning_speedkit.memory.oom_snapshot_parts import MemoryParts, local_tensors, measure_parts, place_of_error
from lightning_speedkit.memory.oom_snapshot_remedies import Remedy, suggest_remedies

__all__ = ["OOMSnapshot", "Snapshot"]

_PHASES = {
    "train": "training",
    "sanity_check": "sanity check",
    "validate": "validation",
    "predict": "prediction",
}
_PARTS = {
    "parameters": "parameters",
    "gradients": "gradients",
    "optimizer_state": "optimizer state",
    "buffers": "buffers",
    "activations": "activations, rest",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """What was known when memory ran out."""

    error: str
    source: str
    place: str
    phase: str
    rank: int
    step: int
    host_bytes: int | None
    parts: MemoryParts
    remedies: tuple[Remedy, ...]

    def text(self) -> str:
        """A page for a person.

        >>> parts = MemoryParts(device="cpu", parameters=2048, gradients=0, optimizer_state=0, buffers=0,
        ...                     activations=6144, fragmentation=None)
        >>> told = Snapshot(error="no memory", source="CPU", place="head", phase="training", rank=0, step=3,
        ...                 host_bytes=None, parts=parts, remedies=(Remedy("low-memory", "Less."),)).text()
        >>> print(told.splitlines()[4])
        activations, rest    6.00 KiB  75 %
        """
        total = max(1, self.parts.total + (self.parts.fragmentation or 0))
        rows = [(label, getattr(self.parts, name)) for name, label in _PARTS.items()]
        if self.parts.fragmentation is not None:
            rows.append(("fragmentation", self.parts.fragmentation))
        rows.sort(key=lambda row: -row[1])
        lines = [
            f"Out of memory ({self.source}) in {self.phase}, process {self.rank}, step {self.step}: {self.place}",
            self.error.splitlines()[0] if self.error else "",
            "",
            f"What fills {self.parts.device}:",
            *(f"{name:<18}{size_text(size):>11} {size / total:>4.0%}".replace("%", " %") for name, size in rows),
        ]
        if self.host_bytes is not None:
            lines.append(f"The process has {size_text(self.host_bytes)} of the host's memory.")
        if self.parts.largest:
            lines += ["", "The largest tensors:"]
            lines += [
                f"{size_text(tensor.bytes):>11}  {tensor.dtype} {list(tensor.shape)}  {tensor.part}: "
                f"{tensor.name}{f' in {tensor.module}' if tensor.module else ''}"
                for tensor in self.parts.largest
            ]
        lines += ["", "What may help, the cheapest first:"]
        lines += [f"- {f'preset {one.preset}: ' if one.preset else ''}{one.why}" for one in self.remedies]
        return "\n".join(lines) + "\n"

    def as_json(self) -> str:
        """The same for a program."""
        return json.dumps({"schema": "out-of-memory", "schema_version": 1, **asdict(self)}, indent=1) + "\n"


class OOMSnapshot(Callback):
    """Writes down what filled the memory when a run ends with an out-of-memory error, and lets the error go on.

    The files are ``out-of-memory-rank0.txt`` and ``.json``, and so on for each process; :attr:`snapshot` has the same
    for the latest run: it is ``None`` once another one has begun.
    It works in every phase, for the device and for the host. The error is raised as it was, also if nothing could be
    written.

    Args:
        folder: For the files, made when needed; ``None`` for the Trainer's ``default_root_dir``.
        largest: How many tensors are named.
        history_entries: On CUDA, so many of the last allocations and frees are recorded, with the line of Python that
            asked, into ``out-of-memory-rank0.pickle`` for https://pytorch.org/memory_viz. 0 records none.

    Raises:
        TypeError: ``folder`` is no path, or another argument no whole number.
        ValueError: A number is negative.

    >>> callback = OOMSnapshot()
    >>> callback.snapshot is None
    True
    """

    def __init__(self, folder: str | None = None, largest: int = 10, history_entries: int = 0) -> None:
        if folder is not None and not isinstance(folder, (str, os.PathLike)):
            raise TypeError(f"folder={folder!r} must be a path as a string, or None.")
        for name, number in (("largest", largest), ("history_entries", history_entries)):
            if isinstance(number, bool) or not isinstance(number, int):
                raise TypeError(f"{name}={number!r} must be a whole number, 0 or more.")
            if number < 0:
                raise ValueError(f"{name}={number} must be 0 or more.")
        self.folder = folder
        self.largest = largest
        self.history_entries = history_entries
        self.snapshot: Snapshot | None = None
        self._recording = False

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self.snapshot = None
        if self.history_entries and trainer.strategy.root_device.type == "cuda" and not _is_recording():
            _record_history(max_entries=self.history_entries, stacks="python")
            self._recording = True

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        source = out_of_memory_source(exception)
        if source is None:
            self._stop()
            return
        # Whatever goes wrong here, the error that the user has to see is the one of their run.
        try:
            self.snapshot = _take(trainer, pl_module, exception, source, self.largest)
            self._publish(trainer, self.snapshot)
        except Exception as error:
            warnings.warn(f"OOMSnapshot could not tell what filled the memory: {error!r}", stacklevel=2)
        finally:
            self._stop()

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._stop()

    def _publish(self, trainer: pl.Trainer, snapshot: Snapshot) -> None:
        folder = Path(trainer.default_root_dir if self.folder is None else self.folder)
        path = folder / f"out-of-memory-rank{snapshot.rank}.txt"
        written = f" Written: {path}"
        if getattr(trainer, "fast_dev_run", False) and self.folder is None:
            written = ""
        else:
            try:
                write_json(snapshot.text(), path)
                write_json(snapshot.as_json(), path.with_suffix(".json"))
                if self._recording:
                    dump: Callable[..., Any] = torch.cuda.memory._dump_snapshot
                    dump(str(path.with_suffix(".pickle")))
            except OSError as error:
                written = f" It could not be written to {folder}: {error}."
        warnings.warn(snapshot.text() + written, stacklevel=2)

    def _stop(self) -> None:
        if self._recording:
            self._recording = False
            _record_history(enabled=None)


def _take(
    trainer: pl.Trainer, pl_module: pl.LightningModule, error: BaseException, source: str, largest: int
) -> Snapshot:
    on_host = source == "CPU"
    device = torch.device("cpu") if on_host else trainer.strategy.root_device
    memory = read_device_memory(device)
    stage: Any = trainer.state.stage
    phase = "setup" if stage is None else _PHASES.get(stage.value, stage.value)
    parts = measure_parts(
        pl_module,
        trainer.optimizers,
        device=device,
        locals_=local_tensors(error, pl_module),
        allocated_bytes=None if memory is None else memory.allocated_bytes,
        reserved_bytes=None if memory is None else memory.reserved_bytes,
        largest=largest,
    )
    hardware = read_hardware(device.type if device.type in ("cuda", "mps", "xpu") else "cpu")
    remedies: Sequence[Remedy] = suggest_remedies(
        parts,
        training=phase in ("training", "setup"),
        precision=str(trainer.precision),
        has_tensor_cores=hardware.native_bf16,
        has_torchao=importlib.util.find_spec("torchao") is not None,
        on_host=on_host or device.type == "cpu",
    )
    return Snapshot(
        error=str(error) or type(error).__name__,
        source=source,
        place=place_of_error(error, pl_module) or "place unknown",
        phase=phase,
        rank=trainer.global_rank,
        step=trainer.global_step,
        host_bytes=read_host_bytes(),
        parts=parts,
        remedies=tuple(remedies),
    )


def _is_recording() -> bool:
    ask: Any = getattr(torch._C, "_cuda_isHistoryEnabled", None)
    return bool(ask is not None and ask())


_record_history: Callable[..., None] = torch.cuda.memory._record_memory_history
