"""The estimate against sums by hand, against torch's own record of allocations, and what it must leave alone."""

from __future__ import annotations

import copy
import random
import re
from typing import Any

import lightning.pytorch as pl
import numpy
import pytest
import torch
from torch import Tensor, nn

from lightning_speedkit.memory import checkpoint_modules, estimate_memory
from lightning_speedkit.memory.recomputation import Recomputed
from tests.memory.allocations import allocated_peak

FLOAT = 4


def _mlp(width: int = 64, hidden: int = 256) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, hidden, bias=False), nn.ReLU(), nn.Linear(hidden, width, bias=False))


def test_each_part_is_the_sum_worked_out_by_hand() -> None:
    weights = 2 * 64 * 256 * FLOAT
    told = estimate_memory(_mlp(), torch.zeros(8, 64), optimizer="sgd-momentum")
    assert (told.parameters, told.gradients, told.optimizer_state) == (weights, weights, weights)
    assert (told.buffers, told.batch) == (0, 8 * 64 * FLOAT)
    assert told.device == "cpu"


def test_the_peak_of_a_large_batch_is_worked_out_by_hand() -> None:
    rows = 4096
    wide, narrow = rows * 256 * FLOAT, rows * 64 * FLOAT
    weights = 2 * 64 * 256 * FLOAT
    told = estimate_memory(_mlp(), torch.zeros(rows, 64), optimizer="none", loss=None)
    # In the backward of the second layer: the outputs of both layers and of the ReLU, and the gradients of two of them;
    # a quarter is left for what is made on the way (a mean's gradient, weights' gradients).
    least = weights + narrow + wide + wide + narrow
    assert told.phase == "backward"
    assert least < told.peak_bytes < 1.25 * (least + weights + narrow)


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_it_is_what_torchs_allocator_gives_out_in_two_real_steps(optimizer: str, precision: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(128, 512), nn.GELU(), nn.LayerNorm(512), nn.Dropout(0.1), nn.Linear(512, 128))
    batch = torch.randn(1024, 128)
    told = estimate_memory(model, batch, precision, optimizer)
    real = torch.optim.AdamW(model.parameters()) if optimizer == "adamw" else torch.optim.SGD(model.parameters())

    def run() -> None:
        for _ in range(2):
            real.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=precision != "32-true"):
                loss = model(batch).float().mean()
            loss.backward()
            real.step()

    # In 16 bits a kernel holds float32 copies inside.
    tolerance = 0.03 if precision == "32-true" else 0.1
    there = told.parameters + told.buffers + told.batch
    assert told.peak_bytes == pytest.approx(there + allocated_peak(run), rel=tolerance)


def test_fake_and_run_agree() -> None:
    model, batch = _mlp(), torch.randn(512, 64)
    fake, run = estimate_memory(model, batch), estimate_memory(model, batch, method="run")
    assert (fake.parameters, fake.gradients, fake.phase) == (run.parameters, run.gradients, run.phase)
    assert fake.peak_bytes == pytest.approx(run.peak_bytes, rel=1e-4)


def test_checkpointed_blocks_are_so_in_the_estimate() -> None:
    blocks = nn.Sequential(*(nn.Sequential(nn.Linear(64, 512), nn.GELU(), nn.Linear(512, 64)) for _ in range(6)))
    batch = torch.randn(512, 64)
    plain = estimate_memory(blocks, batch, optimizer="none")
    checkpoint_modules(blocks, [str(i) for i in range(6)])
    less = estimate_memory(blocks, batch, optimizer="none")
    assert less.activations < plain.activations / 2
    assert all(isinstance(block, Recomputed) for block in blocks)


def test_sixteen_bits_are_half() -> None:
    model, batch = _mlp(), torch.randn(512, 64)
    full, half = estimate_memory(model, batch), estimate_memory(model, batch, "bf16-true")
    assert half.parameters * 2 == full.parameters
    assert half.batch * 2 == full.batch
    assert half.peak_bytes < 0.6 * full.peak_bytes


