"""Images and convolution weights in channels-last order, the one that fast convolutions are written for.

What it does: the weights of 2-d convolutions, and the images that go into the networks which hold them, are laid out
with their channels together in memory (NHWC). Shapes, names, values and checkpoints stay as they are. On the first
training batch it looks which layers give the plain order back, after which everything is converted once more.

When it helps: convolutional networks on NVIDIA GPUs with tensor cores under 16 bits, and on CPUs through oneDNN.
What it costs: a copy of each batch. Another kernel sums in another order, so results agree to rounding, not to the bit.

Source: PyTorch's memory format tutorial.
"""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from typing_extensions import override

from lightning_speedkit.measure.one_run import begin_run, is_in_another_run, refuse_second
from lightning_speedkit.precision.channels_last_layout import (
    can_use_channels_last,
    convert_images,
    find_format_breaks,
    holds_convolutions,
    to_channels_last_,
    to_plain_format_,
    watch_formats,
)
from lightning_speedkit.precision.compiled_call import CompiledCall

__all__ = ["ChannelsLast", "find_format_breaks", "to_channels_last_", "to_plain_format_"]


class ChannelsLast(Callback):
    """Trains and evaluates with channels-last convolutions; afterwards the weights are laid out as before.

    Args:
        check: On the first training batch, look for layers that give the plain order back, and warn of them.

    Raises:
        TypeError: If ``check`` is no truth value.
        MisconfigurationException: At the start of a run: a second callback of this kind, or this object in a run that
            goes on around this one.

    >>> ChannelsLast(check=False).breaks
    ()
    """

    def __init__(self, check: bool = True) -> None:
        if not isinstance(check, bool):
            raise TypeError(f"check is true or false, got {check!r}.")
        self.check = check
        self._paths: tuple[str, ...] = ()
        self._found: list[str] = []
        self._hooks: list[RemovableHandle] = []
        self._checks: list[RemovableHandle] = []
        self._is_checked = False

    @property
    def paths(self) -> tuple[str, ...]:
        """The paths of the convolutions that this run has laid out channels-last; empty outside a run."""
        return self._paths

    @property
    def breaks(self) -> tuple[str, ...]:
        """The paths of layers that gave the plain order back, in the last run that was checked."""
        return tuple(dict.fromkeys(self._found))

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        refuse_second(trainer, ChannelsLast, "would lay out the same weights. Keep one.")
        begin_run(self, trainer)
        self._undo(pl_module)
        self._is_checked, self._found = not self.check, []
        self._paths = to_channels_last_(pl_module)  # before the optimizer and DDP take over the layout

    @override
    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._begin(pl_module)
        if not self._hooks:
            rank_zero_warn(f"ChannelsLast {_why_nothing_changes(pl_module)}; it changes nothing.")

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if self._is_checked or not self._hooks or any(map(_is_compiled, pl_module.modules())):
            return
        self._is_checked = True
        self._checks = watch_formats(pl_module, self._found)

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if not self._checks:
            return
        self._stop_checking()
        if self.breaks:
            rank_zero_warn(
                f"ChannelsLast: {len(self.breaks)} layers give the plain order back: {', '.join(self.breaks[:6])}. "
                f"What follows is converted each time; replace them, or leave ChannelsLast out."
            )

    @override
    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._begin(pl_module)

    @override
    def on_test_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._begin(pl_module)

    @override
    def on_predict_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._begin(pl_module)

    @override
    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        weights = checkpoint.get("state_dict", {})
        for path in self._paths:
            name = f"{path}.weight"
            if isinstance(weights.get(name), Tensor):
                weights[name] = weights[name].contiguous()  # a file as without this callback

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if not is_in_another_run(self, trainer):
            self._undo(pl_module)

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        if not is_in_another_run(self, trainer):
            self._undo(pl_module)

    def _begin(self, pl_module: pl.LightningModule) -> None:
        new = to_channels_last_(pl_module)  # what configure_model has built
        self._paths = tuple(dict.fromkeys(self._paths + new))
        if not self._hooks and (self._paths or can_use_channels_last(pl_module)):
            self._hooks = [
                child.register_forward_pre_hook(convert_images, with_kwargs=True)
                for child in _entries(pl_module)
                if holds_convolutions(child)
            ]

    def _stop_checking(self) -> None:
        for handle in self._checks:
            handle.remove()
        self._checks = []

    def _undo(self, pl_module: pl.LightningModule) -> None:
        self._stop_checking()
        for handle in self._hooks:
            handle.remove()
        self._hooks = []
        to_plain_format_(pl_module, self._paths)
        self._paths = ()


def _entries(model: nn.Module) -> list[nn.Module]:
    """The modules that a step calls: the children, or what is in them where they are lists or LightningModules."""
    found: list[nn.Module] = []
    for child in model.children():
        is_list = isinstance(child, (nn.ModuleList, nn.ModuleDict)) and type(child).forward is nn.Module.forward
        found += _entries(child) if is_list or isinstance(child, pl.LightningModule) else [child]
    return found


def _why_nothing_changes(model: nn.Module) -> str:
    if holds_convolutions(model, channels=2):
        return "found only convolutions whose weights are computed at each call (weight norm, pruning) or not there yet"
    return "found no 2-d convolution with more than one channel"


def _is_compiled(module: nn.Module) -> bool:
    call = vars(module).get("_compiled_call_impl")
    # what is compiled now would keep the checking hooks in its code
    return call is not None and not (isinstance(call, CompiledCall) and not call.log.active)
