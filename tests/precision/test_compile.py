"""Compiled runs against the same run without the callback; the backend "eager" computes bit for bit the same."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.strategies import FSDPStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_speedkit import AccumulationScheduler, ActivationCheckpointing, AverageWeights
from lightning_speedkit.precision.compile import CompileModel, compile_modules, uncompile_modules
from lightning_speedkit.precision.compile_log import CompileLog
from tests.two_ranks import on_two_ranks

_FEATURES, _ROWS = 6, 8


@pytest.fixture(autouse=True)
def _nothing_compiled_before() -> None:
    torch._dynamo.reset()  # a code object that many tests have compiled would run eagerly from here on


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.BatchNorm1d(_FEATURES), nn.Linear(_FEATURES, _FEATURES)
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(torch.relu(self.linear(self.norm(x))))


class Module(pl.LightningModule):
    """A step that logs, which a compiled step could not."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(Block(), Block(), nn.Linear(_FEATURES, 1))
        self.losses: list[Tensor] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = self.net(batch[0]).square().mean()
        self.log("loss", loss)
        self.losses.append(loss.detach())
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val", self.net(batch[0]).square().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def _loader(rows: int = 3 * _ROWS) -> DataLoader[Any]:
    x = torch.randn(rows, _FEATURES, generator=torch.Generator().manual_seed(2))
    return DataLoader(TensorDataset(x), batch_size=_ROWS, generator=torch.Generator())


def _fit(*callbacks: pl.Callback, model: Module | None = None, rows: int = 3 * _ROWS, **arguments: Any) -> Module:
    model = Module() if model is None else model
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "max_epochs": 2}
    settings: dict[str, Any] = {"accelerator": "cpu", "enable_model_summary": False, **quiet, **arguments}
    torch.manual_seed(3)
    pl.Trainer(callbacks=list(callbacks), **settings).fit(model, _loader(rows), _loader(rows))
    return model


def _equal(one: Module, other: Module) -> None:
    torch.testing.assert_close(one.losses, other.losses, rtol=0, atol=0)
    torch.testing.assert_close(one.state_dict(), other.state_dict(), rtol=0, atol=0)


@pytest.fixture
def broken_backend() -> Iterator[Callable[[int], None]]:
    """A backend ``"broken"`` that fails from its n-th graph on."""
    good = {"left": 0}

    def broken(graph: Any, inputs: list[Tensor]) -> Any:
        good["left"] -= 1
        if good["left"] < 0:
            raise OSError("there is no compiler")
        return graph.forward

    torch._dynamo.register_backend(broken, "broken")
    yield lambda n: good.update(left=n)
    registry: Any = torch._dynamo.backends.registry
    registry._BACKENDS.pop("broken", None)
    registry._COMPILER_FNS.pop("broken", None)


def test_a_compiled_run_equals_the_plain_one_and_says_what_it_cost() -> None:
    callback = CompileModel(backend="eager", eager_steps=2)
    model = _fit(callback)
    _equal(model, _fit())
    report = callback.report
    assert report is not None
    assert (report.paths, report.never_called, report.failures, report.steps) == (("net",), (), (), 4)
    assert report.graphs >= 2  # in training and in evaluation
    assert report.compile_seconds > 0
    assert report.eager_seconds is not None
    assert report.compiled_seconds is not None


def test_nothing_is_left_after_the_run_and_a_second_one_compiles_again() -> None:
    callback, model = CompileModel(backend="eager", eager_steps=0), Module()
    names, listeners = list(model.state_dict()), list(torch._dynamo.callback.callback_handler.start_callbacks)
    for _ in range(2):
        _fit(callback, model=model)
        assert callback.report is not None
        assert callback.report.graphs > 0
        assert callback.paths == ()
        assert all("_compiled_call_impl" not in vars(module) for module in model.modules())
    assert list(model.state_dict()) == names
    assert torch._dynamo.callback.callback_handler.start_callbacks == listeners


def test_during_the_run_names_and_classes_stay_and_copies_are_plain() -> None:
    model, log = Module(), CompileLog()
    names, classes = list(model.state_dict()), [type(module) for module in model.modules()]
    compile_modules(model, backend="eager", log=log)
    x = torch.randn(4, _FEATURES)
    model.net(x)
    assert log.graphs == 1  # a Sequential of torch's own is compiled, too
    assert (list(model.state_dict()), [type(module) for module in model.modules()]) == (names, classes)
    for twin in (copy.deepcopy(model.net), pickle.loads(pickle.dumps(model.net))):
        with torch.no_grad():
            twin[2].weight.zero_()
        twin(x)
        assert twin._compiled_call_impl is None
    assert (log.graphs, bool(model.net[2].weight.any())) == (1, True)
    assert uncompile_modules(model) == ("net",)


