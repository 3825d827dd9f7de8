"""Precisions and the order of channels, on a ResNet-50 and on a stack of transformer blocks."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.gpu_cases.case_run import CaseRun
from benchmarks.gpu_cases.measuring import compare, median_seconds
from benchmarks.gpu_cases.models import images, resnet, tokens, transformer
from lightning_speedkit.precision import fastest_precision, measure_precision, set_matmul_precision
from lightning_speedkit.precision.channels_last import find_format_breaks, to_channels_last_, to_plain_format_

__all__ = ["channels_last", "fastest", "resnet50", "transformer_steps"]

_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}
_TOLERANCE = {"fp32": 0.0, "tf32": 0.02, "bf16": 0.1, "fp16": 0.03, "bf16-true": 0.3}  # of a loss, relative


def transformer_steps(run: CaseRun) -> None:
    """Training steps of the transformer in five precisions."""
    x = tokens(run)
    _precisions(run, transformer(run), x, lambda out: out.float().square().mean(), [*_TOLERANCE])


def resnet50(run: CaseRun) -> None:
    """Training steps of the ResNet-50 in four precisions."""
    x, y = images(run)
    _precisions(
        run, resnet(run), x, lambda out: nn.functional.cross_entropy(out.float(), y), ["fp32", "tf32", "bf16", "fp16"]
    )


def _precisions(
    run: CaseRun, model: nn.Module, x: Tensor, loss_of: Callable[[Tensor], Tensor], names: list[str]
) -> None:
    if not run.is_cuda:
        names = ["fp32", "bf16"]
    steps = {name: _step(copy.deepcopy(model), x, loss_of, name, run) for name in names}
    reference = _settings("fp32")(steps["fp32"])
    for name in names[1:]:
        loss = _settings(name)(steps[name])
        error = abs(loss - reference) / abs(reference)
        run.check(f"loss in {name}", error <= _TOLERANCE[name], f"{loss:.6g}, and {reference:.6g} in fp32")
    compare(run, {name: lambda name=name: _settings(name)(steps[name], False) for name in names})
    run.number("fp32 loss", reference)


def _step(
    model: nn.Module, x: Tensor, loss_of: Callable[[Tensor], Tensor], name: str, run: CaseRun
) -> Callable[..., float]:
    """Forward, backward and a fused AdamW step; with a loss scaler for fp16."""
    if name == "bf16-true":
        model, x = model.bfloat16(), x.bfloat16()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    scaler = torch.amp.GradScaler(run.device.type, enabled=name == "fp16")

    def step(told: bool = True) -> float:
        optimizer.zero_grad()
        low = name in _AUTOCAST
        with torch.autocast(run.device.type, _AUTOCAST[name]) if low else nullcontext():
            loss = loss_of(model(x))
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss.item() if told else 0.0

    return step


def _settings(name: str) -> Callable[..., float]:
    """Calls a step with the switches of its precision, and puts them back."""

    def call(step: Callable[..., float], *arguments: Any) -> float:
        tf32 = name == "tf32"
        undo = set_matmul_precision("high" if tf32 else "highest", "tf32" if tf32 else "ieee")
        try:
            return step(*arguments)
        finally:
            undo()

    return call


def channels_last(run: CaseRun) -> None:
    """The ResNet-50 with channels-last convolutions: the same results, and the weights laid out as before after it."""
    x, y = images(run)
    plain = resnet(run)
    last = copy.deepcopy(plain)
    strides = [p.stride() for p in last.parameters()]
    paths = to_channels_last_(last)
    moved = x.contiguous(memory_format=torch.channels_last)
    plain.eval(), last.eval()
    with torch.no_grad():
        wanted, found = plain(x), last(moved)
    plain.train(), last.train()
    error = float((found - wanted).abs().max() / wanted.abs().max())
    run.check("outputs in fp32", error < 2e-2, f"they differ by {error:.2g} of the largest")
    breaks = find_format_breaks(last, lambda: last(moved))
    run.check("no layer gives the plain order back", not breaks, ", ".join(breaks))
    calls: dict[str, Callable[[], object]] = {}
    for name in ("bf16", "fp16", "fp32") if run.is_cuda else ("bf16",):
        for kind, model, batch in (("plain", plain, x), ("last", last, moved)):
            step = _step(model, batch, lambda out: nn.functional.cross_entropy(out.float(), y), name, run)
            calls[f"{name} {kind}"] = lambda step=step: step(False)
    seconds = median_seconds(calls, run.device, run.budget_seconds * 0.7)
    for name in ("bf16", "fp16", "fp32"):
        if f"{name} last" in seconds:
            run.number(f"{name} plain ms", seconds[f"{name} plain"] * 1e3)
            run.number(f"{name} x", seconds[f"{name} plain"] / seconds[f"{name} last"])
    to_plain_format_(last, paths)
    run.check("weights laid out as before", [p.stride() for p in last.parameters()] == strides)


def fastest(run: CaseRun) -> None:
    """What the table of the kit says is fastest here, and what measuring says."""
    told = fastest_precision(run.device.type)
    timing = measure_precision(run.device.type, seconds=run.pick(0.01, min(2.0, run.budget_seconds / 2)))
    for name, seconds in timing.seconds.items():
        run.number(f"{name} ms", seconds * 1e3)
    run.note(f"table {told}, measured {timing.fastest}")
    if run.is_cuda:
        slower = timing.seconds[told] / timing.seconds[timing.fastest]
        run.check("the table names the fastest", slower <= 1.1, f"{told} takes {slower:.2f} of {timing.fastest}")
