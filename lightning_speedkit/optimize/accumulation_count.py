"""What a micro-batch weighs in its accumulation window: its samples, its labels, or what a function says.

What it does: the mean loss of a language model is a mean over tokens, and a batch of sequences of different lengths has
more of them than another with as many sequences. When it helps: padded or packed sequences, ignored labels, masks
(Lightning #20350). What it costs: for labels, one comparison and one sum per micro-batch; nothing waits for the device.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping
from types import NoneType
from typing import Any

from torch import Tensor

from lightning_speedkit.errors import did_you_mean
from lightning_speedkit.optimize.accumulation_window import samples_in, whole_number

__all__ = ["COUNTS", "checked_count", "checked_labels", "counter_of", "labels_in"]

COUNTS = ("samples", "batches", "labels", "shifted-labels")
_OF_LABELS = ("labels", "shifted-labels")


def labels_in(batch: Any, labels: str | int = "labels", ignore_index: int = -100, shifted: bool = False) -> Tensor:
    """The number of labels in a batch that the loss is a mean over.

    Args:
        batch: A mapping, sequence, dataclass or other object that holds a tensor of labels.
        labels: Where they are: a key, an index, or a path of these joined by dots, such as ``"targets.labels"`` or
            ``"1.labels"``.
        ignore_index: The label that the loss leaves out, as in ``torch.nn.functional.cross_entropy``.
        shifted: Leave the first label of each row out, as a causal language model does that predicts label ``i + 1``
            from token ``i``.

    Returns:
        A whole number, as a tensor of no dimension on the device of the labels.

    Raises:
        ValueError: There is nothing at that place.
        TypeError: What is there is no tensor.

    >>> import torch
    >>> batch = {"labels": torch.tensor([[5, 2, -100], [7, -100, -100]])}
    >>> labels_in(batch), labels_in(batch, shifted=True)
    (tensor(3), tensor(1))
    >>> labels_in((torch.zeros(2, 3), batch), labels="1.labels")
    tensor(3)
    """
    found = batch
    for part in [labels] if _holds(batch, labels) else str(labels).split("."):
        found = _entry(found, part, labels)
    if not isinstance(found, Tensor):
        raise TypeError(f"labels={labels!r}: a batch must have a tensor at this place, and there is {found!r}.")
    if shifted and found.ndim:
        found = found[..., 1:]
    return (found != ignore_index).sum()


def counter_of(
    count: str | Callable[[Any], int | Tensor], labels: str | int | None = None, ignore_index: int = -100
) -> Callable[[Any], int | Tensor]:
    """The function that counts a batch.

    Args:
        count: ``"samples"``, ``"batches"`` (each counts 1), ``"labels"``, ``"shifted-labels"`` (see
            :func:`labels_in`), ``"module:function"``, or a function.
        labels: Where the labels are; ``None`` is ``"labels"``.
        ignore_index: The label that does not count.

    Raises:
        ValueError: The name is unknown, or names nothing that can be imported and called; or something is said of
            labels that are not counted.
        TypeError: ``labels`` is no key and no index, or ``ignore_index`` no whole number.

    >>> import torch
    >>> counter_of("samples")({"x": torch.zeros(8, 2)})
    8
    >>> counter_of("builtins:len")([1, 2, 3])
    3
    """
    _check_place(labels)
    if isinstance(ignore_index, bool) or not isinstance(ignore_index, int):
        raise TypeError(f"ignore_index={ignore_index!r} must be a whole number: the label that does not count.")
    if count not in _OF_LABELS and (labels not in (None, "labels") or ignore_index != -100):
        raise _no_effect(f"labels={labels!r} and ignore_index={ignore_index!r} have", count)
    if callable(count):
        return count
    if count == "samples":
        return samples_in
    if count == "batches":
        return _one
    if count in _OF_LABELS:
        labels = "labels" if labels is None else labels
        return functools.partial(labels_in, labels=labels, ignore_index=ignore_index, shifted=count == "shifted-labels")
    if isinstance(count, str) and ":" in count:
        return _imported(count)
    hint = did_you_mean("labels" if count == "tokens" else count, COUNTS, most=1)
    names = ", ".join(map(repr, COUNTS))
    raise ValueError(f"count={count!r} is unknown.{hint} Use {names}, 'module:function', or a function.")


def checked_labels(count: str | Callable[[Any], int | Tensor], labels: str | int | None) -> str | int:
    """Where the labels are: what was given, and ``"labels"`` if nothing was.

    Raises:
        ValueError: Something was given, the default too, and ``count`` counts no labels.
        TypeError: It is no key and no index.

    >>> checked_labels("labels", None), checked_labels("shifted-labels", "targets")
    ('labels', 'targets')
    """
    _check_place(labels)
    if labels is not None and count not in _OF_LABELS:
        raise _no_effect(f"labels={labels!r} has", count)
    return "labels" if labels is None else labels


def checked_count(count: Callable[[Any], int | Tensor], batch: Any) -> int | Tensor:
    """What ``count`` says of the batch, as :func:`whole_number` gives it.

    Raises:
        ValueError: It cannot tell.
        TypeError: It is no whole number.
    """
    try:
        samples = count(batch)
    except ValueError as error:
        raise ValueError(
            f"{error} AccumulationScheduler weighs a batch by it. Override count_samples(batch) in a subclass, or "
            "pass count='batches' to weigh all batches alike."
        ) from error
    if type(samples) is int and samples >= 0:
        return samples
    try:
        return whole_number(samples)
    except TypeError:
        raise TypeError(f"count_samples() has to return a whole number, and returned {samples!r}.") from None


def _check_place(labels: object) -> None:
    if isinstance(labels, bool) or not isinstance(labels, (str, int, NoneType)):
        raise TypeError(f"labels={labels!r} must be a key, an index, or a path such as 'targets.labels'.")


def _no_effect(what: str, count: object) -> ValueError:
    return ValueError(
        f"{what} no effect with count={count!r}. Pass count='labels' if the loss is a mean over labels, else leave "
        "that out."
    )


def _one(_batch: Any) -> int:
    return 1


def _imported(path: str) -> Callable[[Any], int | Tensor]:
    module, _, name = path.partition(":")
    try:
        found: Any = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"count={path!r} names nothing that can be imported: {error}.") from error
    if not callable(found):
        raise ValueError(f"count={path!r} names {found!r}, which cannot be called with a batch.")
    counter: Callable[[Any], int | Tensor] = found
    return counter


def _holds(batch: Any, key: str | int) -> bool:
    return isinstance(batch, Mapping) and key in batch  # also a key with a dot in it


def _entry(batch: Any, part: str | int, path: str | int) -> Any:
    if isinstance(batch, Mapping):
        if part in batch:
            return batch[part]
        has = ", ".join(map(repr, batch)) or "nothing"
    elif isinstance(batch, (list, tuple)) and str(part).lstrip("-").isdecimal():
        if -len(batch) <= int(part) < len(batch):
            return batch[int(part)]
        has = f"{len(batch)} entries"
    elif not isinstance(batch, Tensor) and hasattr(batch, str(part)):
        return getattr(batch, str(part))
    else:
        has = "no such entry"
    hint = did_you_mean(part, batch, most=1) if isinstance(batch, Mapping) else ""
    if isinstance(batch, (list, tuple)) and not str(part).lstrip("-").isdecimal():
        hint = f" Its {len(batch)} entries have indices: the labels of a pair (input, labels) are labels=1."
    raise ValueError(
        f"labels={path!r}: a {type(batch).__name__} of the batch has no {part!r}; it has {has}.{hint} Say where the "
        "labels are by a key, an index or a path such as 'targets.labels', or pass a function as count."
    )
