"""A worker that is being started does not hear Ctrl-C, and the process that starts it hears it as before."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lightning_speedkit.data.loading import quiet_start
from lightning_speedkit.data.loading.quiet_start import start_quietly

FOLDER = str(Path(quiet_start.__file__).parent)  # where it can be imported without torch, which takes seconds

SCRIPT = """
import multiprocessing, os, signal, sys, time
from quiet_start import ignore_interrupts, start_quietly

def work():
    os.kill(os.getpid(), signal.SIGINT)  # it comes before the worker is ready
    time.sleep(0.2)
    ignore_interrupts()
    os.kill(os.getpid(), signal.SIGINT)
    sys.stdout.write("worked")
    sys.stdout.flush()

if __name__ == "__main__":
    process = multiprocessing.get_context("fork").Process(target=work)
    start_quietly(process)
    process.join()
    sys.exit(process.exitcode)
"""


def test_an_interrupt_before_the_worker_is_ready_is_dropped() -> None:
    result = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env={**os.environ, "PYTHONPATH": FOLDER},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert (result.returncode, result.stdout) == (0, "worked"), result.stderr
    assert "KeyboardInterrupt" not in result.stderr


MASKS = """
import signal, sys
from multiprocessing import get_context, resource_tracker

def show():
    print(signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, []), flush=True)

if __name__ == "__main__":
    from quiet_start import start_quietly
    if "tracker" in sys.argv:
        resource_tracker.ensure_running()
    for how in sys.argv[2].split(","):
        process = get_context(sys.argv[1]).Process(target=show)
        start_quietly(process) if how == "quietly" else process.start()
        process.join()
    show()
"""


@pytest.mark.parametrize(
    ("arguments", "blocked"),
    [
        (("spawn", "quietly,quietly"), "True True False"),  # the first one starts the resource tracker too
        (("fork", "quietly,plainly"), "True False False"),
        (("forkserver", "quietly,plainly", "tracker"), "False False False"),  # the server is not only ours
    ],
)
def test_who_hears_an_interrupt(tmp_path: Path, arguments: tuple[str, ...], blocked: str) -> None:
    script = tmp_path / "masks.py"
    script.write_text(MASKS)
    result = subprocess.run(
        [sys.executable, str(script), *arguments],
        env={**os.environ, "PYTHONPATH": FOLDER},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert result.stdout.split() == blocked.split(), result.stderr


class Fails:
    def start(self) -> None:
        assert signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, set())
        raise TypeError("cannot be sent")


@pytest.mark.parametrize("blocked", [set(), {signal.SIGUSR1}, {signal.SIGINT}])
def test_the_mask_is_left_as_found_also_after_a_failure(blocked: Any) -> None:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, blocked)
    try:
        with pytest.raises(TypeError, match="cannot be sent"):
            start_quietly(Fails())
        assert signal.pthread_sigmask(signal.SIG_BLOCK, set()) == before | blocked
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
