"""The random state of Python and of numpy, which ``torch.utils.checkpoint`` does not replay: only torch's own.

What it costs: reading it takes some microseconds for Python's generator and tens of them for numpy's, on the host.
Generators that a module owns (``random.Random()``, ``numpy.random.default_rng()``, ``torch.Generator()``) are not
covered: nothing lists them.
"""

from __future__ import annotations

import random
from typing import Any

import numpy

__all__ = ["read_host_random", "write_host_random"]


def read_host_random() -> tuple[Any, ...]:
    """The state of ``random`` and ``numpy.random``, as a value that can be compared with ``==``.

    >>> before = read_host_random()
    >>> drawn, moved = random.random(), read_host_random() != before
    >>> write_host_random(before)
    >>> moved, read_host_random() == before, random.random() == drawn
    (True, True, True)
    """
    state = numpy.random.get_state(legacy=False)
    if state["bit_generator"] != "MT19937":  # one set by numpy.random.set_bit_generator, which set_state refuses
        return random.getstate(), None
    inner = state["state"]
    return random.getstate(), (inner["key"].tobytes(), inner["pos"], state["has_gauss"], state["gauss"])


def write_host_random(state: tuple[Any, ...]) -> None:
    """Puts back what :func:`read_host_random` returned."""
    python, legacy = state
    random.setstate(python)
    if legacy is not None:
        numpy.random.set_state(("MT19937", numpy.frombuffer(legacy[0], numpy.uint32), *legacy[1:]))
