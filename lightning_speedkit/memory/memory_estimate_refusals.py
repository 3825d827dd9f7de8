"""What to do where a step cannot run without data."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import Any

from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)
from torch.utils._pytree import tree_map

__all__ = ["telling_what_to_do"]

_WITHOUT_DATA = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)


@contextlib.contextmanager
def telling_what_to_do(method: str, batch: Any = None) -> Iterator[None]:
    """Raises ``ValueError`` in place of what fake tensors say about an operation that needs values.

    To other errors of the step it adds what the step was run on, and torch's log of them is left out.
    """
    log, nothing = logging.getLogger("torch._subclasses.fake_tensor"), lambda _: False
    log.addFilter(nothing)
    try:
        yield
    except _WITHOUT_DATA as error:
        operation = getattr(error, "func", None) or str(error)
        raise ValueError(
            f"The step needs the values of a tensor ({operation}), for example by .item(), a condition, a mask that "
            f"selects, or a metric; an estimate without data has none. Leave that out of the step, or use "
            f"method='run', which really runs two steps where the module is."
        ) from error
    except RuntimeError as error:
        if method == "fake" and "not attached to a `Trainer`" in str(error):
            raise ValueError(
                "training_step asks for self.trainer, which an estimate does not have. Guard it "
                "(`if self._trainer is not None`), or pass the network inside with a loss."
            ) from error
        _say_on_what(error, batch)
        raise
    except (TypeError, IndexError, KeyError) as error:
        _say_on_what(error, batch)
        raise
    finally:
        log.removeFilter(nothing)


def _say_on_what(error: Exception, batch: Any) -> None:
    if batch is None or not hasattr(error, "add_note"):  # from Python 3.11 on
        return
    shapes = tree_map(lambda leaf: list(leaf.shape) if isinstance(leaf, Tensor) else type(leaf).__name__, batch)
    error.add_note(
        f"estimate_memory ran the step on a batch of these shapes: {shapes}. A plain module is called with it, a "
        "tuple as several arguments; with loss=..., batch is a pair of inputs and target."
    )
