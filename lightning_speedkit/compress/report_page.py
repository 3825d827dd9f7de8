"""The report of a quantization as one HTML page."""

from __future__ import annotations

from lightning_speedkit.compress.report import CandidateReport, QuantizationReport
from lightning_speedkit.report import (
    Bar,
    BarChart,
    Block,
    Document,
    Highlight,
    Highlights,
    Section,
    Table,
    Text,
    format_number,
    ratio_text,
)

__all__ = ["report_document"]


def report_document(report: QuantizationReport) -> Document:
    """The page of ``report``: the verdict, what it gained and cost, every candidate, and every layer.

    >>> report_document(QuantizationReport(kept=False, reason="nothing to quantize")).lead
    'Not quantized: nothing to quantize'
    """
    sections = [Section("Speed", _speed(report)), Section("Size", _size(report)), Section("Quality", _quality(report))]
    sections += [Section("What was tried", _tried(report)), Section("Layers", _layers(report))]
    return Document(
        "Quantization when training ended",
        [section for section in sections if section.blocks],
        lead=report.describe(),
        opening=_opening(report),
        footer=(
            f"Measured for {report.device} with objective {report.objective!r} on {report.threads or 'unknown'} "
            f"threads, float and quantized called in turn; weights: {report.weights}."
        ),
    )


def _opening(report: QuantizationReport) -> list[Block]:
    items = []
    if report.seconds_before_batch and report.seconds_after_batch:
        factor, word = ratio_text(report.seconds_before_batch / report.seconds_after_batch, "faster", "slower")
        items.append(Highlight(factor, word, f"per batch of {report.batch_size}"))
    if report.bytes_before and report.bytes_after:
        factor, word = ratio_text(report.bytes_before / report.bytes_after, "smaller", "larger")
        items.append(Highlight(factor, word, f"{format_number(report.bytes_after / 1e6, 'MB')} on disk"))
    if report.metric is not None and report.metric_after is not None and report.metric_before is not None:
        was = f"was {format_number(report.metric_before)}"
        items.append(Highlight(format_number(report.metric_after), report.metric, was))
    blocks: list[Block] = [Highlights(items)] if items else []
    return [*blocks, *(Text(note, tone="warning") for note in report.notes)]


def _speed(report: QuantizationReport) -> list[Block]:
    blocks: list[Block] = []
    rows = [
        (f"a batch of {report.batch_size}", report.seconds_before_batch, [c.seconds_batch for c in report.candidates]),
        ("one sample", report.seconds_before_one, [c.seconds_one for c in report.candidates]),
    ]
    for title, before, others in rows:
        if before is None:
            continue
        bars = [Bar("float32", before * 1e3)]
        bars += [Bar(_label(c), s * 1e3) for c, s in zip(report.candidates, others, strict=True) if s is not None]
        blocks.append(BarChart(f"Time for {title}", bars, unit="ms", baseline="float32"))
    return blocks


def _size(report: QuantizationReport) -> list[Block]:
    if report.bytes_before is None:
        return []
    bars = [Bar("float32", report.bytes_before / 1e6)]
    bars += [Bar(_label(c), c.bytes / 1e6) for c in report.candidates if c.bytes is not None]
    return [BarChart("Bytes on disk", bars, unit="MB", baseline="float32", gain="smaller", loss="larger")]


def _quality(report: QuantizationReport) -> list[Block]:
    if report.metric is None or report.metric_before is None:
        return [Text("No validation metric was measured; the outputs were compared.", tone="note")]
    rows = [["float32", format_number(report.metric_before), "", ""]]
    for candidate in report.candidates:
        if candidate.metric is not None:
            drop, error = candidate.metric_drop, candidate.relative_error
            texts = [
                format_number(candidate.metric),
                "" if drop is None else f"{drop:.3g}{' (a gain)' if drop < 0 else ''}",
            ]
            rows.append([_label(candidate), *texts, "" if error is None else f"{error:.2g}"])
    caption = f"Measured on up to {report.validation_batches} batches; a drop up to {report.max_metric_drop} is kept."
    return [Table(["model", report.metric, "drop", "relative error"], rows, caption=caption)]


def _tried(report: QuantizationReport) -> list[Block]:
    rows = [[_label(c), c.scheme, c.outcome, c.reason] for c in report.candidates]
    return [Table(["candidate", "scheme", "outcome", "reason"], rows)] if rows else []


def _layers(report: QuantizationReport) -> list[Block]:
    rows = [[name, report.scheme or "", _alone(report, name)] for name in report.layers_quantized]
    rows += [[name, f"float: {reason}", _alone(report, name)] for name, reason in report.skipped.items()]
    return [Table(["layer", "kept as", "error if rounded alone"], rows)] if rows else []


def _alone(report: QuantizationReport, name: str) -> str:
    error = report.sensitivity.get(name)
    return "" if error is None else f"{error:.2g}"


def _label(candidate: CandidateReport) -> str:
    count = len(candidate.float_layers)
    return candidate.backend if not count else f"{candidate.backend}, {count} more in float"
