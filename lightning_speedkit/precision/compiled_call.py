"""The call of a module through torch.compile, which falls back to eager and tells how often it was compiled.

It stands where ``nn.Module.compile`` puts its own, in an attribute that copies and pickles leave out. Four things
differ. A module of torch's own, such as ``nn.Sequential``, is compiled; ``nn.Module.compile`` leaves it eager without
a word (torch 2.13). Modules of the same build share what is compiled, and each build has a cache of its own: all
modules share the code of ``Module.__call__``, so that with ``nn.Module.compile`` the ninth different one finds the
cache full. A backend that fails leaves its graph to run uncompiled, in that very call, and the next calls are eager;
a module of which torch compiles nothing counts as failed, too. And each compilation is timed and laid to the module,
and the shapes, that asked for it.

What it costs: some microseconds per call of a compiled module.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lightning_speedkit.precision.compile_graphs import SharedGraphs, call_module
from lightning_speedkit.precision.compile_log import CompileLog

__all__ = ["CompileLog", "CompiledCall"]


class CompiledCall:
    """What a module's ``__call__`` goes through while it is compiled; ``compiled`` may be shared by several.

    Args:
        path: The module's path, for what is told.
        module: The module.
        compiled: What torch.compile made of modules of its build.
        log: Where it tells what happened.
        max_shapes: How many shapes of inputs are compiled, in training and in evaluation each; others run eagerly.
    """

    def __init__(
        self, path: str, module: nn.Module, compiled: SharedGraphs, log: CompileLog, max_shapes: int | None = None
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
        if self.path not in log.failures:
            log.traced(self.path, state[0], self._compiled.graphs[state[0]], self._compiled.refusal)
        if log.started != before and state in self._seen and self.path not in log.failures:
            log.again(self.path, _shapes_of(args, kwargs))
        self._seen.add(state)
        return result

    def _is_among_the_first(self, state: tuple[bool, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        known, shapes = self._shapes.setdefault(state, set()), _shapes_of(args, kwargs)
        if shapes not in known and len(known) < (self.max_shapes or 0):
            known.add(shapes)
        return shapes in known


def _shapes_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    return " and ".join(str(tuple(leaf.shape)) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor))