def test_blocks_share_what_is_compiled() -> None:
    model, log = Module(), CompileLog()
    assert compile_modules(model, "blocks", backend="eager", log=log) == ("net.0", "net.1")
    model.net(torch.randn(4, _FEATURES, requires_grad=True))  # as the outputs of other blocks do
    assert (log.graphs, log.called) == (1, {"net.0", "net.1"})
    uncompile_modules(model)


def test_twelve_different_modules_do_not_crowd_each_other_out() -> None:
    model, log = nn.ModuleList(nn.Linear(n + 1, 2) for n in range(12)), CompileLog()
    compile_modules(model, "Linear", backend="eager", log=log)
    for _ in range(2):
        for n, layer in enumerate(model):
            layer(torch.ones(3, n + 1))
    assert (log.graphs, log.recompiles) == (12, {})
    uncompile_modules(model)


@pytest.mark.parametrize("good", [0, 1], ids=["at once", "in the middle of the run"])
def test_a_backend_that_fails_leaves_an_eager_run_and_one_warning(
    good: int, broken_backend: Callable[[int], None]
) -> None:
    plain = _fit()
    broken_backend(good)
    callback = CompileModel(backend="broken", eager_steps=0)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        model = _fit(callback, num_sanity_val_steps=0)
    _equal(model, plain if good else _fit(num_sanity_val_steps=0))
    about = [str(warning.message) for warning in told if "could not be compiled" in str(warning.message)]
    assert len(about) == 1
    assert "OSError: there is no compiler" in about[0]
    assert callback.report is not None
    assert [path for path, _ in callback.report.failures] == ["net"]
    assert torch._dynamo.config.suppress_errors is False


@pytest.mark.parametrize(
    ("switch", "reason"),
    [
        (lambda: torch._dynamo.config.patch(accumulated_recompile_limit=0), "accumulated_recompile_limit allows"),
        (lambda: torch.compiler.set_stance("force_eager"), "torch gave no graph of it to the backend"),
    ],
    ids=["limit", "switched off"],
)
def test_a_run_that_torch_leaves_eager_is_told_and_does_not_pay(switch: Callable[[], Any], reason: str) -> None:
    callback = CompileModel(backend="eager", eager_steps=1)
    with warnings.catch_warnings(record=True) as told, switch():
        warnings.simplefilter("always")
        model = _fit(callback)
    _equal(model, _fit())
    about = [str(warning.message) for warning in told if "could not be compiled" in str(warning.message)]
    assert len(about) == 1
    assert reason in about[0]
    report = callback.report
    assert report is not None
    assert (report.graphs, report.paid, report.compiled) == (0, False, ())
    assert reason in dict(report.failures)["net"]
    assert "so it did not pay" in str(report)


def test_changing_shapes_are_told_with_the_layer_and_the_sizes() -> None:
    model, log = Module(), CompileLog()
    compile_modules(model, backend="eager", dynamic=False, log=log)
    for rows in range(2, 6):
        model.net(torch.randn(rows, _FEATURES))
    with pytest.warns(UserWarning, match=r"'net' was compiled again 4 times for .* \(3, 6\), then \(4, 6\)"):
        model.net(torch.randn(6, _FEATURES))
    model.net(torch.randn(7, _FEATURES))
    assert log.recompiles == {"net": [f"({rows}, 6)" for rows in range(3, 8)]}
    uncompile_modules(model)


def test_shapes_beyond_the_first_run_eagerly() -> None:
    model, log = Module(), CompileLog()
    compile_modules(model, backend="eager", max_shapes=1, log=log)
    for rows in (8, 5, 8, 3):
        model.net(torch.randn(rows, _FEATURES))
    assert (log.graphs, log.recompiles) == (1, {})
    uncompile_modules(model)


@pytest.mark.parametrize(
    "others",
    [
        lambda: [ActivationCheckpointing(["Linear"])],
        lambda: [AccumulationScheduler(2)],
        lambda: [AverageWeights(decay=0.9)],
    ],
    ids=["ActivationCheckpointing", "AccumulationScheduler", "AverageWeights"],
)
def test_beside_other_callbacks(others: Callable[[], list[pl.Callback]]) -> None:
    callback = CompileModel(backend="eager", eager_steps=1)
    compiled = _fit(*others(), callback)
    torch.testing.assert_close(compiled.state_dict(), _fit(*others()).state_dict())
    assert callback.report is not None
    assert callback.report.failures == ()
    assert callback.report.graphs > 0


