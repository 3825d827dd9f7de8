"""Checkpointing of chosen modules, by function and in a Trainer, against plain loops and plain runs."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import (
    BatchSizeFinder,
    Callback,
    EMAWeightAveraging,
    ModelCheckpoint,
    ModelPruning,
    StochasticWeightAveraging,
)
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy, ModelParallelStrategy, SingleDeviceStrategy
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import BinaryAccuracy

from lightning_speedkit.compress import QuantizeOnFitEnd
from lightning_speedkit.memory import ActivationCheckpointing, checkpoint_modules, uncheckpoint_modules
from lightning_speedkit.memory.recomputation import Recomputed
from lightning_speedkit.optimize import AverageWeights
from tests.two_ranks import on_two_ranks


class Block(nn.Module):
    def __init__(self, norm: type[nn.Module] = nn.BatchNorm1d) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 8), norm(8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 4))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.body(x)


def _network(norm: type[nn.Module] = nn.BatchNorm1d) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), Block(norm), Block(norm), nn.Linear(4, 1))


def _data() -> TensorDataset:
    generator = torch.Generator().manual_seed(2)
    return TensorDataset(torch.randn(24, 3, generator=generator), torch.randn(24, 1, generator=generator))


class Module(pl.LightningModule):
    def __init__(self, built_in: str = "__init__") -> None:
        super().__init__()
        self.built_in, self.built = built_in, 0
        self.network: nn.Module | None = None
        self.batch_size = 4
        self._build("__init__")

    def _build(self, here: str) -> None:
        if here == self.built_in and self.network is None:
            self.built += 1
            self.network = _network()

    def setup(self, stage: str) -> None:
        self._build("setup")

    def on_train_start(self) -> None:
        torch.manual_seed(1)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return nn.functional.mse_loss(self.network(batch[0]), batch[1])

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("loss", self.training_step(batch, batch_idx))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)

    def train_dataloader(self) -> Any:
        return DataLoader(_data(), batch_size=self.batch_size, generator=torch.Generator())

    def val_dataloader(self) -> Any:
        return DataLoader(_data(), batch_size=12, generator=torch.Generator())


class Configured(Module):
    """Builds its network in configure_model, with what its own setup has set before."""

    width: int

    def __init__(self) -> None:
        super().__init__("configure_model")
        self.calls = 0

    def setup(self, stage: str) -> None:
        self.width = 4

    def configure_model(self) -> None:
        assert self.width == 4
        self.calls += 1
        self._build("configure_model")


def _trainer(*callbacks: Callback, **arguments: Any) -> pl.Trainer:
    defaults: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": 1,
        "max_epochs": 2,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    return pl.Trainer(**{**defaults, **arguments}, callbacks=list(callbacks))


class Spy(Callback):
    """Notes which modules are checkpointed, at the start of the fit and in every batch."""

    def __init__(self) -> None:
        self.at_fit_start: list[str] = []
        self.in_batch: set[tuple[str, ...]] = set()
        self.in_validation: set[bool] = set()

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.at_fit_start = _checkpointed(pl_module)

    def on_before_zero_grad(self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Any) -> None:
        self.in_batch.add(tuple(_checkpointed(pl_module)))


def _checkpointed(model: nn.Module) -> list[str]:
    return [path for path, module in model.named_modules() if isinstance(module, Recomputed)]


def _values(module: nn.Module) -> list[Tensor]:
    return [value.clone() for value in module.state_dict().values()]


def _equal(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) > 0 and all(map(torch.equal, one, other))


def _plain_loop(epochs: int = 2, accumulate: int = 1) -> list[Tensor]:
    """The training of ``Module`` written out without Lightning; 6 batches of 4 per epoch."""
    network = _network()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.05, momentum=0.9)
    torch.manual_seed(1)
    inputs, targets = _data().tensors
    for _ in range(epochs):
        for batch in range(6):
            rows = slice(4 * batch, 4 * batch + 4)
            if batch % accumulate == 0:
                optimizer.zero_grad()
            (nn.functional.mse_loss(network(inputs[rows]), targets[rows]) / accumulate).backward()
            if batch % accumulate == accumulate - 1:
                optimizer.step()
    return _values(network)


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("modules", ["auto", "Block", "network.1", ["network.2", "network.1"], "network.[12]"])
def test_a_fit_equals_the_plain_loop_bit_for_bit(modules: Any, accumulate: int) -> None:
    module, callback = Module(), ActivationCheckpointing(modules)
    _trainer(callback, accumulate_grad_batches=accumulate, num_sanity_val_steps=0, limit_val_batches=0).fit(module)
    assert _equal(_values(module), _plain_loop(accumulate=accumulate))


OPTIONS: tuple[dict[str, Any], ...] = (
    {"policy": "selective"},
    {"policy": "selective", "keep": ["aten.native_batch_norm", "aten.relu"]},
    {"policy": "offload", "min_bytes": 0},
    {"every": 2},
)


@pytest.mark.parametrize("options", OPTIONS)
def test_a_fit_by_any_policy_equals_the_plain_loop_bit_for_bit(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lightning_speedkit.memory.offload._is_on_host", lambda tensor: False)  # so that it copies
    module, spy, callback = Module(), Spy(), ActivationCheckpointing(**options)
    _trainer(spy, callback, num_sanity_val_steps=0, limit_val_batches=0).fit(module)
    assert _equal(_values(module), _plain_loop())
    assert spy.in_batch == {("network.1",) if "every" in options else ("network.1", "network.2")}
    assert _checkpointed(module) == []


def test_batch_norm_after_20_steps_is_that_of_the_plain_run() -> None:
    networks = {"plain": nn.Sequential(Block(), Block())}
    for policy in ("full", "selective"):
        networks[policy] = copy.deepcopy(networks["plain"])
        checkpoint_modules(networks[policy], policy=policy)
    for network in networks.values():
        optimizer = torch.optim.SGD(network.parameters(), lr=0.05)
        torch.manual_seed(1)
        for _ in range(20):
            optimizer.zero_grad()
            network(torch.randn(6, 4)).square().mean().backward()
            optimizer.step()
    plain = _values(networks.pop("plain"))
    assert networks["full"].get_submodule("1.body.1").num_batches_tracked == 20
    assert [_equal(_values(network), plain) for network in networks.values()] == [True, True]


@pytest.mark.parametrize(
    ("every", "paths"),
    [(1, ("0", "1", "2", "3", "4")), (2, ("0", "2", "4")), (3, ("0", "3")), (5, ("0",)), (9, ("0",))],
)
@pytest.mark.parametrize("modules", ["auto", "Block", ["4", "3", "2", "1", "0"]])
def test_every_nth_of_the_chosen_modules(modules: Any, every: int, paths: tuple[str, ...]) -> None:
    network = nn.Sequential(*(Block() for _ in range(5)))
    assert checkpoint_modules(network, modules, every=every) == paths
    assert checkpoint_modules(network, modules, every=every) == ()


class HalfBuilt(Module):
    """Has a block from the start, to which another one in front is added in configure_model."""

    def configure_model(self) -> None:
        if self.built == 1:
            self.built += 1
            self.network = nn.Sequential(nn.Linear(3, 4), Block(), *list(self.network)[1:])


def test_every_nth_counts_what_is_there_at_the_start_of_the_fit() -> None:
    module, spy = HalfBuilt(), Spy()
    assert checkpoint_modules(HalfBuilt(), every=2) == ("network.1",)
    _trainer(spy, ActivationCheckpointing(every=2)).fit(module)
    assert spy.in_batch == {("network.1", "network.3")}
    assert _checkpointed(module) == []


@pytest.mark.parametrize("wrong", [0, -1, True, 1.5, "2", None])
def test_every_is_a_positive_whole_number(wrong: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="every"):
        ActivationCheckpointing(every=wrong)
    with pytest.raises((TypeError, ValueError), match="every"):
        checkpoint_modules(_network(), every=wrong)


@pytest.mark.parametrize("arguments", [{"policy": "half"}, {"keep": ["matmul"]}, {"policy": "selective", "keep": []}])
def test_a_wrong_policy_is_refused_at_once(arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"policy|keep"):
        ActivationCheckpointing(**arguments)


def test_another_policy_for_a_checkpointed_module_is_refused() -> None:
    network = _network()
    checkpoint_modules(network, "1")
    with pytest.raises(ValueError, match="'1' is checkpointed already, with another policy"):
        checkpoint_modules(network, policy="selective")
    assert _checkpointed(network) == ["1"]
    uncheckpoint_modules(network)
    assert checkpoint_modules(network, policy="selective") == ("1", "2")
    assert copy.deepcopy(network).get_submodule("1").__class__ is Block


def test_sync_batchnorm_may_be_offloaded() -> None:
    network = nn.Sequential(Block(nn.SyncBatchNorm), Block(nn.SyncBatchNorm))
    assert checkpoint_modules(network, policy="offload") == ("0", "1")


@pytest.mark.parametrize("precision", ["bf16-mixed", "64-true", "bf16-true"])
def test_under_another_precision_of_the_trainer(precision: Any) -> None:
    runs = []
    for callbacks in ([], [ActivationCheckpointing()]):
        module = Module()
        _trainer(*callbacks, precision=precision).fit(module)
        runs.append(_values(module))
    assert _equal(*runs)


def test_it_is_on_during_the_fit_and_off_after() -> None:
    module, spy, callback = Module(), Spy(), ActivationCheckpointing()
    before = (repr(module), [type(inner) for inner in module.modules()])
    _trainer(spy, callback).fit(module)
    assert spy.in_batch == {("network.1", "network.2")}
    assert (repr(module), [type(inner) for inner in module.modules()]) == before
    assert callback.paths == ()


def test_it_is_on_before_a_callback_that_tries_batch_sizes() -> None:
    spy = Spy()
    _trainer(spy, ActivationCheckpointing()).fit(Module())  # the spy's on_fit_start comes first
    assert spy.at_fit_start == ["network.1", "network.2"]
    module = Module()
    finder = BatchSizeFinder(mode="power", steps_per_trial=1, init_val=2, max_trials=1)
    _trainer(finder, spy, ActivationCheckpointing(), max_epochs=1).fit(module)
    assert spy.in_batch == {("network.1", "network.2")}


def test_a_second_fit_with_the_same_objects() -> None:
    module, spy, callback = Module(), Spy(), ActivationCheckpointing()
    trainer = _trainer(spy, callback, max_epochs=1, limit_val_batches=0)
    trainer.fit(module)
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module)
    assert spy.in_batch == {("network.1", "network.2")}
    assert _checkpointed(module) == []

    plain = Module()
    trainer = _trainer(max_epochs=1, limit_val_batches=0)
    trainer.fit(plain)
    trainer.fit_loop.max_epochs = 2
    trainer.fit(plain)
    assert _equal(_values(module), _values(plain))


@pytest.mark.parametrize("built_in", ["setup", "configure_model"])
def test_blocks_that_are_built_later_are_found(built_in: str) -> None:
    module = Configured() if built_in == "configure_model" else Module("setup")
    spy = Spy()
    _trainer(spy, ActivationCheckpointing("Block"), num_sanity_val_steps=0, limit_val_batches=0).fit(module)
    assert spy.in_batch == {("network.1", "network.2")}
    assert _checkpointed(module) == []
    assert module.built == 1
    assert _equal(_values(module), _plain_loop())
    if isinstance(module, Configured):
        assert module.calls == 1  # by Lightning: a second call of ours would draw weights twice if it is not guarded


class Fails(Callback):
    def __init__(self, hook: str, error: type[BaseException] = RuntimeError) -> None:
        def fail(*_: Any, **__: Any) -> None:
            raise error("stop")

        setattr(self, hook, fail)


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("hook", ["setup", "on_fit_start", "on_train_batch_end", "on_validation_start", "on_train_end"])
def test_an_exception_undoes_it(hook: str, error: type[BaseException]) -> None:
    module, callback = Module(), ActivationCheckpointing()
    with pytest.raises((RuntimeError, KeyboardInterrupt, SystemExit)):
        _trainer(callback, Fails(hook, error)).fit(module)
    assert _checkpointed(module) == []
    assert callback.paths == ()


def test_a_name_that_means_nothing_stops_the_fit_and_changes_nothing() -> None:
    module = Module()
    with pytest.raises(ValueError, match=r"no path 'Blok'.*Block \(x2\)"):
        _trainer(ActivationCheckpointing(["Block", "Blok"])).fit(module)
    assert _checkpointed(module) == []


@pytest.mark.parametrize("wrong", [None, 3, []])
def test_a_wrong_argument_is_refused_at_once(wrong: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="modules"):
        ActivationCheckpointing(wrong)


def test_the_list_that_was_given_is_copied() -> None:
    names = ["Block"]
    callback = ActivationCheckpointing(names)
    names.append("Linear")
    assert callback.modules == ("Block",)


@pytest.mark.parametrize("method", ["validate", "test", "predict"])
def test_other_stages_do_nothing(method: str) -> None:
    module, callback = Module(), ActivationCheckpointing("nothing of that name")
    module.test_step = module.predict_step = lambda batch, batch_idx: None  # type: ignore[method-assign]
    getattr(_trainer(callback), method)(module, module.val_dataloader())
    assert callback.paths == ()


def test_a_checkpoint_of_the_run_loads_into_the_plain_model(tmp_path: Path) -> None:
    module = Module()
    saver = ModelCheckpoint(dirpath=tmp_path, filename="last", save_top_k=-1, every_n_train_steps=3)
    _trainer(ActivationCheckpointing(), saver, enable_checkpointing=True, max_epochs=1).fit(module)
    saved = torch.load(saver.best_model_path, weights_only=True)
    plain = Module()
    plain.load_state_dict(saved["state_dict"], strict=True)
    assert _equal(_values(plain), _values(module))
    _trainer(ActivationCheckpointing(), max_epochs=2).fit(module, ckpt_path=saver.best_model_path, weights_only=True)


@pytest.mark.parametrize(
    "average", [lambda: EMAWeightAveraging(decay=0.5), lambda: StochasticWeightAveraging(0.05, 0.5)]
)
def test_beside_an_average_of_the_weights(average: Callable[[], Callback]) -> None:
    runs = []
    for callbacks in ([], [ActivationCheckpointing()]):
        module = Module()
        _trainer(*callbacks, average()).fit(module)
        runs.append(_values(module))
    assert _equal(*runs)


@pytest.mark.parametrize("options", [{"policy": "selective"}, {"policy": "offload", "min_bytes": 0}])
@pytest.mark.parametrize("order", [1, -1])
def test_beside_an_average_pruning_and_quantization(
    options: dict[str, Any], order: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lightning_speedkit.memory.offload._is_on_host", lambda tensor: False)  # so that it copies
    runs = []
    for name, own in (("plain", []), ("checkpointed", [ActivationCheckpointing("Block", **options)])):
        module, spy, average = Module(), Spy(), AverageWeights("ema", decay=0.5)
        pruned = [(module.network.get_submodule(f"{block}.body.4"), "weight") for block in (1, 2)]
        pruning = ModelPruning("l1_unstructured", pruned, amount=0.5, use_lottery_ticket_hypothesis=False)
        quantize = QuantizeOnFitEnd(
            backend="torch-ao-dynamic",
            objective="size",
            monitor="loss",
            mode="min",
            max_metric_drop=10.0,
            folder=f"int8-{name}",
        )
        callbacks = [*own, average, pruning, quantize, spy][::order]
        _trainer(*callbacks, num_sanity_val_steps=0).fit(module)
        assert _checkpointed(module) == []
        assert spy.in_batch == {("network.1", "network.2") if own else ()}
        assert average.updates == 12
        assert (module.network.get_submodule("1.body.4").weight == 0).float().mean() >= 0.5
        assert quantize.report is not None
        (tried,) = (one for one in quantize.report.candidates if one.backend == "torch-ao-dynamic")
        assert tried.relative_error is not None  # int8 is no smaller here, so that none is kept
        runs.append([*_values(module), torch.tensor([tried.relative_error])])
    assert _equal(*runs)


@pytest.mark.parametrize("switch", ["fast_dev_run", "barebones"])
def test_the_trainer_s_quick_modes(switch: str) -> None:
    spy = Spy()
    arguments: dict[str, Any] = {switch: True}
    if switch == "barebones":
        arguments |= {"logger": None, "enable_checkpointing": None, "enable_progress_bar": None}
        arguments |= {"enable_model_summary": None}
    _trainer(spy, ActivationCheckpointing(), **arguments).fit(Module())
    assert spy.in_batch == {("network.1", "network.2")}


def test_what_the_user_checkpointed_before_stays() -> None:
    module = Module()
    assert checkpoint_modules(module, "network.1") == ("network.1",)
    spy = Spy()
    _trainer(spy, ActivationCheckpointing("Block")).fit(module)
    assert spy.in_batch == {("network.1", "network.2")}
    assert _checkpointed(module) == ["network.1"]


def test_checkpointing_twice_changes_nothing_and_undoing_is_by_path() -> None:
    network = _network()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert checkpoint_modules(network, "Block") == ("1", "2")
        assert checkpoint_modules(network, "Block") == ()
        assert checkpoint_modules(network) == ()
    assert uncheckpoint_modules(network, ["2", "no such path"]) == ("2",)
    assert _checkpointed(network) == ["1"]
    assert uncheckpoint_modules(network) == ("1",)
    assert uncheckpoint_modules(network) == ()
    assert type(network.get_submodule("1")) is Block


@pytest.mark.parametrize("modules", [["Block", "*.body"], ["1", "1.body.0"], ["*.body", "*.body.[04]"]])
def test_of_nested_modules_one_has_to_be_chosen(modules: list[str]) -> None:
    network = _network()
    with pytest.raises(ValueError, match=r"'[12]\.body(\.0)?' lies inside '[12](\.body)?'"):
        checkpoint_modules(network, modules)
    assert _checkpointed(network) == []


@pytest.mark.parametrize(("taken", "wanted"), [("Block", "*.body"), ("*.body", "Block")])
def test_what_is_inside_or_around_a_checkpointed_module_is_refused(taken: str, wanted: str) -> None:
    network = _network()
    paths = checkpoint_modules(network, taken)
    with pytest.raises(ValueError, match=r"'1\.body' lies inside '1'.*Is checkpointed already: '1"):
        checkpoint_modules(network, wanted)
    assert tuple(_checkpointed(network)) == paths


def _fit_and_count(callback: Callback, module: pl.LightningModule, text: str) -> int:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _trainer(callback).fit(module)
    return sum(text in str(warning.message) for warning in caught)


def test_warnings_come_once_per_fit() -> None:
    callback, module = ActivationCheckpointing("Block"), Module()
    module.network.get_submodule("2").accuracy = BinaryAccuracy()
    assert [_fit_and_count(callback, module, "is a metric inside") for _ in range(2)] == [1, 1]


def test_offload_on_a_cpu_is_said_to_do_nothing() -> None:
    assert _fit_and_count(ActivationCheckpointing(policy="offload"), Module(), "changes nothing on a CPU") == 1
    assert _fit_and_count(ActivationCheckpointing(), Module(), "changes nothing on a CPU") == 0


def test_a_metric_inside_is_named() -> None:
    network = _network()
    network.get_submodule("2").accuracy = BinaryAccuracy()
    with pytest.warns(UserWarning, match=r"'2\.accuracy' is a metric inside a checkpointed module"):
        checkpoint_modules(network)


@pytest.mark.parametrize("path", ["2", "2._checkpoint_wrapped_module"])
def test_a_module_that_torch_s_wrapper_checkpoints_is_refused(path: str) -> None:
    network = _network()
    network[2] = checkpoint_wrapper(network[2])
    with pytest.raises(ValueError, match=f"'{path}' is checkpointed already, by torch's checkpoint_wrapper"):
        checkpoint_modules(network, ["1", path])
    assert _checkpointed(network) == []


def test_checkpointing_that_the_model_brings_is_named() -> None:
    network = _network()
    network[2].body = checkpoint_wrapper(network[2].body)
    with pytest.warns(UserWarning, match=r"'2\.body' brings checkpointing of its own"):
        checkpoint_modules(network, "Block")
    network = _network()
    network.gradient_checkpointing = True
    with pytest.warns(UserWarning, match="'the model' brings checkpointing of its own"):
        checkpoint_modules(network, "Block")
    network.gradient_checkpointing = False
    uncheckpoint_modules(network)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        checkpoint_modules(network, "Block")


class NoSubclasses(type):
    def __new__(cls, name: str, bases: tuple[type, ...], body: dict[str, Any], **_: Any) -> Any:
        if any(isinstance(one, NoSubclasses) for one in bases):
            raise TypeError(f"{bases[-1].__name__} is final")
        return super().__new__(cls, name, bases, body)


class Final(nn.Linear, metaclass=NoSubclasses):
    pass


def _patched() -> nn.Module:
    block = Block()
    block.forward = lambda x: x  # type: ignore[method-assign]
    return block


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (torch.jit.script(nn.Linear(4, 4)), "'1' is a TorchScript module"),
        (_patched(), "'1' has a forward of its own"),
        (Block(nn.SyncBatchNorm), "'1' holds a SyncBatchNorm"),
        (nn.SyncBatchNorm(4), "'1' holds a SyncBatchNorm"),
        (nn.LazyLinear(4), "'1' is lazy"),
        (Final(4, 4), "'1' cannot be checkpointed.*Final is final"),
    ],
)
def test_what_cannot_be_recomputed_is_refused_and_nothing_is_changed(module: nn.Module, message: str) -> None:
    network = nn.Sequential(Block(), module, Block())
    with pytest.raises(ValueError, match=message):
        checkpoint_modules(network, ["0", "1", "2"])
    assert _checkpointed(network) == []


def test_a_lazy_module_that_has_its_parameters_is_like_any_other() -> None:
    network = nn.Sequential(nn.LazyLinear(4), nn.ReLU())
    network(torch.ones(2, 3))
    assert checkpoint_modules(network, "0") == ("0",)
    network(torch.ones(2, 3)).sum().backward()
    assert uncheckpoint_modules(network) == ("0",)


def test_a_shared_module_by_its_second_path() -> None:
    network = _network()
    network.add_module("second", network.get_submodule("2"))
    assert checkpoint_modules(network, "second") == ("2",)
    assert uncheckpoint_modules(network, ["second"]) == ("2",)
    assert _checkpointed(network) == []


def test_a_class_set_by_something_else_since_is_left_with_a_warning() -> None:
    network = _network()
    checkpoint_modules(network, "1")
    network[1].__class__ = type("Sharded", (type(network[1]),), {})
    with pytest.warns(UserWarning, match="'1' stays checkpointed: .* Sharded"):
        assert uncheckpoint_modules(network) == ()


def test_a_strategy_that_wraps_the_model_is_refused() -> None:
    module = Module()
    with pytest.raises(MisconfigurationException, match="does not go with FSDPStrategy"):
        ActivationCheckpointing().setup(SimpleNamespace(strategy=FSDPStrategy()), module, "fit")  # type: ignore[arg-type]
    assert _checkpointed(module) == []


class Synchronizes(SingleDeviceStrategy):
    """Does to the model in ``setup`` what DDP does under ``sync_batchnorm=True``, which torch allows on GPUs only."""

    def setup(self, trainer: pl.Trainer) -> None:
        nn.SyncBatchNorm.convert_sync_batchnorm(self.lightning_module)
        super().setup(trainer)


@pytest.mark.parametrize("built_in", ["__init__", "setup"])
def test_sync_batchnorm_by_the_trainer_is_refused(built_in: str) -> None:
    module = Module(built_in)
    with pytest.raises((MisconfigurationException, ValueError), match=r"'network\.1' holds a SyncBatchNorm"):
        _trainer(ActivationCheckpointing(), strategy=Synchronizes("cpu")).fit(module)
    assert _checkpointed(module) == []


class Unused(Module):
    """Has a block without a part in the loss of every second batch."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        first, one, two, last = self.network
        x = one(first(batch[0]))
        return nn.functional.mse_loss(last(two(x) if batch_idx % 2 else x), batch[1])


