"""Sees how a training step calls its network, and what that answers, without a change to the module's code."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

__all__ = ["NetworkCall", "WatchedCalls", "check_calls"]


@dataclass(slots=True)
class NetworkCall:
    """One call of the network ``name``, its output, and those of the modules inside that are watched."""

    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any
    features: dict[str, Any] = field(default_factory=dict)


class WatchedCalls:
    """Watches the calls of ``network``, or by default those of ``root`` and of the networks that it holds.

    Of calls within a call only the outermost counts, and only with gradients: a step that computes a metric or a target
    under ``no_grad`` learns nothing there. ``features`` names modules of ``root`` whose outputs are kept.

    >>> root = nn.Sequential(nn.Linear(2, 3))
    >>> watched = WatchedCalls(root)
    >>> with watched.watching() as calls:
    ...     _ = root(torch.ones(1, 2))
    >>> [(call.name, tuple(call.output.shape)) for call in calls]
    [('', (1, 3))]
    >>> watched.remove()
    """

    def __init__(self, root: nn.Module, network: str | None = None, features: Sequence[str] = ()) -> None:
        self._calls: list[NetworkCall] | None = None
        self._features: dict[str, Any] = {}
        self._depth = 0
        self._handles: list[RemovableHandle] = []
        held = [name for name, child in root.named_children() if next(child.parameters(), None) is not None]
        for name in [network] if network is not None else ["", *held]:
            module = root.get_submodule(name)
            # plain functions, which a copy of the module shares, and which do nothing outside watching()
            self._handles.append(module.register_forward_pre_hook(self._entering(), with_kwargs=True))
            self._handles.append(module.register_forward_hook(self._leaving(name), with_kwargs=True, always_call=True))
        for name in features:
            self._handles.append(root.get_submodule(name).register_forward_hook(self._keeping(name)))

    @contextmanager
    def watching(self) -> Iterator[list[NetworkCall]]:
        """The list fills with the calls that are made inside the block."""
        self._calls, self._features, self._depth = [], {}, 0
        try:
            yield self._calls
        finally:
            self._calls, self._features = None, {}

    def remove(self) -> None:
        """Take the hooks away."""
        for handle in self._handles:
            handle.remove()

    def _entering(self) -> Callable[..., None]:
        def enter(*_: Any) -> None:
            if self._calls is not None:
                self._depth += 1

        return enter

    def _leaving(self, name: str) -> Callable[..., None]:
        def leave(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            if self._calls is None:
                return
            self._depth -= 1
            if self._depth == 0:
                features, self._features = self._features, {}
                if not torch.is_grad_enabled():
                    return
                self._calls.append(NetworkCall(name, args, kwargs, output, features))

        return leave

    def _keeping(self, name: str) -> Callable[..., None]:
        def keep(_: nn.Module, __: Any, output: Any) -> None:
            if self._calls is not None:
                self._features[name] = output

        return keep


def check_calls(calls: Sequence[NetworkCall], versions: Mapping[int, int], name: str) -> None:
    """Raise unless ``calls`` are of one network, whose inputs it left as they were.

    ``versions`` are those of the tensors of the batch before the step, by ``id``; ``name`` is that of the module.

    Raises:
        MisconfigurationException: There is no call, or one of several networks, or an input was written into.
    """
    if not calls:
        raise MisconfigurationException(
            f"{name}.training_step called neither the module nor a network that it holds, not with gradients, so "
            "Distillation sees no logits. Name the submodule that yields them by student=..."
        )
    if len(names := {call.name for call in calls}) > 1:
        told = ", ".join(sorted(each or "the module itself" for each in names))
        raise MisconfigurationException(
            f"{name}.training_step called several networks ({told}), and Distillation cannot tell which of them "
            "the teacher stands beside. Call them in one forward, or name one by student=..."
        )
    for leaf in (leaf for call in calls for leaf in tree_leaves((call.args, call.kwargs))):
        if isinstance(leaf, Tensor) and leaf._version != versions.get(id(leaf), leaf._version):
            raise MisconfigurationException(
                f"{name} writes into its input, so the teacher would get something else than the student did. Let the "
                "first layer work on a copy, as nn.ReLU(inplace=False) does."
            )
