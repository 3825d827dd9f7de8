"""The weights of a teacher, from a file of a Trainer or of a ``state_dict``; nothing in it is executed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.serialization import get_unsafe_globals_in_checkpoint

__all__ = ["is_of_trainer", "load_weights", "read_weights", "refuse_weights"]


def read_weights(path: Path) -> Mapping[str, Any]:
    """The content of ``path``: a ``state_dict``, or what a Trainer saves, which holds one.

    Raises:
        OSError: There is no such file.
        ValueError: It is none of the two, or would execute code when it is loaded.
    """
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except OSError:
        raise
    except Exception as error:  # what torch and pickle raise of a foreign file is not documented
        raise ValueError(_unreadable(path)) from error
    if not isinstance(content, Mapping) or not isinstance(content.get("state_dict", content), Mapping):
        raise ValueError(f"checkpoint={str(path)!r} holds no weights by name. {_WANTED}")
    return content


def is_of_trainer(content: Mapping[str, Any]) -> bool:
    """Whether a Trainer wrote it, so that a LightningModule can be made from it with its hyperparameters."""
    return "state_dict" in content and "pytorch-lightning_version" in content


def load_weights(teacher: nn.Module, content: Mapping[str, Any], path: Path) -> None:
    """Put the weights in ``content`` into ``teacher``, also where they were saved as those of an attribute.

    ValueError if names or shapes differ.
    """
    state: Mapping[str, Any] = content.get("state_dict", content)
    wanted = teacher.state_dict()
    # a LightningModule saves its network under the name of the attribute that holds it
    prefixes = ["", *sorted({key[: i + 1] for key in state for i, c in enumerate(key) if c == "."}, key=len)]
    named = ({key[len(p) :]: value for key, value in state.items() if key.startswith(p)} for p in prefixes)
    inside = next((found for found in named if set(found) == set(wanted)), None)
    if inside is None:
        lacks, has = sorted(set(wanted) - set(state))[:3] or "none", sorted(set(state) - set(wanted))[:3] or "none"
        raise refuse_weights(type(teacher), path, f"it lacks {lacks}, and has {has} beside them")
    for name, value in wanted.items():
        if isinstance(value, Tensor) and value.shape != getattr(inside[name], "shape", None):
            now, saved = tuple(value.shape), tuple(getattr(inside[name], "shape", ()))
            raise refuse_weights(
                type(teacher), path, f"{name!r} has shape {now} in the teacher and {saved} in the file"
            )
    teacher.load_state_dict(inside)


def refuse_weights(cls: type, path: Path, why: str) -> ValueError:
    """The error for weights that are not those of a ``cls``."""
    return ValueError(
        f"The weights in {str(path)!r} are not those of the teacher, a {cls.__name__}: {why}. Give a teacher of the "
        "structure that was saved."
    )


_WANTED = "Give the checkpoint of a Trainer, or what torch.save(net.state_dict(), path) wrote."


def _unreadable(path: Path) -> str:
    try:
        unsafe = get_unsafe_globals_in_checkpoint(str(path))
    except Exception:  # it is no file of torch at all
        unsafe = []
    if not unsafe:
        return f"checkpoint={str(path)!r} is no checkpoint, or is damaged. {_WANTED}"
    return (
        f"checkpoint={str(path)!r} holds more than weights ({', '.join(sorted(unsafe)[:3])}), and would execute code "
        f"when it is loaded. {_WANTED} If you trust it, torch.serialization.add_safe_globals() allows what it names."
    )