class Sharded(Module):
    """Shards its network as ModelParallelStrategy wants it."""

    def _build(self, here: str) -> None:
        if here == "__init__":
            self.network = _network(nn.LayerNorm)

    def configure_model(self) -> None:
        for part in (self.network[1], self.network[2], self.network):
            fully_shard(part, mesh=self.device_mesh["data_parallel"])


def _fit_on_a_rank(how: str, callbacks: list[Callback]) -> list[Tensor]:
    """Two ranks with 3 rows each per batch, and two batches per step where gradients are accumulated."""
    module = {"unused": Unused, "sharded fit": Sharded}.get(how, Module)()
    module.batch_size = 3
    strategy: Any = ModelParallelStrategy(
        data_parallel_size=2, tensor_parallel_size=1, save_distributed_checkpoint=False
    )
    if how != "sharded fit":
        strategy = DDPStrategy(
            process_group_backend="gloo", static_graph=how == "static", find_unused_parameters=how == "unused"
        )
    accumulate = 2 if how == "accumulated" else 1
    _trainer(
        *callbacks, devices=2, strategy=strategy, accumulate_grad_batches=accumulate, max_epochs=1, limit_val_batches=0
    ).fit(module)
    assert _checkpointed(module) == []
    values = module.state_dict().values()
    return [value.full_tensor() if isinstance(value, DTensor) else value.clone() for value in values]


