"""Whole models: what must not change, what is saved, checkpoints, and models of torchvision and timm."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_speedkit.architecture import apply_plan, lighten
from lightning_speedkit.architecture import lighten as lighten_function
from lightning_speedkit.architecture.lighten_choice import KINDS


def _net() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(16, 32, 3, padding=1, bias=False),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.Conv2d(32, 48, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(4),
        nn.Flatten(),
        nn.Linear(768, 96),
        nn.ReLU(),
        nn.Linear(96, 10),
    )


X = torch.randn(4, 16, 12, 12, generator=torch.Generator().manual_seed(0))


def _faked_seconds(monkeypatch: pytest.MonkeyPatch, told: tuple[float, float]) -> None:
    module = __import__("sys").modules[lighten_function.__module__]
    monkeypatch.setattr(module, "paired_seconds", lambda *_: told)


@pytest.mark.parametrize("kind", KINDS)
def test_the_model_of_the_caller_stays_and_the_copy_keeps_the_interface(kind: str) -> None:
    net = _net()
    net[3].eval()
    net[7].weight.requires_grad_(False)
    state, random = copy.deepcopy(net.state_dict()), torch.get_rng_state()
    light, report = lighten(net, X, [kind], min_saving=None)
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(value, state[name]) for name, value in net.state_dict().items())
    assert [module.training for module in net] == [True] * 3 + [False] + [True] * 6
    assert [module.training for module in light] == [True] * 3 + [False] + [True] * 6  # type: ignore[union-attr]
    assert light(X).shape == net(X).shape
    assert report.layers
    assert {one.kind for one in report.layers} == {kind}
    frozen = [name for name, p in light.named_parameters() if not p.requires_grad]
    assert {name.partition(".")[0] for name in frozen} == {"7"}
    shared = {p.data_ptr() for p in net.parameters()} & {p.data_ptr() for p in light.parameters()}
    assert not shared


def test_the_figures_agree_with_the_models() -> None:
    net = _net()
    light, report = lighten(net, X, min_saving=None)
    assert report.parameters_after == sum(p.numel() for p in light.parameters()) < report.parameters_before
    saved = sum(one.multiply_adds_before - one.multiply_adds_after for one in report.layers)
    assert report.flops_before - report.flops_after == 2 * saved
    spared = sum(one.parameters_before - one.parameters_after for one in report.layers)
    assert report.parameters_before - report.parameters_after == spared
    net.eval(), light.eval()
    off = float((net(X) - light(X)).detach().norm() / net(X).detach().norm())
    assert report.output_error == pytest.approx(off, rel=1e-4)
    assert report.seconds_before is None


def test_weights_of_low_rank_are_replaced_without_loss() -> None:
    linear = nn.Linear(64, 64)
    linear.weight = nn.Parameter(torch.randn(64, 3) @ torch.randn(3, 64))
    light, report = lighten(linear, X[:, :, :, 0].reshape(-1, 64), ["low-rank"], energy=0.999999, min_saving=None)
    assert report.layers[0].rank == 3
    assert report.output_error < 1e-4
    assert light.get_submodule("down").get_parameter("weight").shape == (3, 64)


def test_nothing_worth_it_is_a_copy_that_computes_the_same_bits_and_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    net = _net().eval()
    _faked_seconds(monkeypatch, (1.0, 0.95))
    with pytest.warns(UserWarning, match=r"replaced nothing \(.*no replacement saves 0.1 of its time"):
        light, report = lighten(net, X)
    assert torch.equal(light(X), net(X))
    assert report.plan["layers"] == []
    assert list(light.state_dict()) == list(net.state_dict())


def test_seconds_decide_and_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    _faked_seconds(monkeypatch, (1.0, 0.5))
    _, report = lighten(_net(), X)
    assert {(one.seconds_before, one.seconds_after) for one in report.layers} == {(1.0, 0.5)}
    assert (report.seconds_before, report.seconds_after) == (1.0, 0.5)


def test_real_timing_runs_and_leaves_no_trace() -> None:
    net = _net()
    random = torch.get_rng_state()
    _, report = lighten(net, X, ["low-rank"], ratio=0.1, min_saving=0.0)
    assert torch.equal(torch.get_rng_state(), random)
    assert "the multiply-adds" in report.left["9"] or "9" in {one.name for one in report.layers}
    assert all(one.seconds_before is not None for one in report.layers)


def test_layers_that_are_small_or_not_reached_stay() -> None:
    net = nn.ModuleDict({"used": nn.Linear(256, 256), "tiny": nn.Linear(256, 1), "never": nn.Linear(256, 256)})

    def call(module: nn.Module) -> Any:
        assert isinstance(module, nn.ModuleDict)
        return module["tiny"](module["used"](torch.zeros(2, 256)))

    net["tiny"] = nn.Linear(256, 1)
    _, report = lighten(net, call, min_saving=None)
    assert report.left["never"] == "the example does not reach it"
    assert "no kind asked for" in report.left["tiny"]
    small = nn.Sequential(nn.Linear(512, 512), nn.Linear(512, 512), nn.Unflatten(1, (128, 4)), nn.Linear(4, 4))
    _, report = lighten(small, torch.zeros(1, 512), min_saving=None, skip=["0"])
    assert report.left["0"] == "named in skip"


class Classifier(LightningModule):
    """A user's module: the plan is one of its hyperparameters."""

    def __init__(self, plan: dict[str, Any] | None = None) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net: nn.Module = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
        if plan is not None:
            self.net = apply_plan(self.net, plan, warm_start=False)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters())


