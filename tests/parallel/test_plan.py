"""The plan on gloo processes, against a plain PyTorch loop over the whole batches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lightning_speedkit.parallel.plan import ModelParallelPlan
from tests.parallel.plan_models import EPOCHS, Net, close, data, loader, plain, trainer_of, weights_of
from tests.two_ranks import on_two_ranks

UNITS: dict[str, dict[str, Any]] = {
    "class": {"shard_class": ["Block"]},
    "size": {"shard_min_parameters": 20},
    "root": {},
    "recompute": {"shard_class": ["Block"], "checkpoint_activations": True},
    "offload": {"shard_class": ["Block"], "cpu_offload": True},
}


def _runs() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, arguments in UNITS.items():
        for factor, epochs in EPOCHS.items():
            model = Net()
            run = trainer_of(ModelParallelPlan(**arguments), max_epochs=epochs, accumulate_grad_batches=factor)
            run.fit(model, loader(run.global_rank, 2))
            found[f"{name} {factor}"] = weights_of(model)
    rank = run.global_rank
    for name, options in _CLIPPED.items():
        model, run = Net(), trainer_of(ModelParallelPlan(shard_class=["Block"]), **options)
        run.fit(model, loader(rank, 2), loader(rank, 2))
        found[name] = weights_of(model)
    found["checked"] = float(run.callback_metrics["checked"])
    found["test"] = run.test(model, loader(rank, 2), verbose=False)[0]["checked"]
    found["predict"] = torch.cat(run.predict(model, loader(rank, 2)))  # type: ignore[arg-type]
    found["after"] = [type(m).__name__ for m in model.modules()], model(data()[0]).detach(), _left_over(model)
    model = Net()
    before = list(model.parameters())
    for _ in range(2):  # one module in two runs
        run = trainer_of(ModelParallelPlan(shard_class=["Block"]), max_epochs=1)
        run.fit(model, loader(rank, 2), loader(rank, 2))
    found["twice"] = weights_of(model), [a is b for a, b in zip(before, model.parameters(), strict=True)]
    return found


_CLIPPED: dict[str, dict[str, Any]] = {
    "norm": {"gradient_clip_val": 0.05},
    "value": {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
}


def _left_over(model: nn.Module) -> list[str]:
    return [
        f"{path}.{name}"
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if "fsdp" in name or "composable" in name or (name.endswith("hooks") and value)
    ]


@pytest.fixture(scope="module")
def runs() -> Any:
    return on_two_ranks(_runs, timeout=60.0)


@pytest.mark.parametrize("factor", EPOCHS)
@pytest.mark.parametrize("name", UNITS)
def test_sharded_training_equals_one_process(runs: Any, name: str, factor: int) -> None:
    for rank in runs:
        close(rank[f"{name} {factor}"], plain(factor=factor))


def test_gradients_are_clipped_by_the_norm_over_all_shards(runs: Any) -> None:
    for rank in runs:
        close(rank["norm"], plain(clip=0.05))
        close(rank["value"], plain(value=0.01))


def test_validation_test_and_predict(runs: Any) -> None:
    model, (x, y) = Net(), data()
    for parameter, value in zip(model.parameters(), plain(value=0.01), strict=True):
        parameter.data.copy_(value)
    expected = model(x).detach()
    for rank, found in enumerate(runs):
        torch.testing.assert_close(found["predict"], expected[rank::2])
        for name in ("checked", "test"):
            assert found[name] == pytest.approx(float(nn.functional.mse_loss(expected, y)), rel=1e-4)


def test_afterwards_the_module_is_a_plain_one(runs: Any) -> None:
    model, x = Net(), data()[0]
    for parameter, value in zip(model.parameters(), plain(value=0.01), strict=True):
        parameter.data.copy_(value)
    for found in runs:
        names, output, left = found["after"]
        assert names == [type(m).__name__ for m in model.modules()]
        assert left == []
        torch.testing.assert_close(output, model(x).detach())


def test_a_module_is_trained_twice(runs: Any) -> None:
    model = Net()
    plain(model, epochs=1)
    for found in runs:
        close(found["twice"][0], plain(model=_copy(model), epochs=1))
        assert all(found["twice"][1])


def _copy(model: Net) -> Net:
    made = Net()
    made.load_state_dict(model.state_dict())
    return made
