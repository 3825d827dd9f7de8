"""Makes an int8 copy of any module from a few batches, and checks that it answers them."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch
from lightning.fabric.utilities.apply_func import move_data_to_device
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn

from lightning_speedkit.compress.calls import Call, first_sample, replay
from lightning_speedkit.compress.choice import check_choice
from lightning_speedkit.compress.float_copy import fingerprint, float_copy
from lightning_speedkit.compress.int8 import Int8Model, make_int8, static_method
from lightning_speedkit.compress.quality import relative_error
from lightning_speedkit.compress.torch_ao import CONVOLUTIONS
from lightning_speedkit.errors import QuantizationError
from lightning_speedkit.measure.own_random_numbers import own_random_numbers

__all__ = [
    "BACKENDS",
    "QuantizationDetails",
    "call_of",
    "checked_int8",
    "details_of",
    "methods_of",
    "on_cpu",
    "quantize_model",
]

_STATIC, _DYNAMIC = "torch-ao-static", "torch-ao-dynamic"
BACKENDS = ("auto", _STATIC, _DYNAMIC)
_BROKEN_ERROR = 1.0  # relative; a network that answers nothing but zeros is this wrong


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizationDetails:
    """How :func:`quantize_model` made an int8 copy.

    ``backend`` is ``"torch-ao-dynamic"``, or ``"torch-ao-static"`` if at least a part is static. ``layers_quantized``
    names those of the ``layers_total`` layers with a weight of two or more dimensions that are int8 now, ``skipped``
    says why each other one is not. ``relative_error`` is the largest relative distance of an output from the float
    model's, over the calibration batches. ``recipe`` repeats the structure on a fresh model (see ``save_quantized``).
    """

    backend: str
    engine: str
    layers_quantized: tuple[str, ...]
    layers_total: int
    skipped: Mapping[str, str]
    relative_error: float
    recipe: Mapping[str, Any] = field(repr=False)


def quantize_model(
    model: nn.Module, batches: Iterable[Any], *, backend: str = "auto", skip: Sequence[str] = ()
) -> tuple[nn.Module, QuantizationDetails]:
    """An int8 copy of ``model`` for inference on a CPU, and how it was made. ``model`` is not changed.

    The copy is called as the model is, and is an instance of a subclass of its class where it was traced.

    Args:
        model: Any module, also a LightningModule; on any device, in any floating dtype, in either mode.
        batches: Inputs to calibrate with, at least one: a tensor, a tuple or list of positional arguments, or a dict of
            keyword arguments. Some hundred samples of the training data are enough.
        backend: ``"torch-ao-static"`` fixes the range of every activation by calibration and runs traceable parts in
            int8 from end to end; where there are convolutions or recurrent layers, only parts with a convolution, and
            what remains is dynamic. ``"torch-ao-dynamic"`` converts only Linear and recurrent layers and needs no
            trace. ``"auto"`` takes static for a network with a convolution, and dynamic for others or if that fails.
        skip: Names of modules that stay in float; ``*`` and ``?`` are wildcards.

    Raises:
        QuantizationError: There is nothing to quantize, or the int8 copy failed its check: finite outputs, the same
            twice, at batch size one too, and not as far from the float model's as zeros would be. Or the model itself
            cannot be called on the batches, or answers with NaN.
        ValueError: There is no batch, or an entry of ``skip`` matches no module.

    >>> model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
    >>> int8, details = quantize_model(model, [torch.randn(4, 8)])
    >>> details.backend, details.layers_quantized, details.relative_error < 0.05
    ('torch-ao-dynamic', ('0', '2'), True)
    """
    check_choice("backend", backend, BACKENDS)
    # it needs call_of() of this file
    from lightning_speedkit.compress.quantize_arguments import calls_from, check_float_answers, check_skip

    calls = calls_from(model, batches, "quantize_model")
    before = fingerprint(model)
    failures = []
    with own_random_numbers():
        floating = float_copy(model)
        skip = check_skip(floating, skip)
        check_float_answers(floating, calls)
        for method in methods_of(floating, backend):
            try:
                made, error = checked_int8(floating, calls, method, skip)
            except QuantizationError as failure:
                failures.append(f"{_DYNAMIC if method == 'dynamic' else _STATIC}: {failure}")
                continue
            if fingerprint(model) != before:
                raise QuantizationError("The float model changed while it was quantized; the result is not to be used.")
            return made.module, details_of(made, error)
    raise QuantizationError(f"{type(model).__name__} could not be quantized. {' '.join(failures)}")


def call_of(batch: Any) -> Call:
    """The call of a network on ``batch``, moved to the CPU: a tensor, a tuple or list of arguments, or a dict."""
    batch = on_cpu(batch)
    if isinstance(batch, Mapping):
        return Call("", (), dict(batch))
    return Call("", tuple(batch) if isinstance(batch, (tuple, list)) else (batch,), {})


def on_cpu(batch: Any) -> Any:
    """A copy of ``batch`` on the CPU, floating-point tensors in float32."""

    def convert(tensor: Tensor) -> Tensor:
        dtype = torch.float32 if tensor.is_floating_point() else tensor.dtype
        return tensor.detach().to("cpu", dtype, copy=True)

    def moved(value: _Movable) -> Any:
        # the to() of a BatchEncoding and the like changes the object itself, which the training step still needs
        return convert(value) if isinstance(value, Tensor) else move_data_to_device(copy.deepcopy(value), "cpu")

    return apply_to_collection(
        apply_to_collection(batch, _Movable, moved, allow_frozen=True), Tensor, convert, allow_frozen=True
    )


@runtime_checkable
class _Movable(Protocol):
    def to(self, device: Any) -> Any: ...


def methods_of(floating: nn.Module, backend: str) -> list[str]:
    """The methods of :func:`make_int8` to try for ``backend``, in order."""
    if backend != "auto":
        return [static_method(floating) if backend == _STATIC else "dynamic"]
    convolutional = any(type(layer) in CONVOLUTIONS for layer in floating.modules())
    return [static_method(floating), "dynamic"] if convolutional else ["dynamic"]


def checked_int8(
    floating: nn.Module, calls: Sequence[Call], method: str, skip: Sequence[str]
) -> tuple[Int8Model, float]:
    """An int8 copy that answers ``calls``, and its relative error; :class:`QuantizationError` if it does not."""
    made = make_int8(floating, calls, method=method, skip=skip)
    if not made.quantized:
        why = "; ".join(f"{name}: {reason}" for name, reason in made.skipped.items()) or "it has no layer with a weight"
        raise QuantizationError(f"No layer could be made int8 ({why}).")
    expected = replay(floating, calls)
    try:
        got, again = replay(made.module, calls), replay(made.module, calls)
    except Exception as failure:  # user code and torch's kernels raise anything
        raise QuantizationError(f"The int8 copy cannot be run ({type(failure).__name__}: {failure}).") from failure
    error = relative_error(expected, got)
    if not error < _BROKEN_ERROR:
        raise QuantizationError(f"The int8 copy computes something else (relative error {error:.3g}).")
    if not all(torch.equal(a, b) for a, b in zip(got, again, strict=True)):
        raise QuantizationError("The int8 copy answers the same batch differently the second time.")
    single = [first_sample(call) for call in calls[:1]]
    if _runs(floating, single):
        if not _runs(made.module, single):
            raise QuantizationError("The int8 copy cannot be run on one sample, which the float model can.")
        error = max(error, relative_error(replay(floating, single), replay(made.module, single)))
        if not error < _BROKEN_ERROR:
            raise QuantizationError(f"The int8 copy is wrong on one sample (relative error {error:.3g}).")
    return made, error


def _runs(module: nn.Module, calls: Sequence[Call]) -> bool:
    try:
        return all(bool(torch.isfinite(tensor).all()) for tensor in replay(module, calls))
    except Exception:  # some networks need a full batch
        return False


def details_of(made: Int8Model, error: float) -> QuantizationDetails:
    """What a user is told of ``made``."""
    return QuantizationDetails(
        backend=_STATIC if made.recipe["static"] else _DYNAMIC,
        engine=made.recipe["engine"],
        layers_quantized=made.quantized,
        layers_total=len(made.quantized) + len(made.skipped),
        skipped=made.skipped,
        relative_error=error,
        recipe=made.recipe,
    )
