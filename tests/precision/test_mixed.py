"""Mixed precision that follows the device, against plain loops under ``torch.autocast``."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_speedkit.errors import DivergenceError
from lightning_speedkit.facts import Hardware
from lightning_speedkit.precision import SpeedkitMixedPrecision
from tests.two_ranks import on_two_ranks

BATCHES = 6
ROWS = 4
LOW = 256.0  # a scale at which no batch of these tests overflows by itself, as the first ones do at 65536


def _network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.LayerNorm(8), nn.Linear(8, 1))


def _data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    return torch.randn(BATCHES * ROWS, 3, generator=generator), torch.randn(BATCHES * ROWS, 1, generator=generator)


class Module(pl.LightningModule):
    def __init__(self, optimizer: str = "SGD", spoiled: tuple[int, ...] = (), **options: Any) -> None:
        super().__init__()
        self.network = _network()
        self.optimizer, self.options, self.spoiled = optimizer, options, spoiled
        self.dtypes: set[torch.dtype] = set()
        self.losses: list[Tensor] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor | None:
        output = self.network(batch[0])
        self.dtypes.add(output.dtype)
        loss = nn.functional.mse_loss(output.float(), batch[1])
        self.losses.append(loss.detach())
        return loss * float("inf") if batch_idx in self.spoiled else loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return getattr(torch.optim, self.optimizer)(self.parameters(), lr=0.1, **self.options)

    def train_dataloader(self) -> Any:
        return DataLoader(TensorDataset(*_data()), batch_size=ROWS, generator=torch.Generator())


def _trainer(*plugins: Any, **arguments: Any) -> pl.Trainer:
    defaults: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": 1,
        "max_epochs": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    return pl.Trainer(**{**defaults, **arguments}, plugins=list(plugins))


def _values(module: nn.Module) -> list[Tensor]:
    return [value.clone() for value in module.state_dict().values()]


def _equal(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) > 0 and all(map(torch.equal, one, other))


def _plain_loop(
    precision: str, clip: float | None = None, optimizer: str = "SGD", scale: float = 65536.0, **options: Any
) -> list[Tensor]:
    """Losses, then weights, of ``torch.autocast`` and ``GradScaler`` without Lightning."""
    network = _network()
    stepper = getattr(torch.optim, optimizer)(network.parameters(), lr=0.1, **options)
    scaler = torch.amp.GradScaler("cpu", scale, enabled=precision == "16-mixed")
    losses = []
    for inputs, targets in zip(*(tensor.split(ROWS) for tensor in _data()), strict=True):
        stepper.zero_grad()
        with torch.autocast("cpu", torch.float16 if precision == "16-mixed" else torch.bfloat16, cache_enabled=False):
            loss = nn.functional.mse_loss(network(inputs).float(), targets)
        losses.append(loss.detach())
        scaler.scale(loss).backward()
        if clip is not None:
            scaler.unscale_(stepper)
            nn.utils.clip_grad_norm_(network.parameters(), clip)
        scaler.step(stepper)
        scaler.update()
    return losses + _values(network)


@pytest.mark.parametrize("clip", [None, 0.1])
@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed"])
def test_a_fit_equals_the_plain_loop_bit_for_bit(precision: Any, clip: float | None) -> None:
    module = Module(momentum=0.9)
    _trainer(SpeedkitMixedPrecision(precision), gradient_clip_val=clip).fit(module)
    assert _equal(module.losses + _values(module.network), _plain_loop(precision, clip, momentum=0.9))
    assert module.dtypes == {torch.bfloat16 if precision == "bf16-mixed" else torch.float16}


SPELLINGS: dict[str, Callable[[], dict[str, Any]]] = {
    "cpu": lambda: {"accelerator": "cpu"},
    "an instance": lambda: {"accelerator": CPUAccelerator()},
    "a strategy": lambda: {"accelerator": "auto", "strategy": SingleDeviceStrategy("cpu")},
    "an instance and a strategy": lambda: {"accelerator": CPUAccelerator(), "strategy": SingleDeviceStrategy("cpu")},
}
if not torch.cuda.is_available():
    SPELLINGS["auto"] = lambda: {"accelerator": "auto"}


@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed"])
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_every_spelling_of_the_accelerator_gives_the_same_device(spelling: str, precision: Any) -> None:
    module, plugin = Module(), SpeedkitMixedPrecision(precision)
    _trainer(plugin, **SPELLINGS[spelling]()).fit(module)
    assert plugin.device == "cpu"
    assert _equal(module.losses + _values(module.network), _plain_loop(precision))
    if plugin.scaler is not None:
        assert plugin.scaler.is_enabled()
        assert plugin.scaler.state_dict()["_growth_tracker"] > 0


def test_lightning_s_own_choice_goes_wrong_for_an_instance() -> None:
    trainer = _trainer(accelerator=CPUAccelerator(), precision="bf16-mixed")
    assert trainer.precision_plugin.device == "cuda"  # what the plugin is there to repair


@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed"])
def test_a_plugin_made_where_there_is_a_gpu_follows_a_run_on_the_cpu(
    monkeypatch: pytest.MonkeyPatch, precision: Any
) -> None:
    monkeypatch.setattr("lightning_speedkit.precision.mixed._best_device_type", lambda: "mps")
    plugin = SpeedkitMixedPrecision(precision, *([512.0, 3] if precision == "16-mixed" else []))
    assert plugin.device == "mps"
    module = Module()
    _trainer(plugin).fit(module)
    assert plugin.device == "cpu"
    if plugin.scaler is not None:  # the settings moved along, and 6 good steps doubled 512 twice
        assert plugin.scaler.state_dict() == {
            "scale": 2048.0,
            "growth_factor": 2.0,
            "backoff_factor": 0.5,
            "growth_interval": 3,
            "_growth_tracker": 0,
        }


@pytest.mark.parametrize("fused", [True, False])
def test_bf16_clips_with_a_fused_optimizer(fused: bool) -> None:
    module = Module("AdamW", fused=fused)
    _trainer(SpeedkitMixedPrecision("bf16-mixed"), gradient_clip_val=0.01).fit(module)
    oracle = _plain_loop("bf16-mixed", 0.01, "AdamW", fused=fused)
    assert _equal(module.losses + _values(module.network), oracle)
    assert not _equal(oracle, _plain_loop("bf16-mixed", None, "AdamW", fused=fused))


def test_bf16_clips_by_value_with_a_fused_optimizer() -> None:
    seen: list[float] = []

    class Watch(Module):
        def on_before_zero_grad(self, optimizer: Any) -> None:
            seen.extend(float(p.grad.abs().max()) for p in self.parameters() if p.grad is not None)

    plugin = SpeedkitMixedPrecision("bf16-mixed")
    _trainer(plugin, gradient_clip_val=0.01, gradient_clip_algorithm="value").fit(Watch("SGD", fused=True))
    assert seen
    assert max(seen) == pytest.approx(0.01)


def test_lightning_s_own_plugin_refuses_it() -> None:
    with pytest.raises(RuntimeError, match="does not allow for gradient clipping"):
        _trainer(MixedPrecision("bf16-mixed", "cpu"), gradient_clip_val=0.1).fit(Module("AdamW", fused=True))


def test_fp16_with_a_fused_optimizer_and_clipping_names_the_way_out() -> None:
    with pytest.raises(MisconfigurationException, match=r"fused=False.*bf16-mixed"):
        _trainer(SpeedkitMixedPrecision("16-mixed"), gradient_clip_val=0.1).fit(Module("AdamW", fused=True))


def test_fp16_and_lbfgs_is_refused_before_the_first_batch() -> None:
    module = Module("LBFGS")
    with pytest.raises(MisconfigurationException, match=r"LBFGS evaluates.*'bf16-mixed' or '32-true', or another"):
        _trainer(SpeedkitMixedPrecision("16-mixed")).fit(module)
    assert module.losses == []


def test_fp16_and_lbfgs_in_manual_optimization_is_refused() -> None:
    class Manual(Module):
        automatic_optimization = False

    with pytest.raises(MisconfigurationException, match="LBFGS evaluates"):
        _trainer(SpeedkitMixedPrecision("16-mixed")).fit(Manual("LBFGS"))


def test_bf16_and_lbfgs_train() -> None:
    module = Module("LBFGS", max_iter=2)
    _trainer(SpeedkitMixedPrecision("bf16-mixed")).fit(module)
    assert len(module.losses) > BATCHES


@pytest.mark.parametrize("fused", [False, True])
def test_a_scale_that_collapses_is_told_and_ends_the_run(fused: bool) -> None:
    plugin = SpeedkitMixedPrecision("16-mixed", initial_scale=4.0, smallest_scale=2.0, max_skipped_in_a_row=4)
    module = Module(spoiled=tuple(range(BATCHES)), fused=fused)
    start = _values(module.network)
    trainer = _trainer(plugin, max_epochs=5)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with pytest.raises(DivergenceError, match=r"5 optimizer steps in a row .*fell to 0.125"):
            trainer.fit(module)
    said = [str(w.message) for w in caught if "The loss scale of '16-mixed' fell" in str(w.message)]
    assert len(said) == 1
    assert "fell to 1, below 2: 2 optimizer steps in a row" in said[0]
    assert plugin.skipped_steps == 5
    assert _equal(_values(module.network), start)


def test_a_scale_that_recovers_is_told_and_the_run_goes_on() -> None:
    plugin = SpeedkitMixedPrecision("16-mixed", initial_scale=2.0, max_skipped_in_a_row=2)
    module = Module(spoiled=(0, 1, 3, 4))
    with pytest.warns(UserWarning, match="The loss scale of '16-mixed' fell to 0.5, below 1"):
        _trainer(plugin).fit(module)
    assert plugin.skipped_steps == 4
    assert len(module.losses) == BATCHES


def test_fp16_where_torch_has_no_scaler_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Off(torch.amp.GradScaler):
        def __init__(self, device: str, **options: Any) -> None:
            super().__init__(device, **options, enabled=False)

    monkeypatch.setattr(torch.amp, "GradScaler", Off)
    with pytest.raises(MisconfigurationException, match=r"has none for 'cpu' here.*Use 'bf16-mixed' or '32-true'"):
        _trainer(SpeedkitMixedPrecision("16-mixed")).fit(Module())


class Scheduled(Module):
    """Halves the learning rate after every step."""

    interval = "step"
    frequency = 1

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
        return [optimizer], [{"scheduler": scheduler, "interval": self.interval, "frequency": self.frequency}]


class Rates(Callback):
    def __init__(self) -> None:
        self.rates: list[float] = []
        self.weights: list[Tensor] = []

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.rates.append(trainer.optimizers[0].param_groups[0]["lr"])
        self.weights.append(pl_module.network[0].weight.detach().clone())


class Foreign:
    """An optimizer that is not torch's: it has what Lightning asks for, and no hooks."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner
        self.state, self.param_groups, self.defaults = inner.state, inner.param_groups, inner.defaults
        self.zero_grad, self.state_dict, self.load_state_dict = inner.zero_grad, inner.state_dict, inner.load_state_dict

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        return self.inner.step(closure)


