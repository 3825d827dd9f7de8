"""fp8 training: which layers are exchanged, that they come back, and on which devices it is refused.

torchao is not among the libraries of the tests, so a module of the same names stands in for it, whose layers compute
what the plain ones do; where torchao is installed, it is run as well, by emulation.
"""

from __future__ import annotations

import importlib.util
import sys
import types
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_speedkit.errors import HardwareNeedError, MissingExtraError
from lightning_speedkit.precision import Float8Precision, SpeedkitMixedPrecision
from lightning_speedkit.precision.float8 import Float8Swap, _refuse_device


@dataclass(frozen=True)
class _Config:
    recipe: str = "tensorwise"
    emulate: bool = False
    pad_inner_dim: bool = False

    @staticmethod
    def from_recipe_name(recipe: str) -> _Config:
        return _Config(recipe)


class _Float8Linear(nn.Linear):
    config: Any
    calls = 0

    def forward(self, input: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(input)


def _convert(layer: nn.Linear, *, config: _Config) -> nn.Module:
    with torch.device("meta"):
        made = _Float8Linear(layer.in_features, layer.out_features, bias=False)
    made.weight, made.bias, made.config = layer.weight, layer.bias, config
    return made


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = types.ModuleType("torchao.float8")
    module.Float8LinearConfig, module.convert_to_float8_training = _Config, _convert
    monkeypatch.setitem(sys.modules, "torchao", types.ModuleType("torchao"))
    monkeypatch.setitem(sys.modules, "torchao.float8", module)


class Module(pl.LightningModule):
    def __init__(self, fails: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16), nn.ReLU())
        self.odd = nn.Linear(16, 17)
        self.head = nn.Linear(17, 2)
        self.fails = fails
        self.kinds: list[str] = []
        self.losses: list[float] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.kinds = [type(layer).__name__ for layer in self.modules() if isinstance(layer, nn.Linear)]
        loss = nn.functional.cross_entropy(self.head(self.odd(self.body(batch[0]))).float(), batch[1])
        self.losses.append(loss.item())
        if self.fails:
            raise ZeroDivisionError("a fault of the user's code")
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)

    def train_dataloader(self) -> Any:
        draw = torch.Generator().manual_seed(1)
        inputs = torch.randn(50, 16, generator=draw)
        return DataLoader(TensorDataset(inputs, (inputs.sum(1) > 0).long()), batch_size=10, generator=draw)


def _fit(plugin: Any, module: Module) -> pl.Trainer:
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = pl.Trainer(
        accelerator="cpu",
        max_epochs=2,
        plugins=[plugin],
        enable_model_summary=False,
        **quiet,  # type: ignore[arg-type]
    )
    trainer.fit(module)
    return trainer


def test_the_layers_that_fit_are_float8_while_it_trains_and_plain_afterwards(stand_in: None, tmp_path: Any) -> None:
    module, plugin = Module(), Float8Precision(emulate=True)
    layers = dict(module.named_modules())
    weights = dict(module.named_parameters())
    trainer = _fit(plugin, module)
    assert module.kinds == ["_Float8Linear", "_Float8Linear", "Linear", "Linear"]
    assert dict(module.named_modules()) == layers
    assert all(one is weights[name] for name, one in module.named_parameters())
    assert plugin.paths == ()
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    assert list(torch.load(tmp_path / "a.ckpt", weights_only=True)["state_dict"]) == list(Module().state_dict())


def test_with_layers_that_compute_the_same_it_is_bf16_mixed_bit_for_bit(stand_in: None) -> None:
    one, other = Module(), Module()
    _fit(Float8Precision(emulate=True), one)
    _fit(SpeedkitMixedPrecision("bf16-mixed"), other)
    assert one.losses == other.losses
    assert len(one.losses) == 10
    assert all(map(torch.equal, one.state_dict().values(), other.state_dict().values()))


def test_after_an_exception_the_layers_are_plain(stand_in: None) -> None:
    module = Module(fails=True)
    layers = dict(module.named_modules())
    with pytest.raises(ZeroDivisionError):
        _fit(Float8Precision(emulate=True), module)
    assert "_Float8Linear" in module.kinds
    assert dict(module.named_modules()) == layers


def test_what_is_skipped_hooked_changed_or_shared(stand_in: None) -> None:
    class Other(nn.Linear):
        pass

    shared = nn.Linear(16, 16)
    model = nn.ModuleDict(
        {
            "plain": nn.Linear(32, 16, bias=False),
            "head": nn.Linear(16, 16),
            "blocks": nn.ModuleList([nn.ModuleDict({"gate": nn.Linear(16, 16), "up": shared}) for _ in range(2)]),
            "hooked": nn.Linear(16, 16),
            "own": nn.Linear(16, 16),
            "subclass": Other(16, 16),
            "parametrized": nn.utils.parametrizations.weight_norm(nn.Linear(16, 16)),
            "odd": nn.Linear(24, 16),
        }
    ).eval()
    model["hooked"].register_forward_hook(lambda *arguments: None)
    model["own"].forward = lambda input: input
    before = dict(model.named_modules(remove_duplicate=False))
    swap = Float8Swap(model, "rowwise", ["head", "*.gate"], emulate=True)
    assert swap.paths == ("plain", "blocks.0.up", "blocks.1.up")
    one, other = model["blocks"][0]["up"], model["blocks"][1]["up"]
    assert one is other
    assert one.weight is shared.weight
    assert one.config == _Config("rowwise", emulate=True, pad_inner_dim=True)
    assert not one.training
    model.train()
    one.weight = nn.Parameter(torch.ones(16, 16))
    swap.undo()
    swap.undo()
    assert dict(model.named_modules(remove_duplicate=False)) == before
    assert shared.weight is one.weight
    assert shared.training


