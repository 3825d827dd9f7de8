"""Processes that begin with torch, Lightning and the kit imported, which alone takes longer than most tests.

They are forked from a server that has imported these and done nothing else: it has one thread, no process group, and
no random number drawn. So each is as fresh as a new interpreter, but for what imports leave behind; what tests that,
starts an interpreter of its own. The server ends with the process that asked for it, and ends what it has started.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import importlib
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any

__all__ = ["ROOT", "Forked", "run_forked", "start_forked"]

ROOT = Path(__file__).resolve().parent.parent
_IMPORTS = (
    "torch.distributed.tensor",
    "torch.distributed.fsdp",
    "torch.utils.data",
    "torchmetrics",
    "lightning.pytorch",
    "lightning.pytorch.demos.boring_classes",
    "lightning_speedkit",
    "lightning_speedkit.data",
    "lightning_speedkit.optimize",
    "pytest",
    "yaml",
)
_START = 180.0  # seconds; a busy machine takes long to import torch


class _Server:
    """The process that others are forked from, as seen by the one that asks for them."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._pipe, theirs = Pipe()
        self.codes: dict[int, int] = {}
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "PYTHONPATH": _search_path()}
        with theirs, Path(self._folder.name, "log.txt").open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.preloaded", str(theirs.fileno())],
                env=environment,
                cwd=self._folder.name,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        atexit.register(self.close)

    def fork(self, request: dict[str, Any]) -> int:
        self._pipe.send(request)
        while (told := self._next(_START))[0] != "started":
            self.codes[told[1]] = told[2]
        return int(told[1])

    def listen(self, seconds: float) -> None:
        """Take in which processes have ended, for as long as it says nothing new."""
        while self._pipe.poll(seconds):
            _, pid, code = self._next(0.0)
            self.codes[pid] = code
            seconds = 0.0

    def close(self) -> None:
        atexit.unregister(self.close)
        self._pipe.close()  # at which it ends by itself
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(10.0)
        self._process.kill()
        self._process.wait()
        self._folder.cleanup()

    def _next(self, seconds: float) -> tuple[Any, ...]:
        try:
            if self._pipe.poll(seconds):
                told: tuple[Any, ...] = self._pipe.recv()
                return told
        except (EOFError, OSError):
            pass
        log = Path(self._folder.name, "log.txt").read_text(errors="replace")
        raise RuntimeError(f"The server of processes does not answer:\n{log}")


_server: tuple[int, _Server] | None = None  # of the process with this id


def _the_server() -> _Server:
    global _server
    if _server is None or _server[0] != os.getpid():
        _server = os.getpid(), _Server()
    return _server[1]


