"""What a step takes, against numbers by hand, and what the profile leaves as it was."""

from __future__ import annotations

import logging
import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_speedkit.memory import estimate_memory
from lightning_speedkit.parallel.suggest_profile import profile_model, with_estimate


def _mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


class Classifier(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = _mlp()

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
        self.log("loss", loss)
        return {"loss": loss}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


BATCH = (torch.zeros(32, 8), torch.zeros(32, 4))


@pytest.mark.parametrize("how", ["module", "loss"])
def test_numbers_by_hand(how: str) -> None:
    if how == "module":
        profile = profile_model(Classifier(), BATCH)
    else:
        profile = profile_model(_mlp(), BATCH, loss=nn.functional.mse_loss)
    weights = 8 * 16 + 16 * 4
    assert profile.parameters == weights + 20
    assert profile.parameter_bytes == profile.trainable_bytes == 4 * (weights + 20)
    # kept: the input, the result of relu, the output and the target
    assert profile.activation_bytes == 4 * 32 * (8 + 16 + 4 + 4)
    # twice per weight and sample in the forward, as often for the gradients of weights, and once for that of the relu
    assert profile.flops == 2 * 32 * (2 * weights + 16 * 4)
    assert (profile.batch_bytes, profile.batch_size) == (4 * 32 * 12, 32)
    assert (profile.blocks, profile.split_limit, profile.pipeline_path) == ((), 0, "")


def test_half_precision() -> None:
    true = profile_model(_mlp(), BATCH[0], precision="bf16-true")
    assert true.parameter_bytes == 2 * true.parameters
    assert true.weight_copy_bytes == 0
    mixed = profile_model(_mlp(), BATCH[0], precision="bf16-mixed")
    assert mixed.parameter_bytes == 4 * mixed.parameters
    assert mixed.weight_copy_bytes == 2 * 16 * 4  # the first layer's weight is not kept, since the input is data
    assert mixed.activation_bytes == 2 * 32 * (8 + 16)
    assert profile_model(_mlp(), BATCH[0], precision="64-true").parameter_bytes == 8 * true.parameters


def test_tied_and_frozen_parameters_and_buffers() -> None:
    net = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False), nn.BatchNorm1d(8))
    net[1].weight = net[0].weight
    net[2].requires_grad_(False)
    profile = profile_model(net, torch.zeros(4, 8))
    assert profile.parameter_bytes == 4 * (64 + 16)
    assert profile.trainable_bytes == 4 * 64
    assert profile.buffer_bytes == 4 * 16 + 8


def test_a_model_of_any_size_on_the_meta_device() -> None:
    with torch.device("meta"):
        net, x = nn.Sequential(nn.Linear(10**5, 10**5), nn.Linear(10**5, 10**5)), torch.zeros(64, 10**5)
    profile = profile_model(net, x)
    assert profile.parameter_bytes == 8 * (10**10 + 10**5)
    assert profile.activation_bytes == 4 * 2 * 64 * 10**5
    assert net[0].weight.is_meta


def test_nothing_is_changed() -> None:
    module = Classifier().eval()
    module.net[1].seen = {"a": [1]}  # type: ignore[assignment]
    before = {name: value.clone() for name, value in module.state_dict().items()}
    torch.manual_seed(3), random.seed(3), np.random.seed(3)
    states = (torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist())  # type: ignore[index]
    profile_model(module, BATCH, precision="bf16-true")
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert np.random.get_state()[1].tolist() == states[2]  # type: ignore[index]
    assert torch.get_default_dtype() == torch.float32
    assert not module.training
    assert not torch.is_autocast_enabled("cpu")
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert all(p.grad is None and type(p) is nn.Parameter for p in module.parameters())
    assert not logging.getLogger("torch._subclasses.fake_tensor").filters


def test_a_module_with_a_trainer() -> None:
    module = Classifier()
    trainer = Trainer(
        accelerator="cpu",
        max_steps=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader(TensorDataset(*BATCH), batch_size=32))
    assert profile_model(module, BATCH).parameters == 212
    assert module.trainer is trainer


