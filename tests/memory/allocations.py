"""What the CPU's allocator records in a run, independent of the kit's own count."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable
from typing import Any

from torch.profiler import ProfilerActivity, profile


def allocated_peak(run: Callable[[], Any]) -> int:
    """The most bytes given out at once, beyond what was there before.

    Tensors of an earlier recorded run that only the garbage collector frees would count as taken back in this one.
    """
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as told:
        run()
    events = told.profiler.kineto_results.events()  # type: ignore[union-attr]
    changes = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
    return max(itertools.accumulate(change for _, change in changes))
