"""Which calls go through what is compiled, and what is told; a plain function that counts stands in for it."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_speedkit.precision.compile_graphs import call_module
from lightning_speedkit.precision.compile_log import CompileLog
from lightning_speedkit.precision.compiled_call import CompiledCall


class Scale(nn.Module):
    def forward(self, x: Tensor, *, by: float = 1.0, plus: Tensor | None = None) -> Tensor:
        return x * by + (0.0 if plus is None else plus.sum())


class Compiled:
    """Stands in for ``torch.compile(call_module)``; ``compiles`` says for each call whether something is compiled."""

    def __init__(self, log: CompileLog, compiles: Callable[[int], bool] = lambda call: call == 0) -> None:
        self.log, self.compiles, self.calls = log, compiles, 0
        self.graphs, self.refusal = {True: 1, False: 1}, ""
        self.running: list[str] = []

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        self.log.started += self.compiles(self.calls)
        self.calls += 1
        self.running.append(self.log.running)
        return call_module(module, args, kwargs)


def _placed(
    compiled: Callable[[CompileLog], Any] = Compiled, max_shapes: int | None = None, **log: Any
) -> tuple[Scale, Any, CompileLog]:
    module, told = Scale(), CompileLog(**log)
    function = compiled(told)
    module._compiled_call_impl = CompiledCall("net", module, function, told, max_shapes)
    return module, function, told


def test_a_call_passes_all_arguments_and_runs_hooks_once() -> None:
    module, compiled, log = _placed()
    outputs: list[Tensor] = []
    module.register_forward_hook(lambda _, args, output: outputs.append(output))
    result = module(torch.tensor([1.0, 2.0]), by=3.0, plus=torch.tensor(4.0))
    assert result.tolist() == [7.0, 10.0]
    assert [output.tolist() for output in outputs] == [[7.0, 10.0]]
    assert (compiled.calls, compiled.running, log.running, log.called) == (1, ["net"], "", {"net"})


def test_while_the_log_is_inactive_calls_are_eager() -> None:
    module, compiled, log = _placed(active=False)
    assert module(torch.ones(1), by=2.0).item() == 2.0
    assert (compiled.calls, log.called) == (0, {"net"})
    log.active = True
    module(torch.ones(1))
    assert compiled.calls == 1


def test_a_module_that_failed_is_eager_and_others_are_not() -> None:
    module, compiled, _ = _placed(failures={"net": "why"})
    module(torch.ones(1))
    assert compiled.calls == 0
    module, compiled, _ = _placed(failures={"another": "why"})
    module(torch.ones(1))
    assert compiled.calls == 1


def test_shapes_are_limited_in_training_and_in_evaluation_each() -> None:
    module, compiled, _ = _placed(max_shapes=1)
    for rows in (4, 3, 4):
        module(torch.ones(rows))
    assert compiled.calls == 2  # the two of 4 rows
    module.eval()
    for rows in (3, 4):
        module(torch.ones(rows))
    assert compiled.calls == 3  # the one of 3 rows
    module(torch.ones(3), plus=torch.ones(2))
    assert compiled.calls == 3  # the tensors in keywords count
    with torch.no_grad():
        module(torch.ones(5))
    assert compiled.calls == 4


def test_a_second_compilation_is_told_only_where_the_state_was_seen() -> None:
    module, _, log = _placed(lambda log: Compiled(log, lambda call: True))
    module(torch.ones(2, 3))
    with torch.no_grad():
        module(torch.ones(2, 3))  # the first of its state
    module.eval()
    module(torch.ones(2, 3))
    assert log.recompiles == {}
    module(torch.ones(4, 3), plus=torch.ones(5))
    assert log.recompiles == {"net": ["(4, 3) and (5,)"]}


def test_an_error_of_the_tracer_leaves_the_eager_result_and_one_warning() -> None:
    def fails(_: CompileLog) -> Callable[..., Any]:
        def call(*_: Any) -> Any:
            raise torch._dynamo.exc.Unsupported("a generator   of\nyours", "")

        return call

    module, _, log = _placed(fails)
    with pytest.warns(UserWarning, match=r"'net' could not be compiled and runs eagerly .*a generator of yours"):
        assert module(torch.ones(1), by=5.0).item() == 5.0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert module(torch.ones(1), by=6.0).item() == 6.0
    assert list(log.failures) == ["net"]
    assert (log.recompiles, log.running) == ({}, "")


def test_an_error_of_the_module_itself_passes_through() -> None:
    module, _, log = _placed()
    with pytest.raises(TypeError, match="nonsense"):
        module(torch.ones(1), nonsense=1)
    assert (log.failures, log.running) == ({}, "")


def test_a_call_that_torch_refuses_to_compile_is_a_failure_and_the_next_ones_are_eager() -> None:
    module, compiled, log = _placed()
    compiled.graphs, compiled.refusal = {True: 0, False: 1}, "a limit is reached"
    with pytest.warns(UserWarning, match="'net' could not be compiled and runs eagerly .* a limit is reached"):
        assert module(torch.ones(1), by=5.0).item() == 5.0
    assert module(torch.ones(1), by=6.0).item() == 6.0
    assert (compiled.calls, list(log.failures)) == (1, ["net"])
