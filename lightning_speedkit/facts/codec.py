"""Facts as JSON, with the version of their schema.

A file of an older version is read, with defaults for what it lacks. A file of a newer version is refused: its numbers
could mean something else by then.
"""

from __future__ import annotations

import dataclasses
import json
import os
import tempfile
from pathlib import Path
from typing import Any

from lightning_speedkit.errors import FactsError
from lightning_speedkit.facts.hardware import Hardware
from lightning_speedkit.facts.run import RunFacts
from lightning_speedkit.facts.timing import StepTiming

__all__ = ["SCHEMA_VERSION", "read_run", "run_from_json", "run_to_json", "write_json", "write_run"]

SCHEMA_VERSION = 1


def run_to_json(run: RunFacts) -> str:
    """The facts as a JSON text.

    >>> run = RunFacts(hardware=Hardware(accelerator="cpu", device_name="a CPU"), train=StepTiming(steps=3))
    >>> run_from_json(run_to_json(run)) == run
    True
    """
    content = {"schema": "run", "schema_version": SCHEMA_VERSION, **_plain(run)}
    return json.dumps(content, indent=2, allow_nan=False) + "\n"


def run_from_json(text: str) -> RunFacts:
    """The facts that :func:`run_to_json` wrote; :class:`FactsError` if the text is something else."""
    try:
        content = json.loads(text)
    except ValueError as error:
        raise FactsError(f"This is not the record of a run: it is not JSON ({error}).") from error
    if not isinstance(content, dict) or content.get("schema") != "run":
        raise FactsError('This is not the record of a run: it lacks "schema": "run", which RunRecorder writes.')
    version = content.get("schema_version")
    if not isinstance(version, int) or version < 1:
        raise FactsError(f"The record of the run has schema_version {version!r}; a whole number from 1 is allowed.")
    if version > SCHEMA_VERSION:
        raise FactsError(
            f"The record of the run has schema version {version}; this version of lightning_speedkit reads up to "
            f"{SCHEMA_VERSION}. Read it with the version that wrote it, or a newer one."
        )
    fields = {name: value for name, value in content.items() if name not in ("schema", "schema_version")}
    try:
        hardware = dict(fields.pop("hardware"))
        if hardware.get("capability") is not None:
            hardware["capability"] = tuple(hardware["capability"])
        return RunFacts(hardware=Hardware(**hardware), train=StepTiming(**fields.pop("train")), **fields)
    except (KeyError, TypeError, ValueError) as error:
        raise FactsError(f"The record of the run is damaged: {error}.") from error


def write_run(run: RunFacts, path: str | os.PathLike[str]) -> Path:
    """Write the facts to a file, published by rename: a reader sees the old file or the new one, never half of it."""
    return write_json(run_to_json(run), path)


def read_run(path: str | os.PathLike[str]) -> RunFacts:
    """The facts in a file that :func:`write_run` wrote."""
    return run_from_json(Path(path).read_text(encoding="utf-8"))


def write_json(text: str, path: str | os.PathLike[str]) -> Path:
    """Write a text to ``path`` by rename, creating its folder. If anything fails, what was there stays as it was."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.", suffix=".part")
    part = Path(name)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        part.chmod(0o666 & ~_umask())  # mkstemp makes it private to the user; a report is to be read by others
        part.replace(target)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    return target


def _plain(run: RunFacts) -> dict[str, Any]:
    content = {field.name: getattr(run, field.name) for field in dataclasses.fields(run)}
    content["hardware"] = dataclasses.asdict(run.hardware)
    content["train"] = dataclasses.asdict(run.train)
    content["versions"] = dict(run.versions)
    return content


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