class Lookahead(torch.optim.Optimizer):
    """Wraps another without calling ``super().__init__``, as timm's does: it takes hooks, and its step calls none."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self._optimizer_step_pre_hooks: Any = OrderedDict()
        self._optimizer_step_post_hooks: Any = OrderedDict()
        self.inner = inner
        self.state, self.param_groups, self.defaults = inner.state, inner.param_groups, inner.defaults

    def step(self, closure: Any = None) -> Any:
        return self.inner.step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:  # torch's own would hook the step after all
        self.inner.zero_grad(set_to_none)


class Inheriting(torch.optim.SGD):
    """Has a step of its own around torch's."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], Any]] = {
    "torch's": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "torch's, fused": lambda parameters: torch.optim.SGD(parameters, lr=0.1, fused=True),
    "a subclass": lambda parameters: Inheriting(parameters, lr=0.1),
    "not a torch optimizer": lambda parameters: Foreign(torch.optim.SGD(parameters, lr=0.1)),
    "one whose step is not hooked": lambda parameters: Lookahead(torch.optim.SGD(parameters, lr=0.1)),
}


@pytest.mark.parametrize("spoiled", [(), (0, 4)])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_skipped_steps_are_counted_for_every_kind_of_optimizer(kind: str, spoiled: tuple[int, ...]) -> None:
    class Other(Module):
        def configure_optimizers(self) -> Any:
            return OPTIMIZERS[kind](list(self.parameters()))

    plugin, module = SpeedkitMixedPrecision("16-mixed", LOW), Other(spoiled=spoiled)
    _trainer(plugin).fit(module)
    assert plugin.skipped_steps == len(spoiled)
    assert plugin.scaler is not None
    assert plugin.scaler.get_scale() == LOW / 2 ** len(spoiled)
    if not spoiled:
        assert _equal(module.losses + _values(module.network), _plain_loop("16-mixed", scale=LOW))


