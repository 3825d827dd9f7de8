"""The cases of the leak benchmark: ten of each kind; one of each is run here, shortly, as the script runs them."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path
from typing import Any

from benchmarks.leaks import CLEAN, LEAKS, measure, variants
from tests.preloaded import start_forked


def test_there_are_ten_leaks_and_ten_clean_runs() -> None:
    assert len(LEAKS) == len(CLEAN) == 10
    names = [variant.name for variant in variants()]
    assert len(names) == len(set(names)) == 22
    for _, pattern in LEAKS.values():
        re.compile(pattern)


def _measure(*arguments: Any) -> dict[str, float]:
    return measure(*arguments)


def test_one_of_each_runs(tmp_path: Path) -> None:
    leak = "hook registered in each step"
    cases = [(leak, 280, True, LEAKS[leak][1]), ("growth, then plateau", 200)]
    with contextlib.ExitStack() as stack:
        logs = [tmp_path / f"{number}.txt" for number in range(len(cases))]
        pairs = zip(cases, logs, strict=True)
        runs = [stack.enter_context(start_forked(_measure, *case, log=log)) for case, log in pairs]
        assert [run.wait(120.0) for run in runs] == [0, 0], [log.read_text() for log in logs]
        found, clean = (run.result() for run in runs)
    assert (found["found"], found["named"]) == (1.0, 1.0)
    assert clean["found"] == 0.0
