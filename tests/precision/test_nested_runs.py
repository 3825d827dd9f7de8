"""One callback object in a Trainer and in another whose run a hook of the first one's run starts."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_speedkit.precision import ChannelsLast, CompileModel, MatmulPrecision


class Module(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16, 2))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def _fit(model: Module, *callbacks: Callback) -> None:
    quiet: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = pl.Trainer(
        callbacks=list(callbacks), accelerator="cpu", max_epochs=1, enable_model_summary=False, **quiet
    )
    images = torch.randn(8, 3, 4, 4, generator=torch.Generator().manual_seed(1))
    trainer.fit(model, DataLoader(TensorDataset(images), batch_size=4))


def _state(model: Module) -> tuple[Any, ...]:
    convolution: Any = model.net[0]
    pre_hooks = len(model.net._forward_pre_hooks)
    return (
        torch.get_float32_matmul_precision(),
        convolution.weight.stride(),
        pre_hooks,
        model.net._compiled_call_impl is not None,
    )


@pytest.mark.parametrize(
    ("callback", "during"),
    [
        (MatmulPrecision("medium"), ("medium", (27, 9, 3, 1), 0, False)),
        (ChannelsLast(check=False), ("highest", (27, 1, 9, 3), 1, False)),
        (CompileModel(backend="eager", eager_steps=0), ("highest", (27, 9, 3, 1), 0, True)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_the_inner_run_is_refused_and_the_outer_one_goes_on_unharmed(callback: Any, during: tuple[Any, ...]) -> None:
    model, inner_model, states = Module(), Module(), []

    class Nests(Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 0:
                with pytest.raises(MisconfigurationException, match="is in use by another Trainer"):
                    _fit(inner_model, callback)
            states.append(_state(model))

    before, untouched = _state(model), _state(inner_model)
    _fit(model, callback, Nests())
    assert states == [during, during]
    assert _state(model) == before
    assert _state(inner_model)[1:] == untouched[1:]
    _fit(inner_model, callback)  # after the outer run the object is free again


@pytest.mark.parametrize("kind", [ChannelsLast, CompileModel])
def test_two_of_a_kind_in_one_trainer_are_refused(kind: Any) -> None:
    model = Module()
    before = _state(model)
    with pytest.raises(MisconfigurationException, match=f"Two {kind.__name__} callbacks"):
        _fit(model, kind(), kind())
    assert _state(model) == before
