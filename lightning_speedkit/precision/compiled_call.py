"""The call of a module through torch.compile, which falls back to eager and tells how often it was compiled.

It stands where ``nn.Module.compile`` puts its own, in an attribute that copies and pickles leave out. Four things
differ. A module of torch's own, such as ``nn.Sequential``, is compiled; ``nn.Module.compile`` leaves it eager without
a word (torch 2.13). Modules of the same build share what is compiled, and each build has a cache of its own: all
modules share the code of ``Module.__call__``, so that with ``nn.Module.compile`` the ninth different one finds the
cache full. A backend that fails leaves its graph to run uncompiled, in that very call, and the next calls are eager.
And each compilation is timed and laid to the module, and the shapes, that asked for it.

What it costs: some microseconds per call of a compiled module.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

__all__ = ["CompileLog", "CompiledCall", "call_module", "check_backend", "group_of", "guarded_backend"]

_MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
_USUAL = ("inductor", "eager", "aot_eager")  # known without asking, which imports what takes seconds
_MANY = 4  # compilations of one module for new inputs, at which it is told
_SHOWN = 300  # characters of an error


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
        called: The paths of modules that were called at all.
    """

    active: bool = True
    seconds: float = 0.0
    started: int = 0
    graphs: int = 0
    recompiles: dict[str, list[str]] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    called: set[str] = field(default_factory=set)
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

    def failed(self, path: str, error: BaseException) -> None:
        """This module is eager from now on; the first one brings a warning."""
        first = not self.failures
        reason = _reason(error)
        self.failures.setdefault(path, reason)
        if first:
            rank_zero_warn(
                f"{path or 'the model'!r} could not be compiled and runs eagerly from here on: {reason} "
                f"Others are tried; see failures in the report."
            )

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


def check_backend(backend: str, mode: str, dynamic: bool | None, max_shapes: int | None) -> None:
    """Raises what is wrong with these arguments of :class:`~lightning_speedkit.precision.compile.CompileModel`."""
    if mode not in _MODES:
        raise ValueError(f"mode={mode!r} is none of {', '.join(_MODES)}.")
    if backend not in _USUAL and backend not in (known := torch._dynamo.list_backends(None)):
        raise ValueError(f"backend={backend!r} is not known to torch. It has: {', '.join(known)}.")
    if mode != "default" and backend != "inductor":
        raise ValueError(f"mode={mode!r} is for the backend 'inductor', got backend={backend!r}. Leave mode out.")
    if dynamic is not None and not isinstance(dynamic, bool):
        raise TypeError(f"dynamic is true, false or null, got {dynamic!r}.")
    if max_shapes is not None and (isinstance(max_shapes, bool) or not isinstance(max_shapes, int) or max_shapes < 1):
        raise ValueError(f"max_shapes={max_shapes!r} must be a whole number from 1, or null for no limit.")


def guarded_backend(
    log: CompileLog, backend: str = "inductor", mode: str | None = None, dynamic: bool | None = None
) -> Callable[..., Any]:
    """A backend for torch.compile that returns the graph uncompiled where the named one fails, and tells the log."""
    compiler: Callable[..., Any] = torch._dynamo.lookup_backend(backend)
    options: dict[str, Any] = {}
    if mode not in (None, "default"):
        options = {"mode": mode}
        if backend == "inductor":
            options = {"config_patches": torch._inductor.list_mode_options(mode, dynamic)}

    def compile_graph(graph: Any, inputs: list[Tensor]) -> Any:
        log.graphs += 1
        try:
            return compiler(graph, inputs, **options)
        except (torch._dynamo.exc.RestartAnalysis, torch._dynamo.exc.SkipFrame):
            raise  # how the tracer is told to begin anew
        except Exception as error:
            log.failed(log.running, error)
            return graph.forward

    return compile_graph


def call_module(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A module's call, with its hooks, beyond what :class:`CompiledCall` stands in; this is what is traced."""
    run: Callable[..., Any] = module._call_impl
    return run(*args, **kwargs)


class CompiledCall:
    """What a module's ``__call__`` goes through while it is compiled; ``compiled`` may be shared by several.

    Args:
        path: The module's path, for what is told.
        module: The module.
        compiled: :func:`call_module` through torch.compile.
        log: Where it tells what happened.
        max_shapes: How many shapes of inputs are compiled, in training and in evaluation each; others run eagerly.
    """

    def __init__(
        self, path: str, module: nn.Module, compiled: Callable[..., Any], log: CompileLog, max_shapes: int | None = None
    ) -> None:
        self.path, self.module, self.log, self.max_shapes = path, module, log, max_shapes
        self._compiled = compiled
        self._seen: set[tuple[bool, ...]] = set()
        self._shapes: dict[tuple[bool, ...], set[str]] = {}

    __call__ = lambda self, *args, **kwargs: self.run(args, kwargs)  # noqa: E731

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The module's output for these arguments, through what is compiled or eagerly."""
        log, module = self.log, self.module
        log.called.add(self.path)
        if not log.active or (log.failures and self.path in log.failures):
            return call_module(module, args, kwargs)
        state = (module.training, torch.is_grad_enabled(), torch.is_inference_mode_enabled())
        if self.max_shapes is not None and not self._is_among_the_first(state, args, kwargs):
            return call_module(module, args, kwargs)
        before, outer, log.running = log.started, log.running, self.path
        try:
            result = self._compiled(module, args, kwargs)
        except torch._dynamo.exc.TorchDynamoException as error:
            # Of the tracer or of the user's own code, which then raises again, with a traceback that shows it.
            result = call_module(module, args, kwargs)
            log.failed(self.path, error)
        finally:
            log.running = outer
        if log.started != before and state in self._seen and self.path not in log.failures:
            log.again(self.path, _shapes_of(args, kwargs))
        self._seen.add(state)
        return result

    def _is_among_the_first(self, state: tuple[bool, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        known, shapes = self._shapes.setdefault(state, set()), _shapes_of(args, kwargs)
        if shapes not in known and len(known) < (self.max_shapes or 0):
            known.add(shapes)
        return shapes in known


def group_of(module: nn.Module) -> tuple[Any, ...]:
    """Equal for modules of the same build: the classes, sizes and buffers of all their parts.

    >>> group_of(nn.Linear(2, 3)) == group_of(nn.Linear(2, 3)), group_of(nn.Linear(2, 3)) == group_of(nn.Linear(3, 3))
    (True, False)
    """
    classes = tuple((name, type(part)) for name, part in module.named_modules())
    tensors = tuple(
        (name, tuple(tensor.shape) if not nn.parameter.is_lazy(tensor) else None, tensor.dtype, tensor.requires_grad)
        for name, tensor in (*module.named_parameters(), *module.named_buffers())
    )
    return classes, tensors


def _shapes_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    return " and ".join(str(tuple(leaf.shape)) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor))


def _reason(error: BaseException) -> str:
    inner: BaseException | None = getattr(error, "inner_exception", None) or error
    text = " ".join(str(inner).split()) or "no message"
    return f"{type(inner).__name__}: {text[:_SHOWN]}{'...' if len(text) > _SHOWN else ''}".rstrip(".") + "."
