"""Checks that a quantized copy computes what its float model computes, and names the way in which it does not.

Each of these failures is silent in the library that causes it, and each was met there:

``saturation``
    AVX2 adds products of 8-bit numbers in 16 bits, which overflow without a word. Outputs are off by a tenth to a half.
``no calibration``
    Observers that never saw data give a range by default; the outputs then hardly depend on the input.
``in-place corruption``
    A call of the quantized copy writes into weights, its own or those of the float model (seen with PT2E under
    ``freezing``, at batch 1): later calls answer otherwise.
``batch 1``
    A copy that was made with full batches fails on one sample, or answers it wrongly.
``wrong outputs``
    It cannot be run, answers with something that is not finite, or is off in another way.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from lightning.fabric.utilities.apply_func import move_data_to_device
from torch import Tensor, nn

from lightning_speedkit.compress.calls import Call, first_sample, replay
from lightning_speedkit.compress.float_copy import fingerprint
from lightning_speedkit.compress.quality import relative_error
from lightning_speedkit.compress.sensitivity import expected_error

__all__ = ["TRAPS", "SelfCheck", "calls_on", "check_copy"]

TRAPS = ("saturation", "no calibration", "in-place corruption", "batch 1", "wrong outputs")
_WITH_INT8_ACTIVATIONS = ("static-int8", "dynamic-int8")
_USUAL = {  # relative errors up to this are usual for the scheme, whatever the network
    "float32": 1e-3,
    "static-int8": 0.05,
    "dynamic-int8": 0.03,
    "weight-only-int8": 0.02,
    "weight-only-int4": 0.15,
    "fp8": 0.1,
}
_TIMES_EXPECTED = 4.0
_AS_WRONG_AS_ZEROS = 0.9


@dataclass(frozen=True, slots=True, kw_only=True)
class SelfCheck:
    """What came of :func:`check_copy`.

    ``trap`` is one of :data:`TRAPS`, or ``None`` if the copy passed; ``message`` begins with it. ``error`` is the
    largest relative error over all calls, ``error_one`` that of one sample (``None`` where the float model needs a full
    batch), and ``error_expected`` what rounding alone costs.
    """

    trap: str | None = None
    message: str = ""
    error: float | None = None
    error_one: float | None = None
    error_expected: float | None = None

    @property
    def passed(self) -> bool:
        """Whether the copy may be used."""
        return self.trap is None


def calls_on(calls: Sequence[Call], device: str) -> list[Call]:
    """The same calls with their tensors on ``device``."""
    if device == "cpu":
        return list(calls)
    return [
        Call(c.name, move_data_to_device(c.args, device), move_data_to_device(dict(c.kwargs), device)) for c in calls
    ]


def check_copy(
    floating: nn.Module,
    copy: nn.Module,
    calls: Sequence[Call],
    *,
    scheme: str,
    layers: Sequence[str] = (),
    device: str = "cpu",
) -> SelfCheck:
    """Compare ``copy`` with ``floating`` on ``calls``: full batches and one sample, each twice.

    Args:
        floating: The float model on the CPU, in eval mode. It is hashed before and after.
        copy: What was made of it by ``scheme``, with ``layers`` quantized, on ``device``.
        calls: What both are asked; on the CPU.

    >>> net = nn.Sequential(nn.Linear(4, 3)).eval()
    >>> check_copy(net, net, [Call("", (torch.ones(2, 4),), {})], scheme="static-int8").passed
    True
    >>> wrong = nn.Sequential(nn.Linear(4, 2)).eval()
    >>> check_copy(net, wrong, [Call("", (torch.ones(2, 4),), {})], scheme="static-int8").trap
    'wrong outputs'
    """
    return _Check(floating, copy, calls, scheme, layers, device).result()


class _Check:
    def __init__(
        self,
        floating: nn.Module,
        copy: nn.Module,
        calls: Sequence[Call],
        scheme: str,
        layers: Sequence[str],
        device: str,
    ) -> None:
        self.floating, self.copy, self.calls, self.scheme, self.layers = floating, copy, calls, scheme, layers
        self.device = device
        firsts = {call.name: call for call in reversed(calls)}
        self.single = [first_sample(call) for call in firsts.values()]

    def _answers(self, calls: Sequence[Call]) -> list[Tensor]:
        return [tensor.cpu() for tensor in replay(self.copy, calls_on(calls, self.device))]

    def result(self) -> SelfCheck:
        source, own = fingerprint(self.floating), _content_hash(self.copy)
        expected = replay(self.floating, self.calls)
        if _has_nan(expected):
            return _trapped("wrong outputs", "the float model itself answers with NaN")
        repeats = _equal(expected, replay(self.floating, self.calls))
        try:
            got, again = self._answers(self.calls), self._answers(self.calls)
        except Exception as failure:  # kernels and runtimes raise anything
            return _trapped("wrong outputs", f"it cannot be run ({_in_a_line(failure)})")
        if _has_nan(got):
            return _trapped("wrong outputs", "its outputs are not finite", float("inf"))
        one = self._on_one_sample()
        later = got if one.trap else self._answers(self.calls)
        if fingerprint(self.floating) != source:
            return _trapped("in-place corruption", "calls of the copy have changed the weights of the float model")
        if own is not None and _content_hash(self.copy) != own:
            return _trapped("in-place corruption", "calls of the copy have changed its own weights")
        if repeats and not _equal(got, again):
            return _trapped("in-place corruption", "the copy answers the same batch differently the second time")
        if repeats and not _equal(got, later):
            return _trapped("in-place corruption", "the copy answers a batch differently after one sample")
        error, expects = relative_error(expected, got), self._expected()
        wrong = self._judged(error, expects, expected, got)
        return wrong or (one if one.trap else SelfCheck(error=error, error_one=one.error_one, error_expected=expects))

    def _on_one_sample(self) -> SelfCheck:
        try:
            expected = replay(self.floating, self.single)
        except Exception:  # some networks need a full batch
            return SelfCheck()
        if not all(bool(torch.isfinite(tensor).all()) for tensor in expected):
            return SelfCheck()
        try:
            got, again = self._answers(self.single), self._answers(self.single)
        except Exception as failure:
            return _trapped(
                "batch 1", f"it cannot be run on one sample, which the float model can ({_in_a_line(failure)})"
            )
        error = relative_error(expected, got)
        limit = 2 * self._limit(self._expected_one())  # one sample may be smaller than its rounding
        if not error <= limit:
            return _trapped("batch 1", f"on one sample its relative error is {error:.2g}, above {limit:.2g}", error)
        if not _equal(got, again) and _equal(expected, replay(self.floating, self.single)):
            return _trapped("batch 1", "it answers one sample differently the second time")
        return SelfCheck(error_one=error)

    def _judged(
        self, error: float, expects: float, expected: Sequence[Tensor], got: Sequence[Tensor]
    ) -> SelfCheck | None:
        limit = self._limit(expects)
        if error <= limit:
            return None
        told = f"its relative error is {error:.2g}, above {limit:.2g}; rounding alone costs {expects:.2g}"
        if error == float("inf") or self.scheme == "float32":
            return _trapped("wrong outputs", f"{told}, or its outputs are not finite", error)
        if error >= _AS_WRONG_AS_ZEROS or _ignores_input(expected, got):
            why = "its outputs hardly depend on the input: its ranges were taken from no data, or from other data"
            return _trapped("no calibration", f"{told}; {why}", error)
        if self.scheme in _WITH_INT8_ACTIVATIONS:
            why = "8-bit products overflow on this CPU; quantize with reduce_range (7-bit weights)"
            return _trapped("saturation", f"{told}; {why}", error)
        return _trapped("wrong outputs", told, error)

    def _limit(self, expects: float) -> float:
        return max(_USUAL[self.scheme], _TIMES_EXPECTED * expects if math.isfinite(expects) else 0.0)

    def _expected(self) -> float:
        return expected_error(self.floating, self.calls, self.layers, self.scheme)

    def _expected_one(self) -> float:
        return expected_error(self.floating, self.single, self.layers, self.scheme)


def _trapped(trap: str, message: str, error: float | None = None) -> SelfCheck:
    return SelfCheck(trap=trap, message=f"{trap}: {message}", error=error)


def _has_nan(tensors: Sequence[Tensor]) -> bool:
    return any(bool(torch.isnan(tensor).any()) for tensor in tensors)


def _equal(one: Sequence[Tensor], other: Sequence[Tensor]) -> bool:
    return len(one) == len(other) and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def _ignores_input(expected: Sequence[Tensor], got: Sequence[Tensor]) -> bool:
    """Whether float outputs differ between the samples of a batch and those of the copy hardly do."""
    pairs = [(a, b) for a, b in zip(expected, got, strict=True) if a.ndim > 1 and a.shape == b.shape and len(a) > 1]
    return any(_spread(a) > 0 and _spread(b) < 0.1 * _spread(a) for a, b in pairs)


def _spread(tensor: Tensor) -> float:
    values = tensor.detach().double().flatten(1)
    return float((values - values.mean(0)).norm())


def _content_hash(module: nn.Module) -> str | None:
    """A hash of all tensors of ``module``, also inside tensor subclasses; ``None`` where one cannot be read."""
    digest = hashlib.blake2b(digest_size=16)
    try:
        for value in (*module.parameters(), *module.buffers()):
            for part in _plain(value.detach()):
                digest.update(part.cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    except Exception:  # a layout without a view as bytes
        return None
    return digest.hexdigest()


def _plain(value: Tensor) -> list[Tensor]:
    if hasattr(value, "__tensor_flatten__"):
        names, _ = value.__tensor_flatten__()
        return [part for name in names for part in _plain(getattr(value, name))]
    return [value.int_repr() if value.is_quantized else value]


def _in_a_line(error: BaseException) -> str:
    text = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {text:.300}" if text else type(error).__name__