def test_a_plan_in_the_hyperparameters_makes_checkpoints_load(tmp_path: Path) -> None:
    data = DataLoader(TensorDataset(torch.randn(32, 64), torch.randint(10, (32,))), 8)
    plain = Classifier()
    light, report = lighten(plain.net, torch.zeros(8, 64), min_saving=None)
    module = Classifier(json.loads(json.dumps(report.plan)))
    module.net.load_state_dict(light.state_dict())
    quiet: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = Trainer(max_epochs=1, accelerator="cpu", default_root_dir=tmp_path, **quiet)
    trainer.fit(module, data)
    path = tmp_path / "light.ckpt"
    trainer.save_checkpoint(path)
    again = Classifier.load_from_checkpoint(path, weights_only=True)
    x = torch.randn(3, 64)
    assert torch.equal(again.net(x), module.net(x))
    resumed = Trainer(max_epochs=2, accelerator="cpu", enable_checkpointing=False, **quiet)
    resumed.fit(Classifier(report.plan), data, ckpt_path=path, weights_only=True)
    assert resumed.global_step == 8


def test_a_plan_applied_again_gives_the_same_bits() -> None:
    net = _net()
    light, report = lighten(net, X, min_saving=None)
    again = apply_plan(net, report.plan)
    assert all(torch.equal(value, again.state_dict()[name]) for name, value in light.state_dict().items())
    with pytest.raises(ValueError, match="cannot be replaced: it has no such layer, or it is replaced already"):
        apply_plan(light, report.plan)


@pytest.mark.parametrize(
    ("library", "name", "size"),
    [("torchvision", "resnet18", 32), ("timm", "mobilenetv3_small_050", 32), ("timm", "vit_tiny_patch16_224", 224)],
)
def test_models_of_torchvision_and_timm(library: str, name: str, size: int) -> None:
    if library == "timm":
        model = pytest.importorskip("timm").create_model(name, num_classes=7)
    else:
        model = pytest.importorskip("torchvision").models.get_model(name, num_classes=7)
    x = torch.randn(2, 3, size, size)
    skip = ["blocks.1*", "blocks.[2-9]*"] if name.startswith("vit") else ["layer4"] if library == "torchvision" else []
    light, report = lighten(model, x, ["depthwise", "low-rank"], min_saving=None, skip=skip)
    assert report.layers
    assert report.flops_after < report.flops_before
    light.train()
    light(x).sum().backward()
    assert all(p.grad is not None for n, p in light.named_parameters() if ".spatial." in n or ".down." in n)


def test_it_can_be_exported_traced_and_copied() -> None:
    light, _ = lighten(_net().eval(), X, min_saving=None)
    for other in (torch.fx.symbolic_trace(light), torch.export.export(light, (X,)).module(), copy.deepcopy(light)):
        torch.testing.assert_close(other(X), light(X), atol=1e-5, rtol=1e-5)


def test_a_model_whose_code_needs_the_layer_itself_is_told_by_name() -> None:
    class Picky(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(32, 32)

        def forward(self, x: Tensor) -> Tensor:
            if not isinstance(self.inner, nn.Linear):
                raise TypeError("inner must be Linear")
            result: Tensor = self.inner(x)
            return result

    with pytest.raises(ValueError, match=r"lighter model does not run \(TypeError: inner must be Linear.*skip.*inner"):
        lighten(Picky(), torch.zeros(2, 32), min_saving=None)


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"kinds": ["sparse"]}, ValueError, "'sparse' is none of 'depthwise', 'grouped', 'low-rank'"),
        ({"kinds": "depthwise"}, TypeError, "list of kinds"),
        ({"kinds": []}, ValueError, "kinds is empty"),
        ({"ratio": 1.0}, ValueError, r"ratio=1\.0 must be above 0 and below 1"),
        ({"ratio": float("nan")}, ValueError, "ratio=nan"),
        ({"ratio": None}, TypeError, "ratio is a number"),
        ({"energy": 1.5}, ValueError, "energy=1.5 must be above 0 and at most 1"),
        ({"min_saving": -0.1}, ValueError, "min_saving=-0.1 must be 0 or more, below 1"),
        ({"rank": 0}, ValueError, "rank=0 must be 1 or more"),
        ({"rank": 2.0}, TypeError, "rank is a whole number"),
        ({"rank": 2, "energy": 0.5}, ValueError, "give one of them"),
        ({"skip": ["nowhere"]}, ValueError, "no module 'nowhere'"),
        ({"example": torch.zeros(2, 5)}, ValueError, "does not run with the example"),
    ],
)
def test_bad_arguments_are_told(arguments: dict[str, Any], error: type[Exception], words: str) -> None:
    example = arguments.pop("example", X)
    with pytest.raises(error, match=words.replace("=1.5", r"=1\.5").replace("-0.1", r"-0\.1")):
        lighten(_net(), example, **arguments)
