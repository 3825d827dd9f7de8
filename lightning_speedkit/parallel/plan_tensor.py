"""Tensor parallel: which layers are cut across ranks, by name; and the cutting."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Literal, get_args

import torch.distributed as dist
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from lightning_speedkit.errors import did_you_mean
from lightning_speedkit.parallel.plan_units import shared_names

__all__ = ["Style", "apply_tensor_plan", "check_styles", "cut_size", "numbers_of", "resolve_plan"]

Style = Literal["column", "row", "embedding", "gathered", "divide"]


def check_styles(plan: Mapping[str, str]) -> None:
    """Refuse a style that does not exist.

    Raises:
        ValueError: It says which there are.
    """
    for pattern, style in plan.items():
        if style not in get_args(Style):
            raise ValueError(
                f"tensor_plan[{pattern!r}]={style!r} is unknown.{did_you_mean(style, get_args(Style))} Use one of "
                f"{', '.join(map(repr, get_args(Style)))}."
            )


def numbers_of(module: nn.Module) -> dict[str, int]:
    """The whole numbers that a module has as attributes, such as its number of heads."""
    plain = vars(module).items()
    return {name: value for name, value in plain if type(value) is int and not name.startswith("_")}


def cut_size(layer: nn.Module, style: str) -> int:
    """Of the dimension that a style cuts; 0 if the layer is of another kind.

    >>> cut_size(nn.Linear(3, 8), "column"), cut_size(nn.Linear(3, 8), "row"), cut_size(nn.Linear(3, 8), "embedding")
    (8, 3, 0)
    """
    if isinstance(layer, nn.Embedding):
        return layer.embedding_dim if style == "embedding" else 0
    if isinstance(layer, nn.Linear) and style in ("column", "gathered", "row"):
        return layer.in_features if style == "row" else layer.out_features
    return 0


def resolve_plan(module: nn.Module, plan: Mapping[str, str], ranks: int) -> dict[str, str]:
    """The style of each layer, and of each number, that the patterns name.

    Args:
        module: The whole model.
        plan: Patterns such as ``"blocks.*.fc1"`` and their styles. ``"divide"`` is for a number: ``"blocks.*.heads"``.
        ranks: How many share a layer.

    Raises:
        MisconfigurationException: A pattern fits no name, or a layer cannot be cut that way; it says why.

    >>> net = nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 2))
    >>> resolve_plan(net, {"0": "column", "2": "row"}, 2)
    {'0': 'column', '2': 'row'}
    """
    layers = {name: m for name, m in module.named_modules() if isinstance(m, nn.Linear | nn.Embedding)}
    found: dict[str, str] = {}
    for pattern, style in plan.items():
        known = list(layers)
        if style == "divide":
            known = [f"{path}.{n}".lstrip(".") for path, m in module.named_modules() for n in numbers_of(m)]
        names = [name for name in known if fnmatchcase(name, pattern)]
        if not names:
            kind = "whole number" if style == "divide" else "nn.Linear or nn.Embedding"
            raise MisconfigurationException(
                f"tensor_plan names {pattern!r}, and there is no {kind} of that name.{did_you_mean(pattern, known)}"
            )
        for name in names:
            if found.get(name, style) != style:
                raise MisconfigurationException(
                    f"tensor_plan has two styles for {name!r}: {found[name]!r} and, by {pattern!r}, {style!r}."
                )
            found[name] = style
            _check_cut(module, name, style, ranks)
    _check_tied(module, found)
    return found


def _check_cut(module: nn.Module, name: str, style: str, ranks: int) -> None:
    if style == "divide":
        path, _, last = name.rpartition(".")
        size = numbers_of(module.get_submodule(path))[last]
    else:
        layer = module.get_submodule(name)
        size = cut_size(layer, style)
        if not size:
            raise MisconfigurationException(
                f"tensor_plan has {style!r} for {name!r}, which is a {type(layer).__name__}: nn.Linear takes 'column', "
                "'gathered' or 'row', nn.Embedding takes 'embedding'."
            )
    if size % ranks:
        raise MisconfigurationException(
            f"tensor_plan cuts {name!r} ({style!r}) of size {size}, which {ranks} ranks do not divide. Leave it out, "
            "or change the size or tensor_parallel."
        )


def _check_tied(module: nn.Module, plan: Mapping[str, str]) -> None:
    for names in shared_names(module).values():
        for name in names:
            if name.rpartition(".")[0] in plan:
                raise MisconfigurationException(
                    f"tensor_plan cuts {name!r}, which is tied to {[n for n in names if n != name]}. Leave it out, or "
                    "untie the weights."
                )


def apply_tensor_plan(module: nn.Module, plan: Mapping[str, str], mesh: DeviceMesh) -> dict[str, int]:
    """Cut the layers in place over the ranks of a mesh; returns the numbers that were divided, as they were."""
    divided: dict[str, int] = {}
    for name, style in plan.items():
        if style != "divide":
            parallelize_module(module.get_submodule(name), mesh, _style(style))
            continue
        path, _, last = name.rpartition(".")
        owner = module.get_submodule(path)
        divided[name] = getattr(owner, last)
        setattr(owner, last, divided[name] // dist.get_world_size(mesh.get_group()))
    return divided


def _style(name: str) -> ParallelStyle:
    if name == "row":
        return RowwiseParallel()
    if name == "column":
        return ColwiseParallel()
    return ColwiseParallel(output_layouts=Replicate())
