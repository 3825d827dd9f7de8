"""Converted copies of a network, each checked against the float one, and what they weigh and how long they take."""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from lightning_speedkit.compress.call_form import tensors_of
from lightning_speedkit.compress.calls import Call, call_with, first_sample
from lightning_speedkit.compress.engine import FLOAT32, Converted, Engine, Prepared
from lightning_speedkit.compress.float_copy import copy_module
from lightning_speedkit.compress.quality import alternating_seconds
from lightning_speedkit.compress.report import CandidateReport
from lightning_speedkit.compress.self_check import SelfCheck, calls_on, check_copy
from lightning_speedkit.errors import MissingExtraError, QuantizationError

__all__ = ["Candidate", "float_as_it_runs", "make_candidate", "needed_arguments", "time_all"]


@dataclass(slots=True)
class Candidate:
    """What one engine made of the network, or why it made nothing."""

    engine: Engine
    report: CandidateReport
    prepared: Prepared | None = None
    converted: Converted | None = None
    check: SelfCheck | None = None

    @classmethod
    def of(cls, engine: Engine) -> Candidate:
        """One of which nothing is known yet."""
        return cls(engine, CandidateReport(backend=engine.name, scheme=engine.scheme, outcome=""))

    @property
    def usable(self) -> bool:
        """Whether there is a copy that passed its check."""
        return self.converted is not None and self.check is not None and self.check.passed

    def ends(self, outcome: str, reason: str) -> None:
        """Write down what came of it."""
        self.report = replace(self.report, outcome=outcome, reason=reason)

    def convert(self, floating: nn.Module, calls: Sequence[Call], skip: Sequence[str], device: str) -> None:
        """Make the copy with the layers that ``skip`` names in float, and check it."""
        assert self.prepared is not None
        self.converted, self.check = None, None
        try:
            converted = self.prepared.convert(skip)
            if not converted.quantized and self.engine.scheme != FLOAT32:
                why = "; ".join(f"{name}: {reason}" for name, reason in converted.skipped.items())
                raise QuantizationError(f"No layer could be quantized ({why or 'it has no layer with a weight'}).")
            self.check = check_copy(
                floating,
                converted.module,
                calls,
                scheme=converted.scheme,
                layers=converted.quantized,
                device=device,
            )
        except Exception as failure:  # the libraries behind an engine raise anything
            self.ends("failed", told(failure))
            return
        self.converted = converted
        self.report = replace(
            self.report,
            outcome=self.check.trap or "",
            reason=self.check.message,
            relative_error=self.check.error,
            expected_error=self.check.error_expected,
            bytes=converted.bytes if self.check.passed else None,
        )


def make_candidate(
    engine: Engine, floating: nn.Module, calls: Sequence[Call], skip: Sequence[str], device: str
) -> Candidate:
    """``floating`` converted by ``engine`` and checked; its report tells a failure."""
    candidate = Candidate.of(engine)
    if (missing := engine.missing(device)) is not None:
        candidate.ends("missing", missing)
        return candidate
    try:
        candidate.prepared = engine.prepare(floating, calls, device)
    except MissingExtraError as failure:
        candidate.ends("missing", str(failure))
        return candidate
    except Exception as failure:  # exporters and user code raise anything
        candidate.ends("failed", told(failure))
        return candidate
    candidate.convert(floating, calls, skip, device)
    return candidate


def needed_arguments(floating: nn.Module, copy: nn.Module, calls: Sequence[Call], device: str = "cpu") -> list[str]:
    """Arguments given in ``calls`` that ``floating`` can do without and ``copy`` cannot, such as labels.

    >>> class Net(nn.Linear):
    ...     def forward(self, x, labels=None):
    ...         return super().forward(x)
    >>> class Graph(Net):
    ...     def forward(self, x, labels):
    ...         return super().forward(x)
    >>> needed_arguments(Net(2, 1), Graph(2, 1), [Call("", (torch.ones(1, 2), torch.ones(1)), {})])
    ['labels']
    """
    found: list[str] = []
    for call in {call.name: call for call in reversed(calls)}.values():
        original, twin = floating.get_submodule(call.name), copy.get_submodule(call.name)
        for name, shorter in _shorter(original, call):
            if _answers(original, shorter) and not _answers(twin, calls_on([shorter], device)[0]):
                found.append(name)
    return list(dict.fromkeys(found))


