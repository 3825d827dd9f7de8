"""Random numbers that nobody else will miss: what is drawn inside changes nothing outside."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from lightning.pytorch.utilities.seed import isolate_rng

__all__ = ["own_random_numbers"]


@contextmanager
def own_random_numbers(device: torch.device | str = "cpu") -> Iterator[None]:
    """The random states of torch, NumPy and Python are put back afterwards, also after an error.

    Those of CUDA devices are among them if CUDA is in use already, or is ``device``; it is not started for them else.

    >>> before = torch.get_rng_state()
    >>> with own_random_numbers():
    ...     _ = torch.manual_seed(1), torch.rand(3)
    >>> torch.equal(torch.get_rng_state(), before)
    True
    """
    in_use = torch.device(device).type == "cuda" or torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    kept = isolate_rng(include_cuda=in_use)
    kept.__enter__()
    try:
        yield
    finally:
        kept.__exit__(None, None, None)  # without the error: it puts nothing back where it sees one
