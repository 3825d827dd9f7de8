"""How exactly float32 is multiplied, and how cuDNN chooses its kernels: torch's process-wide switches, for one run.

What it does: ``torch.set_float32_matmul_precision``, TF32 for cuDNN's convolutions and recurrent layers, and cuDNN's
search for the fastest kernel (``torch.backends.cudnn.benchmark``) hold from ``setup`` to ``teardown``, and are then as
they were before. A switch that something else has set in between is left as that wanted it, and a warning says so.

When it helps: TF32 on NVIDIA GPUs of compute capability 8.0 and later multiplies float32 on tensor cores, with 10 bits
of mantissa in place of 23; the kernel search pays where the shapes of batches do not change. What it costs: those bits;
for the search, the first batches of each shape, and results that may differ from run to run.

On a CPU ``"high"`` and ``"medium"`` reach oneDNN, which may compute float32 products in fewer bits where the CPU has
instructions for it (AMX, for one), or by another kernel, so the loss may change there too.

Source: ``torch.backends``; NVIDIA, Ampere architecture white paper (TF32); CUDA semantics in PyTorch's documentation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities import rank_zero_warn
from typing_extensions import override

from lightning_speedkit.measure.one_run import begin_run, is_in_another_run, refuse_second
from lightning_speedkit.precision.numeric_switches import (
    Switch,
    autotune_switch,
    convolution_switch,
    matmul_switch,
)

__all__ = ["MatmulPrecision", "set_matmul_precision"]

_LEVELS = ("highest", "high", "medium")
_CONVOLUTIONS = ("tf32", "ieee")


def set_matmul_precision(
    matmul: Literal["highest", "high", "medium"] | None = "high",
    convolutions: Literal["tf32", "ieee"] | None = None,
    autotune: bool | None = None,
) -> Callable[[], tuple[str, ...]]:
    """Sets the switches that are not ``None`` for this process; the function that is returned puts them back.

    Args:
        matmul: How float32 matrix products are computed: ``"highest"`` in float32; ``"high"`` in TF32 on CUDA;
            ``"medium"`` in TF32 on CUDA, and by oneDNN in bfloat16 on some CPUs.
        convolutions: How cuDNN computes convolutions and recurrent layers in float32: ``"tf32"`` (torch's default) or
            ``"ieee"`` (float32).
        autotune: Whether cuDNN tries its kernels at each new shape and keeps the fastest.

    Returns:
        A function without arguments that restores what was found, and returns the names of the switches that something
        else has set since, which it leaves. Called again, it does nothing.

    Raises:
        ValueError: ``matmul`` or ``convolutions`` is no value that torch has.
        TypeError: An argument is of another type.

    >>> before = torch.get_float32_matmul_precision()
    >>> undo = set_matmul_precision("medium")
    >>> torch.get_float32_matmul_precision()
    'medium'
    >>> undo()
    ()
    >>> torch.get_float32_matmul_precision() == before
    True
    """
    _check(matmul, convolutions, autotune)
    switches: list[Switch] = []
    if matmul is not None:
        switches.append(matmul_switch(matmul))
    if convolutions is not None:
        switches.append(convolution_switch(convolutions == "tf32"))
    if autotune is not None:
        switches.append(autotune_switch(autotune))

    def undo() -> tuple[str, ...]:
        left = tuple(switch.name for switch in switches if not switch.restore())
        switches.clear()
        return left

    return undo


def _check(matmul: Any, convolutions: Any, autotune: Any) -> None:
    for name, value, allowed in (("matmul", matmul, _LEVELS), ("convolutions", convolutions, _CONVOLUTIONS)):
        choices = ", ".join(map(repr, allowed))
        if value is not None and not isinstance(value, str):
            raise TypeError(f"{name}={value!r} must be one of {choices}, or None; got {type(value).__name__}.")
        if value is not None and value not in allowed:
            raise ValueError(f"{name}={value!r} is not known; use one of {choices}, or None to leave it as it is.")
    if autotune is not None and not isinstance(autotune, bool):
        raise TypeError(f"autotune={autotune!r} must be True, False or None; got {type(autotune).__name__}.")


class MatmulPrecision(Callback):
    """Trains, validates, tests and predicts with these switches of torch; afterwards they are as they were.

    The arguments are those of :func:`set_matmul_precision`; ``None`` leaves a switch as it is found.

    Args:
        matmul: ``"highest"``, ``"high"`` (TF32 on CUDA), ``"medium"`` (also bfloat16 on some CPUs), or ``None``.
        convolutions: ``"tf32"`` or ``"ieee"`` for cuDNN's convolutions and recurrent layers, or ``None``.
        autotune: Whether cuDNN looks for its fastest kernels, or ``None``. In the Trainer the argument ``benchmark``
            sets the same for the rest of the process.

    Raises:
        ValueError: A value is not known.
        TypeError: A value is of another type.
        MisconfigurationException: At the start of a run: a second callback of this kind, this object in a run that goes
            on around this one, or ``autotune=True`` in a run that is to be deterministic.

    >>> callback = MatmulPrecision("high", convolutions="tf32")
    >>> callback.matmul, callback.convolutions, callback.autotune
    ('high', 'tf32', None)
    """

    def __init__(
        self,
        matmul: Literal["highest", "high", "medium"] | None = "high",
        convolutions: Literal["tf32", "ieee"] | None = None,
        autotune: bool | None = None,
    ) -> None:
        _check(matmul, convolutions, autotune)
        self.matmul = matmul
        self.convolutions = convolutions
        self.autotune = autotune
        self._undo: Callable[[], tuple[str, ...]] | None = None
        self._stage: str | None = None

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        refuse_second(trainer, MatmulPrecision, "would set the same switches. Keep one.")
        if self.autotune and torch.backends.cudnn.deterministic:
            raise MisconfigurationException(
                "MatmulPrecision(autotune=True) lets cuDNN choose kernels by time, which undoes deterministic=True. "
                "Leave one of the two out."
            )
        begin_run(self, trainer)
        if self._undo is not None:  # a test or a validation inside a fit
            return
        self._warn_of_no_effect(trainer.strategy.root_device)
        self._undo = set_matmul_precision(self.matmul, self.convolutions, self.autotune)
        self._stage = stage

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if stage == self._stage and not is_in_another_run(self, trainer):
            self._restore()

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        if not is_in_another_run(self, trainer):
            self._restore()

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_undo": None, "_stage": None}  # a copy has set nothing

    def _restore(self) -> None:
        undo, self._undo, self._stage = self._undo, None, None
        left = () if undo is None else undo()
        if left:
            rank_zero_warn(
                f"MatmulPrecision leaves {' and '.join(left)} as it is: something else has set it during the run, so "
                "that what was there before the run is not restored."
            )

    def _warn_of_no_effect(self, device: torch.device) -> None:
        idle: dict[str, Any] = {}
        if device.type != "cuda":
            idle |= {"convolutions": self.convolutions, "autotune": self.autotune}
        if device.type not in ("cuda", "cpu") or (device.type == "cuda" and not _has_tf32(device)):
            idle["matmul"] = None if self.matmul == "highest" else self.matmul
        named = [f"{name}={value!r}" for name, value in idle.items() if value not in (None, False)]
        if named:
            rank_zero_warn(
                f"MatmulPrecision: {' and '.join(named)} has no effect on this device ({device.type}). TF32 is there "
                "from compute capability 8.0 on, and cuDNN on NVIDIA GPUs."
            )


def _has_tf32(device: torch.device) -> bool:
    return torch.version.hip is not None or torch.cuda.get_device_capability(device) >= (8, 0)
