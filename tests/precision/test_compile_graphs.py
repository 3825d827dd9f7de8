"""What modules of one build share, and what those of different builds do not."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_speedkit.precision.compile_graphs import SharedGraphs, check_backend, group_of, guarded_backend
from lightning_speedkit.precision.compile_log import CompileLog


@pytest.fixture(autouse=True)
def _nothing_compiled_before() -> None:
    torch._dynamo.reset()


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


def _rows(shared: SharedGraphs, layer: nn.Module, *rows: int) -> None:
    for count in rows:
        found = shared(layer, (torch.ones(count, layer.in_features),), {})  # type: ignore[arg-type]
        torch.testing.assert_close(found, layer(torch.ones(count, layer.in_features)))  # type: ignore[arg-type]


def test_a_limit_that_one_build_reaches_does_not_stop_another() -> None:
    log = CompileLog()
    one, other = (SharedGraphs(log, "eager", dynamic=False) for _ in range(2))
    with torch._dynamo.config.patch(recompile_limit=2):
        _rows(one, nn.Linear(3, 2), 2, 3, 4, 5)
        assert one.graphs == {True: 2, False: 0}
        _rows(other, nn.Linear(4, 2), 2)
    assert other.graphs == {True: 1, False: 0}
    again = SharedGraphs(log, "eager")  # nor a later run of the process
    _rows(again, nn.Linear(3, 2), 2)
    assert again.graphs[True] == 1


def test_a_size_of_another_build_is_no_size_that_changes(backend: dict[str, Any]) -> None:
    sizes: list[list[Any]] = []

    def compiler(graph: Any, inputs: list[Any]) -> Any:
        sizes.append([value for value in inputs if not isinstance(value, Tensor)])
        return graph.forward

    torch._dynamo.backends.registry._COMPILER_FNS["told"] = compiler
    for width in (3, 4, 5):
        _rows(SharedGraphs(CompileLog(), "told"), nn.Linear(width, 2), 2)
    assert sizes == [[], [], []]  # a size that changes is an input of the graph


def test_modes_are_counted_apart() -> None:
    shared, layer = SharedGraphs(CompileLog(), "eager"), nn.Sequential(nn.Linear(2, 2), nn.Dropout())
    shared(layer, (torch.ones(1, 2),), {})
    assert shared.graphs == {True: 1, False: 0}
    shared(layer.eval(), (torch.ones(1, 2),), {})
    assert shared.graphs == {True: 1, False: 1}


@pytest.mark.parametrize("limit", ["accumulated_recompile_limit", "recompile_limit"])
def test_a_limit_of_torch_is_the_refusal(limit: str) -> None:
    shared = SharedGraphs(CompileLog(), "eager")
    with torch._dynamo.config.patch(**{limit: 0}):  # type: ignore[arg-type]
        _rows(shared, nn.Linear(3, 2), 2)
    assert shared.graphs == {True: 0, False: 0}
    assert f"as often as torch._dynamo.config.{limit} allows in one process (0 times)" in shared.refusal


class _Untraced(nn.Module):
    @torch.compiler.disable(reason="it must not")  # type: ignore[untyped-decorator]
    def forward(self, x: Tensor) -> Tensor:
        return x


def test_code_that_torch_does_not_trace_is_the_refusal() -> None:
    shared = SharedGraphs(CompileLog(), "eager")
    assert shared(_Untraced(), (torch.ones(2),), {}).tolist() == [1.0, 1.0]
    assert shared.graphs[True] == 0
    assert "wrapped with `torch.compiler.disable` (reason: it must not)" in shared.refusal


def test_nothing_to_compile_is_no_graph_and_no_refusal() -> None:
    shared = SharedGraphs(CompileLog(), "eager")
    assert shared(nn.Identity(), (torch.ones(2),), {}).tolist() == [1.0, 1.0]
    assert (shared.graphs, shared.refusal) == ({True: 0, False: 0}, "")


def test_what_was_compiled_goes_with_the_modules() -> None:
    shared, layer = SharedGraphs(CompileLog(), "eager"), nn.Linear(3, 2)
    _rows(shared, layer, 2)
    gone = weakref.ref(layer)
    del shared, layer
    gc.collect()
    assert gone() is None