@pytest.mark.parametrize("kind", [kind for kind in OPTIMIZERS if kind != "not a torch optimizer"])
def test_a_schedule_moves_at_every_step_for_every_kind_of_optimizer(kind: str) -> None:
    class Other(Module):
        def configure_optimizers(self) -> Any:
            optimizer = OPTIMIZERS[kind](list(self.parameters()))
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
            return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

    seen = Rates()
    _trainer(SpeedkitMixedPrecision("16-mixed", LOW), callbacks=[seen]).fit(Other(spoiled=(1,)))
    assert seen.rates == [0.1, 0.05, 0.05, 0.025, 0.0125, 0.00625]


@pytest.mark.parametrize("fused", [False, True])
def test_a_step_that_is_skipped_moves_neither_weights_nor_schedule(fused: bool) -> None:
    seen, plugin = Rates(), SpeedkitMixedPrecision("16-mixed", LOW)
    module = Scheduled(spoiled=(0, 1, 4), fused=fused)
    trainer = _trainer(plugin, callbacks=[seen])
    trainer.fit(module)
    assert seen.rates == [0.1, 0.1, 0.1, 0.05, 0.025, 0.025]
    moved = [not torch.equal(one, other) for one, other in zip(seen.weights, seen.weights[1:], strict=False)]
    assert moved == [False, False, True, True, False]
    assert plugin.skipped_steps == 3
    assert plugin.scaler is not None
    assert plugin.scaler.get_scale() == LOW / 8
    assert [config.frequency for config in trainer.lr_scheduler_configs] == [1]


