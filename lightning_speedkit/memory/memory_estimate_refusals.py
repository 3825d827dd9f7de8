"""What to do where a step cannot run without data."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)

__all__ = ["telling_what_to_do"]

_WITHOUT_DATA = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)


@contextlib.contextmanager
def telling_what_to_do(method: str) -> Iterator[None]:
    """Raises ``ValueError`` in place of what fake tensors say about an operation that needs values."""
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
        raise
