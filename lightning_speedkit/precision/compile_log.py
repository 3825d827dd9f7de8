"""What torch.compile did in a run: when it compiled, for how long, for which module, and where it could not."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_warn

__all__ = ["CompileLog"]

_MANY = 4  # compilations of one module for new inputs, at which it is told
_SHOWN = 300  # characters of an error
_NO_GRAPH = (
    "torch gave no graph of it to the backend: there is nothing in it to compile, or compiling is switched off "
    "(TORCH_COMPILE_DISABLE, TORCHDYNAMO_DISABLE, torch.compiler.set_stance)"
)


@dataclass
class CompileLog:
    """What was compiled, when and why; shared by all calls of one model.

    Attributes:
        active: Whether calls are compiled; while false they run eagerly.
        seconds: Time in which something was compiled, backward passes included.
        started: How many compilations have begun.
        graphs: How many graphs a backend was given.
        recompiles: Per path, the shapes of the inputs for which a module was compiled again.
        failures: Per path, why it is not compiled any more.
        eager: Per path and mode (training or not), why calls through torch.compile gave no graph so far, empty where
            torch does not tell, and ``None`` where they gave some.
        called: The paths of modules that were called at all.
    """

    active: bool = True
    seconds: float = 0.0
    started: int = 0
    graphs: int = 0
    recompiles: dict[str, list[str]] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    called: set[str] = field(default_factory=set)
    eager: dict[tuple[str, bool], str | None] = field(default_factory=dict)
    running: str = ""  # the path whose call is running
    _began: float = 0.0
    _listens: bool = False

    def listen(self) -> None:
        """Begin to time compilations of this process."""
        if not self._listens:
            handler: Any = torch._dynamo.callback.callback_handler
            handler.register_start_callback(self._start)
            handler.register_end_callback(self._end)
            self._listens = True

    def stop(self) -> None:
        """No longer time them."""
        if self._listens:
            handler: Any = torch._dynamo.callback.callback_handler
            for calls, own in ((handler.start_callbacks, self._start), (handler.end_callbacks, self._end)):
                if own in calls:  # torch._dynamo's own clear() may have been called
                    calls.remove(own)
            self._listens = False

    def failed(self, path: str, error: BaseException | str) -> None:
        """This module is eager from now on; the first one brings a warning."""
        first = not self.failures
        reason = _shortened(error) if isinstance(error, str) else _reason(error)
        self.failures.setdefault(path, reason)
        if first:
            rank_zero_warn(
                f"{path or 'the model'!r} could not be compiled and runs eagerly from here on: {reason} "
                f"Others are tried; see failures in the report."
            )

    def traced(self, path: str, training: bool, graphs: int, refusal: str = "") -> None:
        """A call of this module through torch.compile has ended; modules of its build have ``graphs`` in this mode."""
        self.eager[path, training] = None if graphs else refusal
        if refusal and training:
            self.failed(path, refusal)

    def settle(self) -> None:
        """At the end of a run: a module that gave no graph, in training where it was trained, ran eagerly."""
        for path in dict.fromkeys(path for path, _ in self.eager):
            reason = self.eager.get((path, True), self.eager.get((path, False)))
            if reason is not None and path not in self.failures:
                self.failed(path, reason or _NO_GRAPH)
        self.eager.clear()

    def again(self, path: str, shapes: str) -> None:
        """This module was compiled for another input; warns once when that is often."""
        seen = self.recompiles.setdefault(path, [])
        seen.append(shapes)
        if len(seen) != _MANY:
            return
        why = (
            f"for inputs of shape {', then '.join(seen)}. Pad or bucket the batches, set dynamic=True, or max_shapes"
            if len(set(seen)) > 1
            else f"for inputs of the same shape, {shapes}: a Python value of the module changes between its calls"
        )
        rank_zero_warn(
            f"{path or 'the model'!r} was compiled again {_MANY} times {why}. At "
            f"{torch._dynamo.config.recompile_limit} compilations torch runs the rest of the shapes eagerly."
        )

    def _start(self, _: Any) -> None:
        self._began = time.perf_counter()
        self.started += 1

    def _end(self, _: Any) -> None:
        self.seconds += time.perf_counter() - self._began


def _reason(error: BaseException) -> str:
    inner: BaseException | None = getattr(error, "inner_exception", None) or error
    return f"{type(inner).__name__}: {_shortened(str(inner))}"


def _shortened(text: str) -> str:
    text = " ".join(text.split()) or "no message"
    return f"{text[:_SHOWN]}{'...' if len(text) > _SHOWN else ''}".rstrip(".") + "."