def test_a_last_step_that_is_skipped_leaves_the_schedule_s_settings_as_they_were() -> None:
    plugin, module = SpeedkitMixedPrecision("16-mixed", LOW), Scheduled(spoiled=(BATCHES - 1,))
    trainer = _trainer(plugin)
    trainer.fit(module)
    assert plugin.skipped_steps == 1
    assert [config.frequency for config in trainer.lr_scheduler_configs] == [1]


def test_accumulated_steps_and_a_schedule_by_epochs() -> None:
    seen, plugin = Rates(), SpeedkitMixedPrecision("16-mixed", LOW)
    module = Scheduled(spoiled=(1,))
    _trainer(plugin, callbacks=[seen], accumulate_grad_batches=2).fit(module)
    assert plugin.skipped_steps == 1
    assert seen.rates == [0.1, 0.1, 0.1, 0.1, 0.05, 0.05]

    seen, plugin = Rates(), SpeedkitMixedPrecision("16-mixed", LOW)
    module = Scheduled(spoiled=(BATCHES - 1,))
    module.interval = "epoch"
    _trainer(plugin, callbacks=[seen], max_epochs=2).fit(module)
    assert seen.rates == [0.1] * BATCHES + [0.05] * BATCHES


def test_a_batch_without_a_loss_is_no_skipped_step() -> None:
    class Sometimes(Scheduled):
        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor | None:
            loss = super().training_step(batch, batch_idx)
            return None if batch_idx == 2 else loss

    plugin, module = SpeedkitMixedPrecision("16-mixed", LOW), Sometimes()
    _trainer(plugin).fit(module)
    assert plugin.skipped_steps == 0
    assert len(module.losses) == BATCHES


def test_manual_optimization() -> None:
    class Manual(Module):
        automatic_optimization = False

        def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(super().training_step(batch, batch_idx))
            optimizer.step()

    for precision, spoiled in (("bf16-mixed", ()), ("16-mixed", ()), ("16-mixed", (0, 3))):
        plugin = SpeedkitMixedPrecision(precision, LOW if precision == "16-mixed" else None)
        module = Manual(spoiled=spoiled)
        _trainer(plugin).fit(module)
        assert plugin.skipped_steps == len(spoiled)
        if not spoiled:
            assert _equal(module.losses + _values(module.network), _plain_loop(precision, scale=LOW))