def test_a_layer_that_something_else_has_exchanged_stays(stand_in: None) -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    kept = model[1]
    swap = Float8Swap(model)
    mine = model[0] = nn.Identity()
    swap.undo()
    assert model[0] is mine
    assert model[1] is kept


def test_a_model_without_a_layer_for_it_is_refused(stand_in: None) -> None:
    message = r"multiples of 16, and Sequential has none to take \(1 linear layers, skip=\['0'\]\).*'bf16-mixed'"
    with pytest.raises(MisconfigurationException, match=message):
        Float8Swap(nn.Sequential(nn.Linear(16, 16)), skip=["0"])


@pytest.mark.parametrize(
    ("skip", "hint"), [("haed", "The linear"), ("body", r"write 'body\.\*'"), ("body.1", "The linear")]
)
def test_what_skip_cannot_mean_is_refused_and_nothing_is_changed(stand_in: None, skip: str, hint: str) -> None:
    module = Module()
    with pytest.raises(MisconfigurationException, match=rf"skip: '{skip}' names no linear layer.*{hint}.*'body\.0'"):
        _fit(Float8Precision(skip=["head", skip], emulate=True), module)
    assert {type(layer) for layer in module.modules() if isinstance(layer, nn.Linear)} == {nn.Linear}


def test_without_torchao_the_pip_line_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao", None)
    monkeypatch.delitem(sys.modules, "torchao.float8", raising=False)
    with pytest.raises(MissingExtraError, match=r"torchao, which is not installed: pip install '.*\[fp8\]'"):
        _fit(Float8Precision(emulate=True), Module())


def test_a_cpu_is_refused_and_nothing_is_changed() -> None:
    module = Module()
    layers = dict(module.named_modules())
    with pytest.raises(HardwareNeedError, match=r"8\.9 or higher.*on the device 'cpu'.*Use 'bf16-mixed'"):
        _fit(Float8Precision(), module)
    assert dict(module.named_modules()) == layers


@pytest.mark.parametrize(
    ("name", "capability", "architecture", "refused"),
    [
        ("A100", (8, 0), None, "A100 of compute capability 8.0"),
        ("GeForce RTX 3090", (8, 6), None, "of compute capability 8.6"),
        ("L4", (8, 9), None, None),
        ("H200", (9, 0), None, None),
        ("B200", (10, 0), None, None),
        ("MI250X", (9, 0), "gfx90a:sramecc+:xnack-", r"MI250X \(gfx90a\)"),
        ("MI300X", (9, 4), "gfx942:sramecc+:xnack-", None),
    ],
)
def test_devices(
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    capability: tuple[int, int],
    architecture: str | None,
    refused: str | None,
) -> None:
    properties = types.SimpleNamespace(gcnArchName=architecture)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: name)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device=None: properties)
    monkeypatch.setattr(torch.version, "hip", None if architecture is None else "6.4")
    if refused is None:
        _refuse_device(torch.device("cuda", 0))
    else:
        with pytest.raises(HardwareNeedError, match=refused):
            _refuse_device(torch.device("cuda", 0))


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"recipe": "e4m3"}, ValueError, "recipe='e4m3' is not known; use one of 'tensorwise', 'rowwise'"),
        ({"recipe": ["tensorwise"]}, ValueError, "is not known"),
        ({"skip": "head"}, TypeError, r"skip='head' must be a list of paths"),
        ({"skip": [1]}, TypeError, "must be a list of paths"),
        ({"emulate": 1}, TypeError, "emulate=1 must be True or False; got int"),
    ],
)
def test_wrong_arguments_are_refused(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        Float8Precision(**arguments)


def test_a_recipe_that_cannot_be_emulated_on_a_cpu_is_refused(stand_in: None) -> None:
    with pytest.raises(MisconfigurationException, match="cannot be emulated on 'cpu'; use 'rowwise' or 'tensorwise'"):
        _fit(Float8Precision("rowwise_with_gw_hp", emulate=True), Module())


def test_the_list_of_the_caller_is_copied() -> None:
    skip = ["head"]
    plugin = Float8Precision(skip=skip)
    plugin.skip.append("x")
    assert skip == ["head"]


@pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="torchao is not installed")
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_torchao_itself_by_emulation(recipe: str) -> None:
    one, other = Module(), Module()
    layers = dict(one.named_modules())
    _fit(Float8Precision(recipe, emulate=True), one)
    _fit(SpeedkitMixedPrecision("bf16-mixed"), other)
    assert one.kinds == ["Float8Linear", "Float8Linear", "Linear", "Linear"]
    assert dict(one.named_modules()) == layers
    assert one.losses != other.losses
    assert one.losses == pytest.approx(other.losses, abs=0.1)
    assert one.losses[-1] < one.losses[0]
