"""The folder that keeps a quantized network: its files in one or more formats, and a manifest that vouches for them."""

from __future__ import annotations

import hashlib
import json
import platform
import tempfile
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from torch import Tensor

from lightning_speedkit.compress.engine import Converted
from lightning_speedkit.errors import QuantizationError

__all__ = [
    "MANIFEST_FILE",
    "REST_FILE",
    "artefact_bytes",
    "checked_file",
    "input_shapes",
    "part_files",
    "read_manifest",
    "save_artefacts",
]

MANIFEST_FILE, REST_FILE = "manifest.json", "rest.pt"  # the state of what is outside of the graphs
_KIND, _SCHEMA = "quantized network", 1
_LIBRARIES = ("torch", "onnx", "onnxruntime", "torchao")


def part_files(names: Sequence[str], suffix: str) -> dict[str, str]:
    """The file of each part that is called from outside, by name.

    >>> part_files(["net"], "onnx"), part_files(["encoder", "decoder"], "pt2")
    ({'net': 'model.onnx'}, {'encoder': 'model-0.pt2', 'decoder': 'model-1.pt2'})
    """
    if len(names) == 1:
        return {names[0]: f"model.{suffix}"}
    return {name: f"model-{index}.{suffix}" for index, name in enumerate(names)}


def artefact_bytes(converted: Converted) -> int:
    """The bytes of the files of ``converted`` in its preferred format."""
    with tempfile.TemporaryDirectory() as folder:
        told = converted.artefacts[converted.formats[0]].write(Path(folder))
        return sum((Path(folder) / name).stat().st_size for name in told["files"])


def save_artefacts(converted: Converted, folder: Path, formats: Sequence[str] | None = None) -> dict[str, Any]:
    """Write ``converted`` to ``folder`` in ``formats`` (by default its preferred one), and return the manifest.

    Everything is written beside first and renamed when it is complete, the manifest last: until then a reader sees the
    old files, or an error that names the file whose hash does not match.
    """
    from lightning_speedkit.compress.artefact import publish

    if isinstance(formats, str):
        raise TypeError(f"formats must be a list of names, got the string {formats!r}; write [{formats!r}].")
    wanted = list(formats) if formats is not None else list(converted.formats[:1])
    if refused := [name for name in wanted if name not in converted.formats]:
        raise ValueError(
            f"{converted.engine} cannot be kept as {', '.join(map(repr, refused))}; it can as "
            f"{', '.join(map(repr, converted.formats))}."
        )
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".quantized-", dir=folder) as name:
        beside = Path(name)
        told = {form: dict(converted.artefacts[form].write(beside)) for form in wanted}
        names = [file for entry in told.values() for file in entry["files"]]
        manifest = {
            "kind": _KIND,
            "schema": _SCHEMA,
            "engine": converted.engine,
            "scheme": converted.scheme,
            "formats": told,
            "files": {file: _vouched(beside / file) for file in names},
            "versions": _versions(),
            "machine": platform.machine(),
            "quantized": list(converted.quantized),
            "skipped": dict(converted.skipped),
        }
        text = json.dumps(manifest, indent=1, allow_nan=False) + "\n"
        for file in names:
            publish(folder / file, lambda temporary, file=file: (beside / file).replace(temporary))
    publish(folder / MANIFEST_FILE, lambda temporary: temporary.write_text(text))
    return manifest


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """The manifest of ``folder``, ``None`` if there is none; QuantizationError if it is damaged or of another kind."""
    path = folder / MANIFEST_FILE
    if not path.is_file():
        return None
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        kind, schema = manifest["kind"], manifest["schema"]
    except (ValueError, KeyError, TypeError) as error:
        raise QuantizationError(f"{path} is damaged, or no manifest of a quantized network ({error}).") from error
    if kind != _KIND or schema != _SCHEMA:
        raise QuantizationError(
            f"{path} describes a {kind!r} of schema {schema!r}; this version reads a {_KIND!r} of schema {_SCHEMA}."
        )
    try:
        valid = all(
            Path(name).name == name and isinstance(told["sha256"], str) for name, told in manifest["files"].items()
        ) and all(name in manifest["files"] for told in manifest["formats"].values() for name in told["files"])
    except (KeyError, TypeError, AttributeError) as error:
        raise QuantizationError(f"{path} is damaged: {error!r} is missing or of another kind.") from error
    if not manifest["formats"]:
        raise QuantizationError(f"{path} is damaged: it names no format.")
    if not valid:
        raise QuantizationError(f"{path} is damaged: its files are not plain names in its own folder.")
    return dict(manifest)


def checked_file(folder: Path, manifest: Mapping[str, Any], name: str) -> bytes:
    """The content of the file ``name``; QuantizationError if it is missing, cut, or not the one that was written."""
    path, told = folder / name, manifest["files"][name]
    try:
        content = path.read_bytes()
    except FileNotFoundError as error:
        raise QuantizationError(
            f"{path} is missing, though {MANIFEST_FILE} names it. Copy the whole folder."
        ) from error
    if hashlib.sha256(content).hexdigest() != told["sha256"]:
        raise QuantizationError(
            f"{path} is not the file that was written: it has {len(content)} bytes, {MANIFEST_FILE} says "
            f"{told.get('bytes')}, and the SHA-256 differs. It was damaged, cut or replaced; write it again."
        )
    return content


def input_shapes(tensors: Sequence[Tensor]) -> list[dict[str, Any]]:
    """Shapes and dtypes of the example inputs, for the reader of a manifest."""
    return [{"shape": list(t.shape), "dtype": str(t.dtype).removeprefix("torch.")} for t in tensors]


def _vouched(path: Path) -> dict[str, Any]:
    content = path.read_bytes()
    return {"sha256": hashlib.sha256(content).hexdigest(), "bytes": len(content)}


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in (*_LIBRARIES, "lightning-speedkit"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