def _shorter(module: nn.Module, call: Call) -> Iterator[tuple[str, Call]]:
    """``call`` without one of its tensors that need not be given, and the name of that argument."""
    signature = inspect.signature(module.forward)
    given = dict(signature.bind(*call.args, **call.kwargs).arguments)

    def with_only(arguments: dict[str, Any]) -> Call:
        bound = inspect.BoundArguments(signature, OrderedDict(arguments))
        return Call(call.name, bound.args, bound.kwargs)

    for name, value in given.items():
        parameter = signature.parameters[name]
        if parameter.default is not inspect.Parameter.empty and tensors_of(value):
            yield name, with_only({key: other for key, other in given.items() if key != name})
        for key in (key for key, part in value.items() if tensors_of(part)) if type(value) is dict else ():
            fewer = {other: part for other, part in value.items() if other != key}
            is_spread = parameter.kind is inspect.Parameter.VAR_KEYWORD
            yield key if is_spread else f"{name}[{key!r}]", with_only({**given, name: fewer})


def _answers(module: nn.Module, call: Call) -> bool:
    try:
        with torch.no_grad():
            call_with(module, call)
    except Exception:  # the code of the user, and runtimes
        return False
    return True


def float_as_it_runs(module: nn.Module, floating: nn.Module, device: str) -> nn.Module:
    """A float copy as fast as the user's own: with the fused path of ``nn.TransformerEncoder``, on ``device``."""
    twin = copy_module(floating)
    for original, part in zip(_encoders(module), _encoders(twin), strict=True):
        for name in ("use_nested_tensor", "activation_relu_or_gelu"):
            if hasattr(original, name):
                setattr(part, name, getattr(original, name))
    return twin.to(device)


def _encoders(module: nn.Module) -> list[nn.Module]:
    return [m for m in module.modules() if isinstance(m, (nn.TransformerEncoder, nn.TransformerEncoderLayer))]


def time_all(
    baseline: nn.Module, candidates: Sequence[Candidate], calls: Sequence[Call], device: str
) -> tuple[float | None, float | None]:
    """Write seconds of a batch and of one sample into the reports of usable ``candidates``; those of ``baseline``.

    All are called in turn. What cannot be called is ``None``, such as one sample of a network that needs a full batch.
    """
    usable = [candidate for candidate in candidates if candidate.usable]
    modules = [baseline, *(c.converted.module for c in usable if c.converted is not None)]
    first = list({call.name: call for call in reversed(calls)}.values())
    batch = _seconds(modules, calls_on(first, device), device)
    one = _seconds(modules, calls_on([first_sample(call) for call in first], device), device)
    for index, candidate in enumerate(usable, 1):
        candidate.report = replace(candidate.report, seconds_batch=batch[index], seconds_one=one[index])
    return batch[0], one[0]


def _seconds(modules: Sequence[nn.Module], calls: Sequence[Call], device: str) -> list[float | None]:
    runs: list[Callable[[], None]] = []
    result: list[float | None] = [None] * len(modules)
    able = []

    def forward(module: nn.Module) -> Callable[[], None]:
        targets = [(module.get_submodule(call.name), call) for call in calls]

        def run() -> None:
            for target, call in targets:
                target(*call.args, **call.kwargs)
            if device == "cuda":
                torch.cuda.synchronize()

        return run

    with torch.no_grad():
        for index, run in enumerate(map(forward, modules)):
            try:
                run()
            except Exception:  # a network that needs a full batch; that itself was checked before
                continue
            runs.append(run)
            able.append(index)
        for index, seconds in zip(able, alternating_seconds(runs), strict=True):
            result[index] = seconds
    return result


def told(error: BaseException) -> str:
    """``error`` in one line."""
    text = " ".join(str(error).split())
    if isinstance(error, (QuantizationError, MissingExtraError)):
        return text
    return f"{type(error).__name__}: {text:.300}" if text else type(error).__name__
