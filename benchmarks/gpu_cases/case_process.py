"""A fresh process for one case, which imports what all cases need before it is told which one it is for.

So the imports of the next case overlap with the case that runs. CUDA is first touched by the case itself.

    python -m benchmarks.gpu_cases.case_process FOLDER    (started by CaseProcess)
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.processes import descendants
from benchmarks.worker import ROOT, without_paths

__all__ = ["CaseProcess"]

_READY, _ASKED, _TOLD, _LOG = "ready", "asked.json", "told.json", "log.txt"
_POLL = 0.01  # seconds
_START = 90.0  # seconds for the imports


class CaseProcess:
    """A process that waits for its case. ``close`` ends it with all that it has started, at any time."""

    def __init__(self, warm: bool = True, environment: dict[str, str] | None = None) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="gpu-check-", ignore_cleanup_errors=True)
        caches = {"TORCHINDUCTOR_CACHE_DIR": str(self._path("inductor"))}  # empty: compiling takes what it takes
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
        with self._path(_LOG).open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.gpu_cases.case_process", self._folder.name, str(int(warm))],
                env={**os.environ, **caches, **(environment or {}), "PYTHONPATH": path},
                cwd=self._folder.name,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def run(
        self, function: str, needs: Sequence[str], device: str, tiny: bool, limit: float, budget_seconds: float
    ) -> dict[str, Any]:
        """Call the case; what it told, its status, its error if any. Killed ``limit`` seconds after it was ready."""
        asked = {"function": function, "needs": list(needs), "device": device, "tiny": tiny, "budget": budget_seconds}
        part = self._path(_ASKED).with_suffix(".part")
        part.write_text(json.dumps(asked))
        end = time.monotonic() + _START
        while not self._path(_READY).exists() and time.monotonic() < end and not self._ended(_POLL):
            pass
        part.replace(self._path(_ASKED))
        done = self._ended(limit)
        code = self._kill()
        told: dict[str, Any] = {"numbers": {}, "checks": [], "notes": []}
        with contextlib.suppress(OSError, ValueError):
            told = json.loads(self._path(_TOLD).read_text())
        if "status" in told:
            return told
        why = f"the process ended with exit code {code}" if done else f"not done within {limit:.3g} s: killed"
        words = without_paths(self._path(_LOG).read_text(errors="replace")[-1500:]).strip()
        return {**told, "status": "error", "error": f"{why}\n{words}".strip()}

    def close(self) -> None:
        self._kill()
        self._folder.cleanup()

    def _path(self, name: str) -> Path:
        return Path(self._folder.name, name)

    def _ended(self, seconds: float) -> bool:
        """Whether it ends within so many seconds. It is not reaped yet, so that its number stays its own."""
        handle = os.pidfd_open(self._process.pid)
        try:
            poll = select.poll()
            poll.register(handle, select.POLLIN)
            return bool(poll.poll(max(0.0, seconds) * 1000))
        finally:
            os.close(handle)

    def _kill(self) -> int:
        """End it with all that it has started, which may be in its group when it has ended itself."""
        if self._process.returncode is None:
            for each in descendants(self._process.pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(each, signal.SIGKILL)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        return self._process.wait()


def _serve(folder: Path, warm: bool) -> None:
    parent = os.getppid()
    if warm:
        import lightning.pytorch  # noqa: F401

        import lightning_speedkit  # noqa: F401
    from benchmarks.gpu_cases.case_run import CaseRun, call_case, write_told

    (folder / _READY).touch()
    while not (folder / _ASKED).exists():
        if os.getppid() != parent:  # who started this one has gone
            return
        time.sleep(_POLL)
    asked = json.loads((folder / _ASKED).read_text())
    told = folder / _TOLD
    run = CaseRun(asked["budget"], asked["device"], asked["tiny"], lambda partly: write_told(told, partly))
    write_told(told, call_case(asked["function"], asked["needs"], run))
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(0)  # what a case left behind, threads or a broken device, shall not hold it up


if __name__ == "__main__":
    _serve(Path(sys.argv[1]), sys.argv[2] == "1")
