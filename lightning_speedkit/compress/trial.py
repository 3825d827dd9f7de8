"""Tries quantized copies of a trained LightningModule, measures each against the float one, and keeps one or none.

Every engine that can work converts a copy, which is checked; all of them are timed in turn with the float network, and
with the same network in float32 in the runtimes that the engines use. Then :class:`Selection` decides.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.nn.parameter import is_lazy

from lightning_speedkit.compress.call_difference import CALLED_LIKE_FLOAT
from lightning_speedkit.compress.calls import batch_size
from lightning_speedkit.compress.candidates import Candidate, float_as_it_runs, make_candidate, needed_arguments, told
from lightning_speedkit.compress.engine import FLOAT32, Converted, Engine, engine_named, engines_for, float_engine
from lightning_speedkit.compress.float_copy import copy_module, fingerprint, float_copy
from lightning_speedkit.compress.int8 import containers, weighted_layers
from lightning_speedkit.compress.judge import Judge, ValidationData, measured_metrics
from lightning_speedkit.compress.quality import serialized_bytes
from lightning_speedkit.compress.quantize_arguments import check_float_answers
from lightning_speedkit.compress.report import QuantizationReport
from lightning_speedkit.compress.selection import Selection
from lightning_speedkit.compress.validation import network_calls
from lightning_speedkit.errors import QuantizationError

__all__ = ["Plan", "planned_engines", "try_quantized", "why_not"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is tried: the arguments of ``QuantizeOnFitEnd`` of the same names, with ``device`` decided."""

    scheme: str = "auto"
    backend: str | None = None
    device: str = "cpu"
    objective: str = "latency"
    skip: Sequence[str] = ()
    accuracy_aware: bool = True
    formats: Sequence[str] | None = None


def planned_engines(plan: Plan) -> list[Engine]:
    """The engines that ``plan`` asks for, in order, without the float32 ones that are measured beside."""
    if plan.backend is not None:
        return [engine_named(plan.backend)]
    return list(engines_for(plan.scheme, plan.device, plan.objective))


def why_not(engine: Engine, plan: Plan) -> str | None:
    """Why ``engine`` cannot do what ``plan`` asks for here, or ``None``."""
    if plan.formats is not None and not set(plan.formats) & set(engine.formats):
        return f"it writes {', '.join(engine.formats)}, not {', '.join(plan.formats)}"
    return engine.missing(plan.device)


def try_quantized(
    module: LightningModule,
    batches: Sequence[Any],
    validation: ValidationData | None,
    judge: Judge,
    plan: Plan,
) -> tuple[Converted | None, QuantizationReport]:
    """A quantized copy of ``module`` if one passed, and the report in any case. ``module`` is not changed.

    ``batches`` are batches on the CPU, as a step of the module got them.

    Raises:
        QuantizationError: The weights of ``module`` have changed meanwhile; nothing of this is to be used.
    """
    report = QuantizationReport(
        kept=False,
        reason="",
        device=plan.device,
        objective=plan.objective,
        calibration_batches=len(batches),
        max_metric_drop=judge.max_metric_drop,
    )
    try:
        _refuse_lazy(module)
        before = fingerprint(module)
        selection = _prepared(module, batches, validation, judge, plan, report)
    except Exception as failure:  # the code of the user; the training is done, and its result is worth more than this
        return None, replace(report, reason=told(failure))
    kept = selection.choose()
    if fingerprint(module) != before:
        raise QuantizationError(
            "in-place corruption: the float model changed while it was quantized; the result is not to be used."
        )
    return (None if kept is None else kept.converted), _report(selection, kept)


def _prepared(
    module: LightningModule,
    batches: Sequence[Any],
    validation: ValidationData | None,
    judge: Judge,
    plan: Plan,
    report: QuantizationReport,
) -> Selection:
    floating = float_copy(module)
    calls = network_calls(copy_module(_as_lightning(floating)), batches)
    check_float_answers(floating, calls)
    report = replace(
        report,
        layers_total=len(weighted_layers(floating).keys() - containers(floating)),
        bytes_before=serialized_bytes(floating.state_dict()),
        threads=torch.get_num_threads(),
        batch_size=batch_size(calls[0]),
    )
    report, no_metric = _with_metric_before(report, floating, validation, judge)
    candidates = []
    for engine in _with_float_ones(planned_engines(plan)):
        if (missing := why_not(engine, plan)) is not None:
            candidate = Candidate.of(engine)
            candidate.ends("missing", missing)
        else:
            candidate = make_candidate(engine, floating, calls, plan.skip, plan.device)
        candidates.append(candidate)
    return Selection(
        floating,
        float_as_it_runs(module, floating, plan.device),
        calls,
        candidates,
        report,
        validation,
        judge,
        skip=plan.skip,
        accuracy_aware=plan.accuracy_aware,
        no_metric=no_metric,
    )


