"""Makes a network again from the graphs in a folder of artefacts."""

from __future__ import annotations

import io
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lightning_speedkit.compress.artefact_folder import MANIFEST_FILE, REST_FILE, checked_file
from lightning_speedkit.compress.call_form import CallForm
from lightning_speedkit.compress.cpu_int8 import has_exact_int8
from lightning_speedkit.compress.engine import FORMATS
from lightning_speedkit.compress.exported import ProgramModule, quiet_export
from lightning_speedkit.compress.float_copy import float_copy
from lightning_speedkit.compress.onnx_module import OnnxModule, install
from lightning_speedkit.compress.pt2_check import check_program_file
from lightning_speedkit.compress.weight_shapes import shape_difference, weight_shapes
from lightning_speedkit.errors import MissingExtraError, QuantizationError

__all__ = ["load_from_folder"]


def load_from_folder(
    folder: Path, manifest: Mapping[str, Any], module: nn.Module | None, format: str | None
) -> nn.Module:
    """The network that ``manifest`` describes, from the files of ``format``."""
    held = list(manifest["formats"])
    chosen = format or held[0]
    if chosen not in held:
        raise QuantizationError(f"{folder} has the formats {', '.join(held)}, and not {chosen!r}.")
    if chosen not in FORMATS:
        raise QuantizationError(f"{folder} is in the format {chosen!r}; this version reads {', '.join(FORMATS)}.")
    told = manifest["formats"][chosen]
    files = {name: checked_file(folder, manifest, name) for name in told["files"]}
    if chosen == "state_dict":
        from lightning_speedkit.compress.artefact import load_state

        return load_state(folder / told["files"][0], module)
    try:
        parts = [(str(part["name"]), str(part["file"]), CallForm.from_plain(part["form"])) for part in told["parts"]]
        unnamed = [name for name in (*(file for _, file, _ in parts), told.get("rest")) if name and name not in files]
        if unnamed or not parts:
            raise ValueError(f"it does not vouch for {unnamed[0]!r}" if unnamed else "it names no part")
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise QuantizationError(f"{folder / MANIFEST_FILE} is damaged: {error!r}.") from error
    if not parts or not {file for _, file, _ in parts} | {told.get("rest") or parts[0][1]} <= files.keys():
        raise QuantizationError(f"{folder / MANIFEST_FILE} is damaged: its parts are not the files that it names.")
    _warn_of_overflow(folder, told)
    twin = None if module is None else float_copy(module)
    if twin is not None:
        _refuse_foreign(twin, told, folder)
    run = {name: _runner(chosen, files[file], form, folder / file) for name, file, form in parts}
    if twin is not None:
        result = _installed(twin, run, folder)
        return _with_rest(result, files[told["rest"]], folder) if told.get("rest") else result
    if told.get("is_partial"):
        raise QuantizationError(
            f"Only parts of the network in {folder} are graphs ({', '.join(run)}). Pass a float model of the same "
            "structure, whose code runs them: load_quantized(path, MyModel())."
        )
    if "" in run and len(run) > 1:
        raise QuantizationError(
            f"The network in {folder} is called as a whole and in parts ({', '.join(filter(None, run))}). Pass a float "
            "model of the same structure, which they are put into: load_quantized(path, MyModel())."
        )
    if len(run) == 1:
        return next(iter(run.values()))
    return _tree(run)


def _refuse_foreign(twin: nn.Module, told: Mapping[str, Any], folder: Path) -> None:
    """QuantizationError if the weights of ``twin`` are not those that the manifest names, as far as it names any."""
    if (saved := told.get("weights")) is None:
        return
    try:
        difference = shape_difference(weight_shapes(twin), dict(saved.items()))
    except (AttributeError, TypeError) as error:
        raise QuantizationError(f"{folder / MANIFEST_FILE} is damaged: {error!r}.") from error
    if difference:
        without = "" if told.get("is_partial") else f", or no model: load_quantized({str(folder)!r})"
        raise QuantizationError(
            f"The network in {folder} was made from another one than a {type(twin).__name__} like this: {difference}. "
            f"Pass a float model with the same layers, with any weights{without}."
        )


def _runner(format: str, content: bytes, form: CallForm, path: Path) -> nn.Module:
    if format == "onnx":
        try:
            return OnnxModule(content, form)
        except QuantizationError as error:
            raise QuantizationError(f"{path}: {error}") from error
    _import_torchao(content)
    check_program_file(content, str(path))
    try:
        with quiet_export():
            return ProgramModule(torch.export.load(io.BytesIO(content)), form)
    except Exception as error:  # what torch.export raises of a program of another version is not documented
        raise QuantizationError(f"{path} cannot be read by torch {torch.__version__} ({error}).") from error


def _import_torchao(content: bytes) -> None:
    """Its import registers the operators and tensors that a program may name."""
    if b"torchao" not in content:
        return
    from lightning_speedkit.compress.torchao_weights import quiet_torchao

    try:
        with quiet_torchao():
            import torchao.quantization  # noqa: F401
    except ImportError as error:
        raise MissingExtraError("this quantized network", extra="quant", library="torchao") from error


def _installed(root: nn.Module, run: Mapping[str, nn.Module], folder: Path) -> nn.Module:
    for name, runner in run.items():
        try:
            root.get_submodule(name)
        except AttributeError as error:
            raise QuantizationError(
                f"The network in {folder} has a part {name!r}, and a {type(root).__name__} like this one has not."
            ) from error
        root = install(root, name, runner)
    return root.eval()


def _with_rest(root: nn.Module, content: bytes, folder: Path) -> nn.Module:
    try:
        state = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
        root.load_state_dict(state)
    except Exception as error:  # what torch raises of a foreign file, or a RuntimeError of other names and shapes
        raise QuantizationError(
            f"{folder / REST_FILE} does not fit a {type(root).__name__} like this one ({error})."
        ) from error
    return root


def _tree(run: Mapping[str, nn.Module]) -> nn.Module:
    root = nn.Module()
    for name, runner in run.items():
        owner = root
        *parents, last = name.split(".")
        for parent in parents:
            if not hasattr(owner, parent):
                owner.add_module(parent, nn.Module())
            owner = owner.get_submodule(parent)
        owner.add_module(last, runner)
    return root.eval()


def _warn_of_overflow(folder: Path, told: Mapping[str, Any]) -> None:
    if told.get("full_range") and not has_exact_int8():
        warnings.warn(
            f"The network in {folder} has 8-bit weights, made on a CPU with VNNI. This CPU has none, so its products "
            "may overflow and the answers be wrong; quantize it again here.",
            stacklevel=4,
        )