def test_what_is_computed_again_and_holds_buffers_is_told() -> None:
    callback = CompileModel(backend="eager", eager_steps=1)
    with pytest.warns(UserWarning, match="a module with buffers that is computed again runs eagerly"):
        compiled = _fit(ActivationCheckpointing(["Block"]), callback)
    torch.testing.assert_close(compiled.state_dict(), _fit(ActivationCheckpointing(["Block"])).state_dict())
    assert callback.report is not None
    assert [path for path, _ in callback.report.failures] == ["net"]


def test_after_an_exception_the_module_is_plain() -> None:
    class Fails(Module):
        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            super().training_step(batch, batch_idx)
            raise ZeroDivisionError

    model, listeners = Fails(), list(torch._dynamo.callback.callback_handler.end_callbacks)
    with pytest.raises(ZeroDivisionError):
        _fit(CompileModel(backend="eager", eager_steps=0), model=model)
    assert all("_compiled_call_impl" not in vars(module) for module in model.modules())
    assert torch._dynamo.callback.callback_handler.end_callbacks == listeners


def test_a_module_that_is_never_called_is_told() -> None:
    class Inner(Module):
        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            return self.net.forward(batch[0]).square().mean()

    with pytest.warns(UserWarning, match="net was compiled but never called"):
        _fit(CompileModel(backend="eager", eager_steps=0), model=Inner(), limit_val_batches=0)


def test_an_error_of_the_model_itself_is_the_one_of_the_plain_run() -> None:
    model = Module()
    compile_modules(model, backend="eager")
    with pytest.raises(RuntimeError, match="running_mean should contain 5 elements"):
        model.net(torch.randn(4, 5))
    uncompile_modules(model)


def test_bad_arguments_say_what_is_allowed() -> None:
    with pytest.raises(ValueError, match="mode='fast' is none of default"):
        CompileModel(mode="fast")
    with pytest.raises(ValueError, match="backend='inducto' is not known"):
        CompileModel(backend="inducto")
    with pytest.raises(ValueError, match="mode='max-autotune' is for the backend 'inductor'"):
        CompileModel(backend="eager", mode="max-autotune")
    with pytest.raises(ValueError, match="max_shapes=0 must be"):
        CompileModel(max_shapes=0)
    with pytest.raises(ValueError, match="eager_steps=-1 must be"):
        CompileModel(eager_steps=-1)
    with pytest.raises(TypeError, match="dynamic is true, false or null"):
        CompileModel(dynamic="yes")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"no path 'Blok'.*Did you mean 'Block'"):
        _fit(CompileModel("Blok"))


def test_a_strategy_that_shards_is_refused() -> None:
    trainer: Any = type("Trainer", (), {"strategy": FSDPStrategy()})()  # a real one wants a GPU
    with pytest.raises(MisconfigurationException, match="CompileModel does not go with FSDPStrategy"):
        CompileModel().setup(trainer, Module(), "fit")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_inductor_computes_what_eager_does() -> None:
    torch.manual_seed(0)
    model, log = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 1)), CompileLog()
    plain, x = copy.deepcopy(model), torch.randn(4, 6)
    compile_modules(model, max_shapes=1, log=log)
    for rows in (4, 3):
        torch.testing.assert_close(model(x[:rows]), plain(x[:rows]))
    model(x).sum().backward()
    plain(x).sum().backward()
    torch.testing.assert_close([p.grad for p in model.parameters()], [p.grad for p in plain.parameters()])
    assert (log.graphs, log.failures) == (1, {})
    uncompile_modules(model)


def _on_a_rank() -> tuple[dict[str, Tensor], dict[str, Tensor], int]:
    callback = CompileModel(backend="eager", eager_steps=1)
    compiled, plain = (_fit(*callbacks, strategy="ddp", devices=2) for callbacks in ([callback], []))
    assert callback.report is not None
    assert callback.report.failures == ()
    return compiled.state_dict(), plain.state_dict(), callback.report.graphs


def test_two_ranks_train_as_without() -> None:
    for compiled, plain, graphs in on_two_ranks(_on_a_rank):
        assert graphs > 0
        torch.testing.assert_close(compiled, plain, rtol=0, atol=0)


def test_a_run_leaves_alone_what_the_caller_has_compiled() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 1))
    compile_modules(model, "0", backend="eager")
    log = CompileLog()
    compile_modules(model, "2", backend="eager", log=log)
    assert uncompile_modules(model, log) == ("2",)
    assert uncompile_modules(model) == ("0",)
