"""Keeps a quantized network in files and makes it again from them, in a fresh process, without running code of theirs.

As a ``state_dict`` (``model.pt``) it needs a float model of the same structure; it loads with
``torch.load(weights_only=True)``. A graph of ONNX (``model.onnx``) or ``torch.export`` (``model.pt2``) needs none.
``manifest.json`` beside them holds their hashes, and how the network is called.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lightning_speedkit.compress.artefact_folder import MANIFEST_FILE, read_manifest
from lightning_speedkit.compress.float_copy import float_copy
from lightning_speedkit.compress.int8 import follow_recipe
from lightning_speedkit.compress.torch_ao import (
    load_recurrent_weights,
    quantization_numbers,
    quiet,
    recurrent_weights,
)
from lightning_speedkit.errors import QuantizationError

__all__ = ["MODEL_FILE", "REPORT_FILE", "int8_state", "load_quantized", "load_state", "publish", "save_quantized"]

MODEL_FILE, REPORT_FILE = "model.pt", "report.json"
_FORMAT, _PLAIN_FORMAT = 1, 2


def int8_state(module: nn.Module) -> dict[str, Any]:
    """The state of an int8 model as tensors and numbers.

    ``{"state": ..., "recurrent": {name: weights}, "numbers": {name: {"scale": ..., "zero_point": ...}}}``: some layers,
    such as torch's int8 ELU, leave the last two out of their ``state_dict``.
    """
    recurrent = {
        name: weights for name, layer in module.named_modules() if (weights := recurrent_weights(layer)) is not None
    }
    with quiet():
        state = (
            module.state_dict()
        )  # stays the object that it is: its versions travel with it, and int8 layers read them
    for key in [key for key, value in state.items() if isinstance(value, torch.ScriptObject)]:
        del state[key]
    numbers = {name: found for name, layer in module.named_modules() if (found := quantization_numbers(layer))}
    return {"state": state, "recurrent": recurrent, "numbers": numbers}


def save_quantized(module: nn.Module, recipe: Mapping[str, Any], path: str | os.PathLike[str]) -> None:
    """Write an int8 model beside ``path`` and rename it when it is complete."""
    content = {"format": _FORMAT, "torch": str(torch.__version__), "recipe": dict(recipe), **int8_state(module)}
    publish(Path(path), lambda temporary: torch.save(content, temporary))


def publish(path: Path, write: Any) -> None:
    """Let ``write(temporary_path)`` write a file and give it its name only when that succeeded."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
    os.close(handle)
    temporary = Path(name)
    try:
        write(temporary)
        temporary.chmod(0o666 & ~_umask())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def load_quantized(
    path: str | os.PathLike[str], module: nn.Module | None = None, *, format: str | None = None
) -> nn.Module:
    """The quantized network that was written to ``path``, as a new module on the CPU in eval mode.

    Args:
        path: The folder that :class:`QuantizeOnFitEnd` or :meth:`Converted.save` wrote, or a file in it.
        module: A float model of the same structure, with any weights, such as ``MyModule(**arguments)``. It is copied
            and stays as it is. Only the format ``"state_dict"`` needs it. With the others, it gives the result its
            class: a LightningModule whose network is the quantized one. The graphs hold the quantized weights, so
            ``state_dict()`` of the result still gives those of ``module`` for what the graphs run, which nothing reads.
        format: ``"state_dict"``, ``"pt2"`` or ``"onnx"``, where the folder has several; by default the first.

    Returns:
        A module that is called as the one that was quantized. Without ``module``, and where several parts of it are
        called, such as ``encoder`` and ``decoder``, these are attributes of what is returned.

    Raises:
        QuantizationError: A file is damaged, cut, missing or foreign (the message names it), or ``module`` has another
            structure (the message names a weight that differs), or is needed and was not given.
        FileNotFoundError: There is nothing at ``path``.
        MissingExtraError: The engine that runs it is not installed.

    >>> import tempfile
    >>> net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> from lightning_speedkit.compress.conversion import quantize_model
    >>> int8, details = quantize_model(net, [torch.ones(2, 4)])
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_quantized(int8, details.recipe, f"{folder}/model.pt")
    ...     again = load_quantized(folder, nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)))
    >>> torch.equal(again(torch.ones(1, 4)), int8(torch.ones(1, 4)))
    True
    """
    from lightning_speedkit.compress.artefact_load import load_from_folder

    if module is not None and not isinstance(module, nn.Module):
        raise TypeError(f"load_quantized() takes a float model, such as MyModel(), got {module!r:.100}.")
    given = Path(path)
    folder = given if given.is_dir() else given.parent
    named = None if given.is_dir() else given.name
    manifest = read_manifest(folder)
    if manifest is not None and (named is None or named == MANIFEST_FILE or named in manifest["files"]):
        found = None if named in (None, MANIFEST_FILE) else next(
            form for form, told in manifest["formats"].items() if named in told["files"]
        )  # fmt: skip
        return load_from_folder(folder, manifest, module, format or found)
    file = folder / (named or MODEL_FILE)
    if not file.is_file():
        raise FileNotFoundError(
            f"There is no quantized model at {file}. After a fit, {file.with_name(REPORT_FILE)} says why."
        )
    if file.suffix in (".onnx", ".pt2"):
        raise QuantizationError(
            f"{file} has no {MANIFEST_FILE} beside it that names it. Pass the whole folder that Converted.save() wrote."
        )
    return load_state(file, module)