def _saved(path: Path, plugin: Any, **module: Any) -> dict[str, Any]:
    trainer = _trainer(plugin, max_steps=3)
    trainer.fit(Module(**module))
    trainer.save_checkpoint(path)
    loaded: dict[str, Any] = torch.load(path, weights_only=True)
    return loaded


@pytest.mark.parametrize("own", [True, False])
def test_the_scaler_s_state_survives_a_resume(tmp_path: Path, own: bool) -> None:
    scaler = torch.amp.GradScaler("cpu", LOW)
    writer = SpeedkitMixedPrecision("16-mixed", LOW) if own else MixedPrecision("16-mixed", "cpu", scaler)
    saved = _saved(tmp_path / "a.ckpt", writer, spoiled=(1,))
    state = saved["SpeedkitMixedPrecision" if own else "MixedPrecision"]
    assert (state["scale"], state["_growth_tracker"]) == (LOW / 2, 1)
    reader, module = SpeedkitMixedPrecision("16-mixed"), Module()
    at_start: list[dict[str, Any]] = []

    class Look(Callback):
        def on_train_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
            at_start.append(reader.state_dict())

    _trainer(reader, callbacks=[Look()], max_epochs=2, max_steps=5).fit(
        module, ckpt_path=tmp_path / "a.ckpt", weights_only=True
    )
    assert at_start == [state]
    assert reader.state_dict()["_growth_tracker"] == 3


@pytest.mark.parametrize(
    ("writer", "reader", "message"),
    [
        (SpeedkitMixedPrecision("16-mixed"), "bf16-mixed", "it is dropped"),
        (MixedPrecision("16-mixed", "cpu"), "bf16-mixed", "it is dropped"),
        (SpeedkitMixedPrecision("bf16-mixed"), "16-mixed", "holds no loss scale: the scaler starts at 65536"),
        (None, "16-mixed", "holds no loss scale"),
        (SpeedkitMixedPrecision("16-mixed"), "16-mixed", None),
        (SpeedkitMixedPrecision("bf16-mixed"), "bf16-mixed", None),
        (None, "bf16-mixed", None),
    ],
)
def test_a_resume_under_another_precision_says_so_once(
    tmp_path: Path, writer: Any, reader: Any, message: str | None
) -> None:
    plain = [] if writer is None else [writer]
    trainer = _trainer(*plain, max_steps=3)
    trainer.fit(Module())
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _trainer(SpeedkitMixedPrecision(reader), max_steps=5).fit(
            Module(), ckpt_path=tmp_path / "a.ckpt", weights_only=True
        )
    said = [str(w.message) for w in caught if "loss scale" in str(w.message)]
    assert len(said) == (message is not None)
    assert message is None or message in said[0]


def test_a_second_fit_with_the_same_plugin_keeps_its_scale() -> None:
    plugin = SpeedkitMixedPrecision("16-mixed", LOW)
    _trainer(plugin).fit(Module(spoiled=(0,)))
    _trainer(plugin).fit(Module(spoiled=(0,)))
    assert plugin.scaler is not None
    assert plugin.scaler.get_scale() == LOW / 4
    assert plugin.skipped_steps == 2


def test_validation_and_prediction_are_under_autocast() -> None:
    class Predicts(Module):
        def predict_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            return self.network(batch[0])

        def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
            self.dtypes.add(self.network(batch[0]).dtype)

    module = Predicts()
    trainer = _trainer(SpeedkitMixedPrecision("bf16-mixed"), accelerator=CPUAccelerator())
    outputs = trainer.predict(module, module.train_dataloader())
    trainer.validate(module, module.train_dataloader(), verbose=False)
    assert {output.dtype for output in outputs} == module.dtypes == {torch.bfloat16}