def _with_float_ones(engines: Sequence[Engine]) -> list[Engine]:
    beside = [float_engine(engine) for engine in engines]
    return list(dict.fromkeys([*engines, *(engine for engine in beside if engine is not None)]))


def _with_metric_before(
    report: QuantizationReport, floating: nn.Module, validation: ValidationData | None, judge: Judge
) -> tuple[QuantizationReport, str]:
    try:
        metrics, count = measured_metrics(floating, validation)
    except QuantizationError as failure:
        if judge.monitor is not None:
            raise
        return report, str(failure)
    chosen = judge.choose(metrics)
    if chosen is None:
        return report, "No validation metric was logged."
    name, mode = chosen
    found = replace(report, metric=name, metric_mode=mode, metric_before=metrics[name], validation_batches=count)
    return found, ""


def _report(selection: Selection, kept: Candidate | None) -> QuantizationReport:
    made = [candidate for candidate in selection.candidates if candidate.converted is not None]
    shown = kept or selection.judged or next(iter(made), None)
    report = replace(
        selection.report,
        kept=kept is not None,
        reason=_reason(selection, kept),
        candidates=tuple(candidate.report for candidate in selection.candidates),
        sensitivity=selection.sensitivity,
    )
    if shown is None or shown.converted is None:
        return report
    one = shown.report
    skipped = dict(shown.converted.skipped)
    skipped.update({n: "left in float to save the metric" for n in skipped if n in one.float_layers})
    report = replace(
        report,
        backend=one.backend,
        scheme=one.scheme,
        layers_quantized=shown.converted.quantized,
        layers_total=len({*shown.converted.quantized, *skipped}),
        skipped=skipped,
        float_layers=one.float_layers,
        bytes_after=one.bytes,
        seconds_after_one=one.seconds_one,
        seconds_after_batch=one.seconds_batch,
        metric_after=one.metric,
        metric_drop=one.metric_drop,
        relative_error=one.relative_error,
    )
    notes = _notes(report)
    if kept is not None:
        module = shown.converted.module
        notes += _call_notes(needed_arguments(selection.floating, module, selection.calls, report.device))
    return replace(report, notes=notes)


def _reason(selection: Selection, kept: Candidate | None) -> str:
    others = [c for c in selection.candidates if c is not kept and c.report.outcome not in ("not needed", "missing")]
    told = " ".join(f"{c.report.backend}: {_sentence(c.report.reason)}" for c in others)
    if kept is None:
        missing = " ".join(f"{c.report.backend}: {_sentence(c.report.reason)}" for c in selection.candidates)
        return f"The model stays in float. {told or missing}".rstrip()
    if kept.engine.scheme == FLOAT32:
        return f"{kept.report.reason} No quantized copy is kept. {told}".rstrip()
    return kept.report.reason


def _sentence(text: str) -> str:
    return text if text.endswith(".") else f"{text}."


def _notes(report: QuantizationReport) -> tuple[str, ...]:
    notes = []
    before, after = report.seconds_before_batch, report.seconds_after_batch
    if report.kept and before and after and after >= before:
        notes.append(f"It is not faster: {before * 1e3:.3g} -> {after * 1e3:.3g} ms for a batch.")
    elif report.kept and report.seconds_before_one and report.seconds_after_one:
        before, after = report.seconds_before_one, report.seconds_after_one
        if after > before:
            notes.append(f"For one sample it is slower: {before * 1e3:.3g} -> {after * 1e3:.3g} ms.")
    if report.kept and report.bytes_before and report.bytes_after and report.bytes_after >= report.bytes_before:
        notes.append(f"It is not smaller: {report.bytes_before} -> {report.bytes_after} bytes.")
    return tuple(notes)


def _call_notes(needed: Sequence[str]) -> tuple[str, ...]:
    if not needed:
        return ()
    names = " and ".join(filter(None, (", ".join(needed[:-1]), needed[-1])))
    return (
        f"It cannot be called without {names}, as the float model can: the steps of the fit gave {names}, and it is "
        "made for such calls. Give zeros of the same shape where there are none, let the step keep its labels to "
        f"itself, or use backend={CALLED_LIKE_FLOAT!r}, whose copies are called like the float model.",
    )


def _refuse_lazy(module: nn.Module) -> None:
    for name, value in (*module.named_parameters(), *module.named_buffers()):
        if is_lazy(value):
            raise QuantizationError(
                f"{name!r} of {type(module).__name__} has no shape yet, since its lazy layer was never called. Run the "
                "module once on a batch before it is quantized, or remove the layer."
            )


def _as_lightning(module: nn.Module) -> LightningModule:
    assert isinstance(module, LightningModule)
    return module