def load_state(file: Path, module: nn.Module | None) -> nn.Module:
    """The quantized model whose state is in ``file``, made from a copy of ``module``."""
    content = _read(file)
    if not isinstance(content, dict) or content.get("format") not in (_FORMAT, _PLAIN_FORMAT):
        found = content.get("format") if isinstance(content, dict) else None
        raise QuantizationError(
            f"{file} has format {found!r}; this version reads the formats {_FORMAT} and {_PLAIN_FORMAT}."
        )
    if module is None:
        raise QuantizationError(
            f"{file} holds the state alone. Pass a float model of the same structure: load_quantized(path, MyModel())."
        )
    try:
        if content["format"] == _PLAIN_FORMAT:
            from lightning_speedkit.compress.torchao_state import load_torchao

            return load_torchao(float_copy(module), content)
        result = follow_recipe(float_copy(module), content["recipe"])
        _load_state(result, content["state"])
        layers = dict(result.named_modules())
        for name, weights in content["recurrent"].items():
            load_recurrent_weights(layers[name], weights)
        for name, numbers in content["numbers"].items():
            for key, value in numbers.items():
                setattr(layers[name], key, value)
    except (AttributeError, KeyError, RuntimeError, TypeError, ValueError) as error:  # also a QuantizationError
        raise QuantizationError(
            f"{file} does not fit a {type(module).__name__} like this one ({error}). Pass a float model with the same "
            f"layers as the one that was quantized (with torch {content.get('torch')}; here is {torch.__version__})."
        ) from error
    return result.requires_grad_(False)


def _read(file: Path) -> Any:
    try:
        with quiet():
            return torch.load(file, map_location="cpu", weights_only=True)
    except PermissionError:
        raise
    except Exception as error:  # what torch and pickle raise of a damaged or foreign file is not documented
        raise QuantizationError(
            f"{file} is damaged or no quantized model: it cannot be read ({type(error).__name__}). "
            "Write it again with save_quantized() or a fit with QuantizeOnFitEnd."
        ) from error


def _load_state(module: nn.Module, state: dict[str, Any]) -> None:
    with quiet():
        # the packed weights of recurrent layers are no tensors, and are loaded apart
        state.update({k: v for k, v in module.state_dict().items() if isinstance(v, torch.ScriptObject)})
        module.load_state_dict(state)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