class _Module(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = _mlp()
        self.steps = 0

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> dict[str, Tensor]:
        self.steps += 1
        loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
        self.log("loss", loss)
        return {"loss": loss}

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1)}


def test_a_lightning_module_runs_its_own_step_and_optimizer() -> None:
    module = _Module()
    told = estimate_memory(module, (torch.zeros(8, 64), torch.zeros(8, 64)))
    assert told.optimizer_state == told.parameters == 2 * 64 * 256 * FLOAT
    assert told.batch == 2 * 8 * 64 * FLOAT
    assert module.steps == 0


def test_gradients_are_there_in_the_forward_of_lightning_and_not_of_a_plain_loop() -> None:
    batch = torch.zeros(4, 64)
    plain = estimate_memory(_mlp(), (batch, batch), optimizer="sgd", loss=nn.functional.mse_loss)
    lightning = estimate_memory(_Module(), (batch, batch), optimizer="sgd")
    assert lightning.peak_bytes >= plain.peak_bytes


def test_nothing_is_changed() -> None:
    module = _Module()
    module.net[0].weight.grad = torch.ones_like(module.net[0].weight)
    module.eval()
    before = copy.deepcopy(module.state_dict())
    states = random.getstate(), numpy.random.get_state()[1].tolist(), torch.get_rng_state()
    functions = torch.get_rng_state, torch.set_rng_state
    batch = torch.ones(4, 64), torch.zeros(4, 64)
    for method in ("fake", "run"):
        estimate_memory(module, batch, "bf16-mixed", method=method)
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert torch.equal(module.net[0].weight.grad, torch.ones_like(module.net[0].weight))
    assert module.net[2].weight.grad is None
    assert not module.training
    assert random.getstate() == states[0]
    assert numpy.random.get_state()[1].tolist() == states[1]
    assert torch.equal(torch.get_rng_state(), states[2])
    assert (torch.get_rng_state, torch.set_rng_state) == functions
    assert "log" not in vars(module)
    assert torch.equal(batch[0], torch.ones(4, 64))


def test_the_table_is_told_as_text() -> None:
    told = str(estimate_memory(_mlp(), torch.zeros(8, 64)))
    assert told.splitlines()[0] == "A training step on cpu in 32-true"
    assert len(told.splitlines()) == 8
    assert "optimizer state" in told


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"module": 3}, TypeError, "module is a torch.nn.Module, got int"),
        ({"module": nn.ReLU}, TypeError, "module is a torch.nn.Module, got ReLU. Make one: ReLU(...)."),
        ({"batch": 4}, TypeError, "batch is one batch of tensors, such as next(iter(loader)), got int"),
        (
            {"batch": [torch.zeros(8, 16), torch.zeros(8)]},
            ValueError,
            "Sequential.forward(input) cannot be called with 2 arguments of the batch: too many positional arguments. "
            "If the batch is a pair of inputs and target, give loss too",
        ),
        ({"batch": {"x": torch.zeros(8, 16)}}, ValueError, "the keys 'x' of the batch: missing a required argument"),
        ({"batch": [torch.utils.data.DataLoader([1])]}, TypeError, "got list without a tensor"),
        ({"precision": "bf16"}, ValueError, "precision='bf16' is not one of '32-true', 'bf16-mixed'"),
        ({"method": "guess"}, ValueError, "method='guess' is neither 'fake' nor 'run'"),
        ({"optimizer": "adamwx"}, ValueError, "optimizer='adamwx' is unknown. Did you mean 'adamw'"),
        ({"optimizer": lambda parameters: None}, TypeError, "optimizer returned NoneType"),
        ({"loss": nn.functional.mse_loss}, ValueError, "With loss, batch is a pair of inputs and target, got a tensor"),
    ],
)
def test_bad_input_is_told(arguments: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=re.escape(words)):
        estimate_memory(**{"module": _mlp(), "batch": torch.zeros(2, 64), **arguments})


def test_a_device_that_is_not_there_is_told() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    with pytest.raises(ValueError, match="device='cuda': torch finds no such device here"):
        estimate_memory(_mlp(), torch.zeros(2, 64), device="cuda")
