"""What modules of one build share: a function of their own through torch.compile, whose graphs are counted.

Torch keeps its books by code object. With too many compilations of one it compiles that code no more, in the whole
process; and a size that differs between two calls of it is taken for one that changes, and compiled as a variable. So
modules of different builds that ran through one function would stop and slow each other.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Mapping
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from lightning_speedkit.precision.compile_log import CompileLog

__all__ = ["SharedGraphs", "call_module", "check_backend", "group_of", "guarded_backend"]

_MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
_USUAL = ("inductor", "eager", "aot_eager")  # known without asking, which imports what takes seconds
_numbers = itertools.count()


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


class SharedGraphs:
    """:func:`call_module` through torch.compile, for modules of one build.

    Attributes:
        graphs: How many graphs the backend was given, in training mode (``True``) and in evaluation; while there are
            none, that mode runs eagerly.
        refusal: Why the last call gave none, as far as torch tells.

    >>> from lightning_speedkit.precision.compile_log import CompileLog
    >>> shared = SharedGraphs(CompileLog(), "eager")
    >>> shared(nn.ReLU(), (torch.tensor([-1.0, 2.0]),), {}), shared.graphs
    (tensor([0., 2.]), {True: 1, False: 0})
    """

    def __init__(
        self, log: CompileLog, backend: str = "inductor", mode: str | None = None, dynamic: bool | None = None
    ) -> None:
        self.graphs = {True: 0, False: 0}
        self.refusal = ""
        self._training = True
        compile_graph = guarded_backend(log, backend, mode, dynamic)

        def counted(graph: Any, inputs: list[Tensor]) -> Any:
            self.graphs[self._training] += 1
            return compile_graph(graph, inputs)

        compiler: Callable[..., Any] = torch.compile  # not all its overloads know isolate_recompiles
        # the regions keep apart what is traced inside and shared after all: the user's own functions
        self._compiled = compiler(_own_function(), backend=counted, dynamic=dynamic, isolate_recompiles=True)

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What the module returns, compiled where torch agrees."""
        self._training, self.refusal = module.training, ""
        if self.graphs[module.training]:
            return self._compiled(module, args, kwargs)
        before = _notes()
        result = self._compiled(module, args, kwargs)
        if not self.graphs[module.training]:
            self.refusal = _refusal(before)
        return result


def _own_function() -> Callable[..., Any]:
    code = call_module.__code__
    return FunctionType(code.replace(co_name=f"{code.co_name}_{next(_numbers)}"), call_module.__globals__)


def _notes() -> dict[str, int]:
    """Torch's counters of what it did not trace, and of where it interrupted a graph."""
    counters = torch._dynamo.utils.counters
    return {**counters["unimplemented"], **counters["graph_break"]}


def _refusal(before: Mapping[str, int]) -> str:
    """Why torch left code untraced since ``before``, a state of its counters; empty if it did not."""
    told = [message for message, count in _notes().items() if count > before.get(message, 0)]
    for message in told:
        if limit := re.search(r"exceeding the (\w*recompile_limit)", message):
            name = f"torch._dynamo.config.{limit[1]}"
            return (
                f"torch has compiled this code as often as {name} allows in one process "
                f"({getattr(torch._dynamo.config, limit[1])} times). Raise it, or call torch._dynamo.reset() before "
                "the run"
            )
    if not told:
        return ""
    explained = re.search(r"Explanation: (.*?)(?=\n\s*(?:Hint|Developer debug context): |\Z)", told[0], re.DOTALL)
    return " ".join((explained[1] if explained else told[0]).split())


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