@pytest.mark.parametrize("make", [copy.deepcopy, lambda plugin: pickle.loads(pickle.dumps(plugin))])
def test_a_copy_of_the_plugin_trains_the_same(make: Any) -> None:
    module = Module()
    _trainer(make(SpeedkitMixedPrecision("16-mixed"))).fit(module)
    assert _equal(module.losses + _values(module.network), _plain_loop("16-mixed"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"precision": "32-true"}, "'32-true' is no mixed precision; use 'bf16-mixed' or '16-mixed'"),
        ({"precision": "bf16-mixed", "initial_scale": 1.0}, "which 'bf16-mixed' does not have"),
        ({"precision": "bf16-mixed", "growth_interval": 5}, "which 'bf16-mixed' does not have"),
        ({"precision": "16-mixed", "initial_scale": 0.0}, "must be a positive number"),
        ({"precision": "16-mixed", "initial_scale": float("nan")}, "must be a positive number"),
        ({"precision": "16-mixed", "initial_scale": float("inf")}, "must be a positive number"),
        ({"precision": "16-mixed", "growth_interval": 0}, "must be a number of steps"),
        ({"precision": "16-mixed", "initial_scale": -1}, "must be a positive number"),
        ({"precision": "bf16-mixed", "smallest_scale": 1.0}, r"\(smallest_scale\), which 'bf16-mixed' does not have"),
        ({"precision": "bf16-mixed", "max_skipped_in_a_row": 5}, "which 'bf16-mixed' does not have"),
        ({"precision": "16-mixed", "smallest_scale": 0.0}, "must be a positive number"),
        ({"precision": "16-mixed", "max_skipped_in_a_row": 0}, "must be a number of steps"),
    ],
)
def test_wrong_arguments_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SpeedkitMixedPrecision(**arguments)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("initial_scale", "65536"),
        ("initial_scale", True),
        ("initial_scale", [1.0]),
        ("initial_scale", torch.tensor(1.0)),
        ("growth_interval", "2000"),
        ("growth_interval", True),
        ("growth_interval", 2.0),
        ("growth_interval", 2.5),
        ("smallest_scale", "1"),
        ("max_skipped_in_a_row", 2.0),
    ],
)
def test_arguments_of_a_wrong_type_are_refused(name: str, value: Any) -> None:
    with pytest.raises(TypeError, match=rf"{name}=.* must be a .*for example.* got {type(value).__name__}"):
        SpeedkitMixedPrecision("16-mixed", **{name: value})


@pytest.mark.parametrize(
    ("native", "precision", "warns"), [(False, "bf16-mixed", 1), (True, "bf16-mixed", 0), (False, "16-mixed", 0)]
)
def test_emulated_bf16_is_said(monkeypatch: pytest.MonkeyPatch, native: bool, precision: Any, warns: int) -> None:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation or native)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")
    plugin = SpeedkitMixedPrecision(precision)
    plugin.scaler = None  # so that no scaler is made for a device that is not there
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        plugin._follow(torch.device("cuda", 0))
    assert sum("Tesla T4 computes bfloat16 by emulation" in str(w.message) for w in caught) == warns
    assert plugin.device == "cuda"


@pytest.mark.parametrize(
    ("native", "precision", "warns"), [(False, "bf16-mixed", 1), (True, "bf16-mixed", 0), (False, "16-mixed", 0)]
)
def test_bf16_that_a_cpu_emulates_is_said(
    monkeypatch: pytest.MonkeyPatch, native: bool, precision: Any, warns: int
) -> None:
    here = Hardware(accelerator="cpu", device_name="a CPU", native_bf16=native)
    monkeypatch.setattr("lightning_speedkit.precision.mixed.read_hardware", lambda accelerator: here)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _trainer(SpeedkitMixedPrecision(precision)).fit(Module())
    assert sum("This CPU has no instructions for bfloat16" in str(w.message) for w in caught) == warns


def _fit_on_a_rank() -> tuple[str, int, bool]:
    own = SpeedkitMixedPrecision("16-mixed", LOW)
    weights = []
    for plugin in (own, MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", LOW))):
        module = Module(spoiled=(1,))
        strategy = DDPStrategy(process_group_backend="gloo")
        _trainer(plugin, devices=2, strategy=strategy, accelerator=CPUAccelerator(), limit_train_batches=3).fit(module)
        weights.append(_values(module))
    return own.device, own.skipped_steps, _equal(*weights)


def test_two_ranks() -> None:
    assert on_two_ranks(_fit_on_a_rank) == [("cpu", 1, True)] * 2


@pytest.mark.gpu
@pytest.mark.parametrize("accelerator", ["gpu", "cuda", "auto"])
def test_on_a_gpu(accelerator: str) -> None:
    plugin, module = SpeedkitMixedPrecision("16-mixed"), Module()
    _trainer(plugin, accelerator=accelerator).fit(module)
    assert plugin.device == "cuda"
    assert module.dtypes == {torch.float16}
