"""Which calls go through what is compiled, and what is told; a plain function that counts stands in for it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_speedkit.precision.compiled_call import (
    CompiledCall,
    CompileLog,
    call_module,
    check_backend,
    group_of,
    guarded_backend,
)


class Scale(nn.Module):
    def forward(self, x: Tensor, *, by: float = 1.0, plus: Tensor | None = None) -> Tensor:
        return x * by + (0.0 if plus is None else plus.sum())


class Compiled:
    """Stands in for ``torch.compile(call_module)``; ``compiles`` says for each call whether something is compiled."""

    def __init__(self, log: CompileLog, compiles: Callable[[int], bool] = lambda call: call == 0) -> None:
        self.log, self.compiles, self.calls = log, compiles, 0
        self.running: list[str] = []

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        self.log.started += self.compiles(self.calls)
        self.calls += 1
        self.running.append(self.log.running)
        return call_module(module, args, kwargs)


def _placed(
    compiled: Callable[[CompileLog], Callable[..., Any]] = Compiled, max_shapes: int | None = None, **log: Any
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


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        (["(2,)", "(3,)", "(4,)", "(5,)"], r"'net' was compiled again 4 times for inputs of shape \(2,\), then \(3,\)"),
        (["(2,)"] * 4, r"of the same shape, \(2,\): a Python value of the module changes"),
    ],
    ids=["shapes change", "they do not"],
)
def test_the_fourth_time_is_told_and_no_other(shapes: list[str], message: str) -> None:
    log = CompileLog()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for shape in shapes[:3]:
            log.again("net", shape)
    with pytest.warns(UserWarning, match=message):
        log.again("net", shapes[3])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        log.again("net", "(6,)")
    assert log.recompiles == {"net": [*shapes, "(6,)"]}


def test_a_log_counts_only_between_listen_and_stop() -> None:
    handler: Any = torch._dynamo.callback.callback_handler
    log, found = CompileLog(), (list(handler.start_callbacks), list(handler.end_callbacks))
    log.listen()
    log.listen()
    assert len(handler.start_callbacks) == len(found[0]) + 1
    handler.run_start_callbacks(None)
    assert (log.started, log.seconds) == (1, 0.0)
    handler.run_end_callbacks(None)
    assert log.seconds > 0
    log.stop()
    log.stop()
    assert (list(handler.start_callbacks), list(handler.end_callbacks)) == found
    log.listen()
    handler.clear()  # as torch._dynamo.reset() does
    log.stop()
    assert log.started == 1


@pytest.fixture
def backend() -> Iterator[dict[str, Any]]:
    """The backend ``"told"``, which notes its options, and raises ``error`` if there is one."""
    told: dict[str, Any] = {"error": None}

    def compiler(graph: Any, inputs: list[Tensor], **options: Any) -> Any:
        told["options"] = options
        if told["error"] is not None:
            raise told["error"]
        return lambda *args: "compiled"

    torch._dynamo.register_backend(compiler, "told")
    yield told
    registry: Any = torch._dynamo.backends.registry
    registry._BACKENDS.pop("told", None)
    registry._COMPILER_FNS.pop("told", None)


def test_a_graph_that_a_backend_cannot_compile_runs_as_it_is(backend: dict[str, Any]) -> None:
    log, graph = CompileLog(running="net"), torch.fx.symbolic_trace(nn.ReLU())
    compile_graph = guarded_backend(log, "told")
    assert compile_graph(graph, [])() == "compiled"
    assert (log.graphs, log.failures, backend["options"]) == (1, {}, {})
    backend["error"] = OSError("no compiler")
    with pytest.warns(UserWarning, match="'net' could not be compiled"):
        run = compile_graph(graph, [])
    assert run(torch.tensor([-1.0, 2.0])).tolist() == [0.0, 2.0]
    assert (log.graphs, log.failures) == (2, {"net": "OSError: no compiler."})


def test_what_tells_the_tracer_to_begin_anew_is_no_failure(backend: dict[str, Any]) -> None:
    log, backend["error"] = CompileLog(), torch._dynamo.exc.SkipFrame()
    with pytest.raises(torch._dynamo.exc.SkipFrame):
        guarded_backend(log, "told")(torch.fx.symbolic_trace(nn.ReLU()), [])
    assert log.failures == {}


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (("told", "default", None, None), ValueError, "backend='told' is not known to torch"),
        (("eager", "quick", None, None), ValueError, "mode='quick' is none of default, reduce-overhead"),
        (("eager", "reduce-overhead", None, None), ValueError, "Leave mode out"),
        (("eager", "default", 1, None), TypeError, "dynamic is true, false or null, got 1"),
        (("eager", "default", None, True), ValueError, "max_shapes=True must be a whole number from 1"),
    ],
)
def test_bad_arguments(arguments: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        check_backend(*arguments)
    check_backend("eager", "default", None, 1)


def test_modules_of_one_build_are_one_group() -> None:
    def build(width: int = 3, *, frozen: bool = False, last: type[nn.Module] = nn.ReLU) -> nn.Module:
        model = nn.Sequential(nn.Linear(2, width), nn.BatchNorm1d(width), last())
        return model.requires_grad_(not frozen)

    assert group_of(build()) == group_of(build())
    others = [build(4), build(frozen=True), build(last=nn.GELU), build().double(), nn.Linear(2, 3), nn.LazyLinear(3)]
    assert len({group_of(module) for module in (build(), *others)}) == 7