class Forked:
    """A process that runs ``function(*arguments)`` of a test module, in a session of its own; used as a context.

    At the end of the context it, and what it has started in its session, is killed.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        arguments: tuple[Any, ...],
        environment: Mapping[str, str],
        log: Path,
        errors: Path,
    ) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._result = Path(self._folder.name, "result.pickle")
        call = Path(self._folder.name, "call.pickle")
        call.write_bytes(pickle.dumps((function.__module__, function.__qualname__, arguments)))
        self._server = _the_server()
        self.pid = self._server.fork(
            {
                "environment": {**os.environ, "PYTHONPATH": _search_path(), "OMP_NUM_THREADS": "1", **environment},
                "folder": str(Path.cwd()),
                "log": str(log),
                "errors": str(errors),
                "call": str(call),
                "result": str(self._result),
            }
        )

    def __enter__(self) -> Forked:
        return self

    def __exit__(self, *error: object) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)  # one that has no group yet
            self.wait(30.0)
        self._folder.cleanup()

    def poll(self) -> int | None:
        """Its exit code, negative for a signal; ``None`` while it runs."""
        self._server.listen(0.0)
        return self._server.codes.get(self.pid)

    def wait(self, seconds: float) -> int | None:
        """The same, when it has ended or the time is over."""
        end = time.monotonic() + seconds
        while (code := self.poll()) is None and (left := end - time.monotonic()) > 0:
            self._server.listen(left)
        return code

    def show_where_it_is(self) -> None:
        """Let one that hangs print the place of each thread to its errors."""
        os.kill(self.pid, signal.SIGUSR1)
        self.wait(0.5)

    def result(self) -> Any:
        """What the function has returned."""
        return pickle.loads(self._result.read_bytes())


def start_forked(
    function: Callable[..., Any],
    *arguments: Any,
    log: Path,
    errors: Path | None = None,
    environment: Mapping[str, str] | None = None,
) -> Forked:
    """Start ``function(*arguments)``; arguments and result must pickle. What it prints goes to the files."""
    return Forked(function, arguments, environment or {}, log, errors or log)


def run_forked(
    function: Callable[..., Any],
    *arguments: Any,
    timeout: float = 120.0,
    environment: Mapping[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """The process of ``function(*arguments)`` when it has ended, with what it printed.

    Raises:
        subprocess.TimeoutExpired: It was not done in time, and was killed.
    """
    with tempfile.TemporaryDirectory() as folder:
        log, errors = Path(folder, "log.txt"), Path(folder, "errors.txt")
        with start_forked(function, *arguments, log=log, errors=errors, environment=environment) as process:
            code = process.wait(timeout)
        output, error = log.read_text(errors="replace"), errors.read_text(errors="replace")
    if code is None:
        raise subprocess.TimeoutExpired(function.__qualname__, timeout, output, error)
    return subprocess.CompletedProcess([function.__qualname__], code, output, error)


def _search_path() -> str:
    return os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))


def _serve(pipe: Connection) -> None:
    for name in _IMPORTS:
        importlib.import_module(name)
    threads = [task.joinpath("comm").read_text().strip() for task in Path("/proc/self/task").iterdir()]
    others = [name for name in threads if not name.startswith("jemalloc")]  # that of pyarrow, which minds forks
    if len(others) > 1:
        raise RuntimeError(f"An import has started a thread, which what is forked now would lack: {others}.")
    running: dict[int, int] = {}  # the descriptor that tells of a process's end
    while True:
        for ready in wait([pipe, *running]):
            if isinstance(ready, int):
                _, status = os.waitpid(running.pop(ready), 0)
                os.close(ready)
                pipe.send(("ended", _, os.waitstatus_to_exitcode(status)))
                continue
            try:
                request = pipe.recv()
            except (EOFError, OSError):
                for pid in running.values():
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(pid, signal.SIGKILL)
                return
            sys.stdout.flush()
            pid = os.fork()
            if pid == 0:
                pipe.close()
                for descriptor in running:
                    os.close(descriptor)
                _become(request)
            running[os.pidfd_open(pid)] = pid
            pipe.send(("started", pid, 0))


def _become(request: dict[str, Any]) -> None:
    """Runs in what was forked, and ends it."""
    code = 1
    try:
        os.setsid()
        for descriptor, path in ((1, request["log"]), (2, request["errors"])):
            opened = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            os.dup2(opened, descriptor)
            os.close(opened)
        os.environ.clear()
        os.environ.update(request["environment"])
        os.chdir(request["folder"])
        signal.signal(signal.SIGINT, signal.default_int_handler)
        faulthandler.enable()
        faulthandler.register(signal.SIGUSR1, all_threads=True)
        module, name, arguments = pickle.loads(Path(request["call"]).read_bytes())
        target: Any = importlib.import_module(module)
        for part in name.split("."):
            target = getattr(target, part)
        result = target(*arguments)
        Path(request["result"]).write_bytes(pickle.dumps(result))
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(BaseException):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)  # a process group left by a Trainer must not hold the exit


if __name__ == "__main__":
    _serve(Connection(int(sys.argv[1])))
    os._exit(0)
