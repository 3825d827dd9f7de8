"""Checkpoints of one number of ranks, or of one plan, on another; and without the strategy."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback
from torch import nn

from lightning_speedkit.parallel.plan import ModelParallelPlan
from lightning_speedkit.parallel.plan_checkpoint import is_sharded_checkpoint, unshard_checkpoint
from tests.parallel.plan_models import Net, close, loader, trainer_of, weights_of
from tests.two_ranks import on_ranks

PLANS: dict[str, dict[str, Any]] = {
    "two shards": {"shard_class": ["Block"]},
    "two layers": {"tensor_parallel": 2},
    "one": {},
    "four": {"shard_min_parameters": 30},
    "copies": {"replicas": 2},
    "both": {"tensor_parallel": 2, "data_parallel": 2},
    "both copies": {"tensor_parallel": 1, "replicas": 4},
}
RANKS = {"one": 1, "two shards": 2, "two layers": 2, "four": 4, "copies": 4, "both": 4, "both copies": 4}


class Adam(Net):
    """Has state of several tensors for each parameter, in two groups."""

    def configure_optimizers(self) -> Any:
        named = dict(self.named_parameters())
        biases = [p for name, p in named.items() if name.endswith("bias")]
        others = [p for name, p in named.items() if not name.endswith("bias")]
        groups = [{"params": others, "weight_decay": 0.1}, {"params": biases, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, lr=0.01)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.7)}


def _expected(epochs: int) -> list[torch.Tensor]:
    model = Adam()
    configured = model.configure_optimizers()
    optimizer, schedule = configured["optimizer"], configured["lr_scheduler"]
    for _ in range(epochs):
        for x, y in loader():
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        schedule.step()
    return weights_of(model)


class Save(Callback):
    def __init__(self, path: str) -> None:
        self.path = path

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        if trainer.current_epoch == 1:
            trainer.save_checkpoint(self.path)


def _replica(run: Any, plan: dict[str, Any]) -> tuple[int, int]:
    tensor = plan.get("tensor_parallel", 1)
    return run.global_rank // tensor, max(1, run.world_size // tensor)


def _write(names: list[str], folder: str) -> list[Any]:
    found = []
    for name in names:
        for save in ("full", "sharded"):
            model = Adam()
            strategy: Any = ModelParallelPlan(**PLANS[name], save=save)
            path = str(Path(folder, f"{name} {save}"))
            run = trainer_of(strategy, devices=RANKS[name], max_epochs=2, callbacks=[Save(path)])
            run.fit(model, loader(*_replica(run, PLANS[name])))
            found.append(weights_of(model))
            run.save_checkpoint(f"{path} after")
    return found


def _read(names: list[str], paths: list[str]) -> list[Any]:
    found = []
    for name in names:
        for path in paths:
            model = Adam()
            for parameter in model.parameters():
                parameter.data.zero_()
            run = trainer_of(ModelParallelPlan(**PLANS[name]), devices=RANKS[name], max_epochs=4)
            run.fit(model, loader(*_replica(run, PLANS[name])), ckpt_path=path, weights_only=True)
            found.append(weights_of(model))
            run.test(model, loader(*_replica(run, PLANS[name])), ckpt_path=path, verbose=False)
            found.append(weights_of(model))
    return found


@pytest.fixture(scope="module")
def folder() -> Any:
    with tempfile.TemporaryDirectory() as made:
        for world in (1, 2, 4):
            names = [name for name in PLANS if RANKS[name] == world]
            for rank in on_ranks(world, _write, names, made, timeout=60.0):
                for weights in rank:
                    close(weights, _expected(2), 3e-6)  # Adam divides by what is near 0
        yield made


@pytest.mark.parametrize("world", [1, 2, 4])
def test_each_plan_resumes_what_every_plan_wrote(folder: str, world: int) -> None:
    names = [name for name in PLANS if RANKS[name] == world]
    paths = [str(Path(folder, f"{name} {save}")) for name in PLANS for save in ("full", "sharded")]
    halves = paths if world != 4 else paths[1:4]
    for rank in on_ranks(world, _read, names, halves, timeout=120.0):
        for number, weights in enumerate(rank):
            close(weights, _expected(2 if number % 2 else 4), 3e-6)


def test_a_full_one_is_that_of_the_plain_module(folder: str) -> None:
    for name in PLANS:
        for path in (Path(folder, f"{name} full"), Path(folder, f"{name} full after")):
            checkpoint = torch.load(path, weights_only=True)
            assert list(checkpoint["state_dict"]) == list(Adam().state_dict())
            model = Adam()
            model.load_state_dict(checkpoint["state_dict"])
            close(weights_of(model), _expected(2), 3e-6)
            run = trainer_of("auto", devices=1, max_epochs=4)
            run.fit(model, loader(), ckpt_path=str(path), weights_only=True)
            close(weights_of(model), _expected(4), 3e-6)


def test_a_sharded_one_becomes_a_full_one(folder: str, tmp_path: Path) -> None:
    for name in PLANS:
        path = Path(folder, f"{name} sharded")
        assert is_sharded_checkpoint(path)
        unshard_checkpoint(path, tmp_path / "whole.ckpt")
        model = Adam()
        run = trainer_of("auto", devices=1, max_epochs=4)
        run.fit(model, loader(), ckpt_path=str(tmp_path / "whole.ckpt"), weights_only=True)
        close(weights_of(model), _expected(4), 3e-6)
    with pytest.raises(MisconfigurationException, match="is no sharded checkpoint"):
        unshard_checkpoint(tmp_path, tmp_path / "x")


class Wider(Net):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(5, 2)


class Other(Net):
    def __init__(self) -> None:
        super().__init__()
        self.outlets = self.outlet
        del self.outlet


def _refused(folder: str) -> list[str]:
    found = []
    for kind in (Wider, Other):
        for save in ("full", "sharded"):
            try:
                run = trainer_of(ModelParallelPlan())
                run.validate(kind(), loader(), ckpt_path=str(Path(folder, f"four {save}")), verbose=False)
            except Exception as error:
                found.append(f"{type(error).__name__}: {error}")
    return found


def test_a_checkpoint_of_another_model_is_refused_on_all_ranks(folder: str) -> None:
    for rank in on_ranks(2, _refused, folder, timeout=60.0):
        for told in rank[:2]:
            assert told.startswith("MisconfigurationException")
            assert "has 'head.weight' in the shape (1, 5), and in the model it has (2, 5)" in told
        for told in rank[2:]:
            assert "it lacks ['outlets.weight', 'outlets.bias'] and has ['outlet.weight', 'outlet.bias']" in told
            assert "It has 'outlet.weight'" in told