def _sharded_gradients_on_a_rank(modules: list[str]) -> list[Tensor]:
    network = _network(nn.LayerNorm)
    if modules:
        checkpoint_modules(network, modules)
    for block in (network[1], network[2], network):
        fully_shard(block)
    assert isinstance(network[1], FSDPModule)
    assert isinstance(network[1], Recomputed) is bool(modules)
    torch.manual_seed(1)
    inputs, targets = _data().tensors
    nn.functional.mse_loss(network(inputs), targets).backward()
    return [parameter.grad.full_tensor() for parameter in network.parameters()]


def _same_on_a_rank() -> dict[str, bool]:
    same = {}
    for how in ("accumulated", "static", "unused", "sharded fit"):
        plain = _fit_on_a_rank(how, [])
        for policy in ("full", "selective", "offload"):
            spy = Spy()
            fitted = _fit_on_a_rank(how, [spy, ActivationCheckpointing("Block", policy=policy)])
            same[f"{how}, {policy}"] = _equal(plain, fitted) and spy.in_batch == {("network.1", "network.2")}
    same["sharded"] = _equal(_sharded_gradients_on_a_rank([]), _sharded_gradients_on_a_rank(["Block"]))
    return same


def test_two_ranks_train_the_same_as_without() -> None:
    one, other = on_two_ranks(_same_on_a_rank)
    assert [how for how, same in one.items() if not same] == []
    assert one == other
    assert len(one) == 13


@pytest.mark.parametrize("policy", ["full", "selective", "offload"])
@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.BatchNorm1d])
def test_under_torch_compile(policy: str, norm: type[nn.Module]) -> None:
    def gradients(network: nn.Module) -> list[Tensor]:
        torch._dynamo.reset()
        torch.manual_seed(1)
        loss = torch.compile(network, backend="aot_eager")(torch.ones(5, 3).cumsum(0)).square().mean()
        loss.backward()
        return [loss.detach(), *(parameter.grad for parameter in network.parameters()), *network.buffers()]

    networks = []
    for checkpointed in (False, True):
        network = _network(norm)
        for dropout in (network[1].body[3], network[2].body[3]):
            dropout.p = 0.0  # compiled code draws other numbers
        if checkpointed:
            checkpoint_modules(network, policy=policy)
        networks.append(gradients(network))
    torch.testing.assert_close(*networks, rtol=1e-4, atol=1e-6)


def test_a_copy_of_the_callback_is_usable() -> None:
    module = Module()
    spy = Spy()
    _trainer(spy, copy.deepcopy(ActivationCheckpointing("Block"))).fit(module)
    assert spy.in_batch == {("network.1", "network.2")}
