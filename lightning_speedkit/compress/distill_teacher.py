"""A teacher network: made from a name or taken as it is, asked without gradients, and given back as it was found."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities import rank_zero_warn
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn

from lightning_speedkit.compress.distill_weights import is_of_trainer, load_weights, read_weights, refuse_weights
from lightning_speedkit.measure.own_random_numbers import own_random_numbers

__all__ = ["Teacher", "made_teacher"]


def made_teacher(source: str | nn.Module | Callable[[], nn.Module], checkpoint: str | None = None) -> nn.Module:
    """The network that ``source`` is or makes, with the weights of ``checkpoint``.

    A class that is made without a checkpoint gets a warning: its weights are drawn at random, unless it loads its own.

    Args:
        source: A module; a function or class that makes one; or the path of such a function, ``"package.module:Name"``.
        checkpoint: A file of weights: that of a Trainer, or of a ``state_dict``. Nothing in it is executed. A class of
            LightningModule is made with the hyperparameters that the file of a Trainer holds.

    Raises:
        ValueError: ``source`` names nothing, needs arguments, or the weights do not fit; the file is no checkpoint.
        TypeError: What it makes is no module.

    >>> made_teacher("torch.nn:Identity")
    Identity()
    """
    make: Any = _found(source) if isinstance(source, str) else source
    content = None if checkpoint is None else read_weights(Path(checkpoint))
    with own_random_numbers():  # the first weights of a network are drawn at random
        is_lightning = isinstance(make, type) and issubclass(make, LightningModule)
        if checkpoint is not None and content is not None and is_lightning and is_of_trainer(content):
            return _from_trainer(make, Path(checkpoint))
        teacher = make if isinstance(make, nn.Module) else _made(make, source)
    if not isinstance(teacher, nn.Module):
        raise TypeError(f"teacher must be or make a torch.nn.Module, and {source!r} gave a {type(teacher).__name__}.")
    if checkpoint is not None and content is not None:
        load_weights(teacher, content, Path(checkpoint))
    elif isinstance(make, type) and next(teacher.parameters(), None) is not None:
        rank_zero_warn(
            f"The teacher is a new {make.__name__} whose weights were drawn at random, unless the class loads some: a "
            "student learns nothing from them. Give checkpoint=..., or a function that makes the teacher with weights."
        )
    return teacher


class Teacher:
    """A network in eval mode on a device, until :meth:`give_back`.

    ``features`` names modules inside it whose output is kept of each call.
    """

    def __init__(self, network: nn.Module, device: torch.device, features: Sequence[str] = ()) -> None:
        self._network = network
        self._modes = [(module, module.training) for module in network.modules()]
        devices = {tensor.device for tensor in (*network.parameters(), *network.buffers())}
        self._was_on = next(iter(devices)) if len(devices) == 1 else None  # one that is spread out stays so
        self._kept: dict[str, Any] = {}
        self._handles = [
            network.get_submodule(name).register_forward_hook(self._keeper(name), always_call=False)
            for name in features
        ]
        network.eval()
        if self._was_on is not None:
            network.to(device)
        floats = [p.dtype for p in network.parameters() if p.is_floating_point()]
        self._dtype = floats[0] if floats else None
        self._device = device

    @torch.no_grad()
    def __call__(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
        """What it answers, and the outputs of ``features``."""
        if self._dtype is not None and not torch.is_autocast_enabled(self._device.type):
            args, kwargs = apply_to_collection(  # of a student in half precision
                (tuple(args), dict(kwargs)), Tensor, lambda t: t.to(self._dtype) if t.is_floating_point() else t
            )
        self._kept = {}
        answer = self._network(*args, **kwargs)
        kept, self._kept = self._kept, {}
        return answer, kept

    def give_back(self) -> None:
        """Put the network back into the mode and onto the device that it had."""
        for handle in self._handles:
            handle.remove()
        if self._was_on is not None:
            self._network.to(self._was_on)
        for module, mode in self._modes:
            module.training = mode

    def _keeper(self, name: str) -> Callable[..., None]:
        def keep(_: nn.Module, __: Any, output: Any) -> None:
            self._kept[name] = output

        return keep


def _found(path: str) -> Any:
    module, _, name = path.partition(":")
    try:
        found: Any = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(
            f"teacher={path!r} names nothing that can be imported ({error}). Write 'package.module:Name', the path of "
            "a class or function that makes the teacher."
        ) from error
    return found


def _made(make: Callable[[], Any], source: Any) -> Any:
    try:
        inspect.signature(make).bind()
    except TypeError as error:
        raise ValueError(
            f"teacher={source!r} cannot be made without arguments ({error}). Give the module itself, a function that "
            "makes it, or, of a LightningModule that calls save_hyperparameters(), the checkpoint of a Trainer."
        ) from error
    except ValueError:  # some builtin callables have no signature
        pass
    return make()


def _from_trainer(cls: type[LightningModule], path: Path) -> LightningModule:
    try:
        return cls.load_from_checkpoint(path, map_location="cpu", weights_only=True)
    except TypeError as error:
        raise ValueError(
            f"{cls.__name__} cannot be made with the hyperparameters in {str(path)!r} ({error}). Give a function that "
            "makes it with its arguments."
        ) from error
    except RuntimeError as error:
        told = " ".join(str(error).split())
        if not told.startswith("Error(s) in loading state_dict"):
            raise
        raise refuse_weights(cls, path, f"{told:.400}") from error
