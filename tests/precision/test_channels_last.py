"""Channels-last runs against plain ones, and the layouts against strides worked out by hand."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_speedkit.precision.channels_last import ChannelsLast, find_format_breaks, to_channels_last_
from lightning_speedkit.precision.compile import CompileModel
from tests.two_ranks import on_two_ranks


class Back(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.contiguous()


class Module(pl.LightningModule):
    def __init__(self, between: type[nn.Module] = nn.Identity) -> None:
        super().__init__()
        torch.manual_seed(0)
        first, second = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3)
        self.net = nn.Sequential(
            first, nn.BatchNorm2d(8), nn.ReLU(), between(), second, nn.Flatten(), nn.Linear(288, 2)
        )

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.net(batch[0]).square().mean()

    validation_step = training_step

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def _fit(*callbacks: pl.Callback, model: Module | None = None, **arguments: Any) -> tuple[Module, pl.Trainer]:
    model = Module() if model is None else model
    images = torch.randn(8, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    loader = DataLoader(TensorDataset(images), batch_size=4)
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "max_epochs": 2}
    settings: dict[str, Any] = {"accelerator": "cpu", "enable_model_summary": False, **quiet, **arguments}
    trainer = pl.Trainer(callbacks=list(callbacks), **settings)
    trainer.fit(model, loader, loader)
    return model, trainer


def test_weights_and_activations_are_channels_last_while_it_runs_and_plain_after() -> None:
    seen: list[tuple[int, ...]] = []

    class Look(pl.Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, *rest: Any) -> None:
            seen.append(pl_module.net[0].weight.stride())

    callback, model = ChannelsLast(), Module()
    strides: list[tuple[int, ...]] = []
    hook = model.net[1].register_forward_pre_hook(lambda _, args: strides.append(args[0].stride()))
    _fit(callback, Look(), model=model)
    hook.remove()
    assert set(seen) == {(27, 1, 9, 3)}
    assert set(strides) == {(512, 1, 64, 8)}  # 8 channels of 8x8
    assert model.net[0].weight.stride() == (27, 9, 3, 1)
    assert (callback.paths, callback.breaks) == ((), ())
    assert not any(module._forward_hooks for module in model.modules())
    torch.testing.assert_close(model.state_dict(), _fit()[0].state_dict())


def test_the_layer_that_gives_the_plain_order_back_is_told() -> None:
    callback = ChannelsLast()
    with pytest.warns(UserWarning, match=r"1 layers give the plain order back: net\.3\."):
        model, _ = _fit(callback, model=Module(Back))
    assert callback.breaks == ("net.3",)
    assert not any(module._forward_hooks for module in model.modules())


def test_a_checkpoint_is_laid_out_as_without() -> None:
    model, callback = Module(), ChannelsLast()
    trainer = pl.Trainer(callbacks=[callback], accelerator="cpu", logger=False, enable_checkpointing=False)
    callback.setup(trainer, model, "fit")
    checkpoint: dict[str, Any] = {"state_dict": model.state_dict()}
    assert checkpoint["state_dict"]["net.4.weight"].stride() == (72, 1, 24, 8)
    callback.on_save_checkpoint(trainer, model, checkpoint)
    assert checkpoint["state_dict"]["net.4.weight"].stride() == (72, 9, 3, 1)
    assert model.net[4].weight.stride() == (72, 1, 24, 8)


def test_without_convolutions_it_warns_and_changes_nothing() -> None:
    class Flat(Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Flatten(), nn.Linear(192, 2))

    with pytest.warns(UserWarning, match="no 2-d convolution"):
        model, _ = _fit(ChannelsLast(), model=Flat())
    torch.testing.assert_close(model.state_dict(), _fit(model=Flat())[0].state_dict(), rtol=0, atol=0)


def _strides_seen(model: Module, *callbacks: pl.Callback) -> set[tuple[int, ...]]:
    seen: set[tuple[int, ...]] = set()
    hook = model.net[0].register_forward_pre_hook(lambda _, args: seen.add(args[0].stride()))
    _fit(*callbacks, model=model)
    hook.remove()
    return seen


def test_images_are_converted_for_weights_that_came_channels_last(recwarn: pytest.WarningsRecorder) -> None:
    model = Module().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    callback = ChannelsLast()
    assert _strides_seen(model, callback) == {(192, 1, 24, 3)}
    assert not [warning for warning in recwarn if "ChannelsLast" in str(warning.message)]
    assert model.net[0].weight.stride() == (27, 1, 9, 3)  # as it came
    assert not model.net._forward_pre_hooks


def test_kernels_of_one_pixel_have_no_order_but_their_images_do() -> None:
    model = Module()
    model.net = nn.Sequential(nn.Conv2d(3, 2, 1), nn.Flatten(), nn.Linear(128, 2))
    assert _strides_seen(model, ChannelsLast()) == {(192, 1, 24, 3)}


def test_weights_that_are_computed_at_each_call_are_told() -> None:
    def normed() -> Module:
        model = Module()
        torch.manual_seed(0)
        first = nn.utils.parametrizations.weight_norm(nn.Conv2d(3, 2, 3, padding=1))
        model.net = nn.Sequential(first, nn.Flatten(), nn.Linear(128, 2))
        return model

    with pytest.warns(UserWarning, match=r"weights are computed at each call \(weight norm.* it changes nothing"):
        model, _ = _fit(ChannelsLast(), model=normed())
    torch.testing.assert_close(model.state_dict(), _fit(model=normed())[0].state_dict(), rtol=0, atol=0)


def test_weights_that_are_laid_out_so_already_are_not_touched() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3)).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    assert to_channels_last_(model) == ()
    assert find_format_breaks(model, lambda: model(torch.ones(2, 3, 4, 4))) == ()


def test_beside_compile_model() -> None:
    torch._dynamo.reset()  # it compiles only so many times in one process, and then runs eagerly
    callback, compiled = ChannelsLast(), CompileModel(backend="eager", eager_steps=1)
    with pytest.warns(UserWarning, match=r"net\.3"):
        model, _ = _fit(callback, compiled, model=Module(Back))
    assert callback.breaks == ("net.3",)
    assert compiled.report is not None
    assert (compiled.report.failures, compiled.report.graphs > 0) == ((), True)
    torch.testing.assert_close(model.state_dict(), _fit(model=Module(Back))[0].state_dict())


def _on_a_rank() -> list[Tensor]:
    return [value.clone() for value in _fit(ChannelsLast(), strategy="ddp", devices=2)[0].state_dict().values()]


def test_two_ranks_end_with_the_same_weights() -> None:
    first, second = on_two_ranks(_on_a_rank)
    torch.testing.assert_close(first, second, rtol=0, atol=0)
