"""What a case is given, what it tells, and how it is called: here, or in the process that was made for it."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import json
import math
import re
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.worker import without_paths

__all__ = ["CaseRun", "call_case", "missing_need", "write_told"]

_PACKAGE = "benchmarks.gpu_cases"


class CaseRun:
    """Where a case runs, and where it puts its numbers and checks.

    ``budget_seconds`` is what its measurements should take, all together; the process is killed some time after it.
    What was told before that is kept. ``pick(tiny, full)`` is the one of the two that belongs to this run.
    """

    def __init__(
        self,
        budget_seconds: float,
        device: str,
        tiny: bool,
        publish: Callable[[dict[str, Any]], object] | None = None,
    ) -> None:
        self.budget_seconds = budget_seconds
        self.kind = device
        self.tiny = tiny
        self.numbers: dict[str, float] = {}
        self.checks: list[dict[str, Any]] = []
        self.notes: list[str] = []
        self.facts: dict[str, Any] = {}  # more for the file, not for the table
        self._publish = publish or (lambda _: None)

    @functools.cached_property
    def device(self) -> Any:
        """A ``torch.device``. Torch is imported for it and not above: not every process of the check needs it."""
        return importlib.import_module("torch").device(self.kind)

    @property
    def is_cuda(self) -> bool:
        return self.kind == "cuda"

    @property
    def is_small(self) -> bool:
        """A device with less than 30 GiB, for which the sizes are a quarter."""
        return self.is_cuda and _of_device("memory") < 30

    def pick(self, tiny: Any, full: Any) -> Any:
        return tiny if self.tiny else full

    def number(self, name: str, value: float) -> None:
        """A finite number; the name ends with its unit: ``bf16 ms``, ``bf16 x`` (times as fast), ``peak MiB``."""
        if not math.isfinite(value):
            self.check(name, False, f"it is {value}")
            return
        self.numbers[name] = float(value)
        self._publish(self.told())

    def check(self, name: str, ok: bool, reason: str = "") -> None:
        """Whether something is right; ``reason`` has the numbers behind it."""
        self.checks.append({"name": name, "ok": bool(ok), "reason": reason})
        self._publish(self.told())

    def note(self, text: str) -> None:
        """Something to know when the numbers are read."""
        self.notes.append(text)

    def told(self) -> dict[str, Any]:
        return {"numbers": dict(self.numbers), "checks": list(self.checks), "notes": list(self.notes), **self.facts}


def missing_need(needs: Sequence[str], device: str, ask_device: bool = True) -> str | None:
    """The first need that is not met, or ``None``. Without ``ask_device`` what only the device can tell is left out.

    >>> missing_need(["json", "cuda"], "cpu"), missing_need(["json", "no_such_module"], "cpu")
    ('cuda', 'no_such_module')
    """
    for need in needs:
        found = re.fullmatch(r"(capability|memory)>=([0-9.]+)", need)
        if need == "cuda" or found:
            if device != "cuda":
                return "cuda"
            if found and ask_device and _of_device(found[1]) < float(found[2]):
                return need
        elif not any(importlib.util.find_spec(module) for module in need.split(" or ")):
            return need
    return None


def _of_device(what: str) -> float:
    torch = importlib.import_module("torch")
    if what == "memory":
        return float(torch.cuda.get_device_properties(0).total_memory / 2**30)
    major, minor = torch.cuda.get_device_capability(0)
    return float(major + minor / 10)


def call_case(
    function: str,
    needs: Sequence[str],
    run: CaseRun,
) -> dict[str, Any]:
    """Call a case. Its status is ``ok``, ``wrong`` (a check failed), ``error``, or ``needs ...``."""
    start = time.perf_counter()
    status, error = "ok", None
    missing = missing_need(needs, run.kind)
    if missing is not None:
        status = f"needs {missing}"
    else:
        try:
            module, _, name = function.partition(":")
            found = importlib.import_module(module if "." in module else f"{_PACKAGE}.{module}")
            getattr(found, name)(run)
            if run.is_cuda:
                importlib.import_module("torch").cuda.synchronize()  # errors of kernels come late
        except Exception as caught:
            status, error = "error", _last_words(caught)
        if status == "ok" and not all(check["ok"] for check in run.checks):
            status = "wrong"
    return {**run.told(), "status": status, "error": error, "case_seconds": time.perf_counter() - start}


def _last_words(error: BaseException) -> str:
    lines = traceback.format_exception(type(error), error, error.__traceback__)
    where = [line.strip().splitlines()[0] for line in lines if "gpu_cases" in line or "lightning_speedkit" in line]
    return without_paths(f"{str(lines[-1]).strip()[:1500]}\n{where[-1] if where else ''}").strip()


def write_told(path: Path, told: dict[str, Any]) -> None:
    """By rename: a process that is killed leaves the last whole one."""
    part = path.with_suffix(".part")
    part.write_text(json.dumps(told))
    part.replace(path)