class _Reads(LightningModule):
    def training_step(self, batch: Tensor) -> Tensor:
        return torch.zeros(1, requires_grad=True) * (2 if batch.sum().item() > 0 else 1)


class _Manual(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


@pytest.mark.parametrize(
    ("module", "batch", "options", "message"),
    [
        (
            _mlp(),
            torch.zeros(3, 9),
            {},
            r"Sequential cannot run without data on a batch with tensors of shape \[\(3, 9",
        ),
        (_Reads(), torch.zeros(3), {}, r"A step that looks at values, as .item\(\) does, cannot be counted"),
        (_Manual(), BATCH, {}, "the module optimizes manually"),
        (Classifier(), BATCH, {"loss": nn.functional.mse_loss}, "loss belongs to a plain module"),
        (_mlp(), BATCH[0], {"loss": nn.functional.mse_loss}, "batch is a pair of inputs and target, got a tensor"),
        (_mlp(), BATCH, {"loss": lambda a, b: a - b}, r"the loss is a tensor of shape \(32, 4\); a scalar"),
        (nn.ReLU(), torch.zeros(3), {}, "a scalar that needs a gradient is wanted"),
        (_mlp(), BATCH[0], {"precision": "bf16"}, "precision='bf16' is not one of '32-true'"),
        (nn.LazyLinear(3), BATCH[0], {}, "LazyLinear has lazy parameters without a shape"),
    ],
)
def test_what_is_refused(module: nn.Module, batch: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        profile_model(module, batch, **options)
    assert torch.get_default_dtype() == torch.float32


def test_a_class_is_no_module() -> None:
    with pytest.raises(TypeError, match=r"module must be an nn\.Module, got Linear"):
        profile_model(nn.Linear, BATCH[0])  # type: ignore[arg-type]


def _encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
def test_what_is_kept_is_what_the_estimate_of_memory_finds(precision: str) -> None:
    batch = torch.zeros(8, 50, 32)
    profile, estimate = (
        profile_model(_encoder(), batch, precision=precision),
        estimate_memory(_encoder(), batch, precision),
    )
    assert profile.parameter_bytes == estimate.parameters
    assert profile.trainable_bytes == estimate.gradients
    counted = profile.activation_bytes + profile.weight_copy_bytes
    assert counted == pytest.approx(estimate.activations, rel=0.15)


@dataclass
class _Estimate:
    parameters: int = 848
    gradients: int = 848
    optimizer_state: int = 1696
    activations: int = 5000
    phase: str = "backward"
    precision: str = "32-true"


def test_the_estimate_replaces_what_was_counted() -> None:
    profile = profile_model(_mlp(), BATCH, loss=nn.functional.mse_loss)
    told, states = with_estimate(profile, _Estimate(), "32-true")
    assert (told.activation_bytes, states) == (5000, 2.0)
    # the peak is in the optimizer step: then the backward held no more than that and the gradients
    late = _Estimate(activations=100, phase="optimizer step")
    assert with_estimate(profile, late, "32-true")[0].activation_bytes == 948
    late = _Estimate(activations=10**6, phase="optimizer step")
    assert with_estimate(profile, late, "32-true")[0].activation_bytes == 10**6


def test_blocks_share_in_what_the_estimate_says() -> None:
    batch = torch.zeros(8, 50, 32)
    profile = profile_model(_encoder(), batch)
    estimate = _Estimate(profile.parameter_bytes, activations=2 * int(profile.activation_bytes))
    doubled, _ = with_estimate(profile, estimate, "32-true")
    assert [b.activation_bytes for b in doubled.blocks] == [2 * b.activation_bytes for b in profile.blocks]
    assert len(doubled.blocks) == 2


@pytest.mark.parametrize("estimate", [_Estimate(precision="bf16-mixed"), _Estimate(parameters=7)])
def test_an_estimate_of_something_else_is_refused(estimate: _Estimate) -> None:
    profile = profile_model(_mlp(), BATCH[0])
    with pytest.raises(ValueError, match="Estimate the same module in the same precision"):
        with_estimate(profile, estimate, "32-true")
