"""torch.compile through the kit: blocks of a transformer in three modes, the callback in a Trainer, and with float8."""

from __future__ import annotations

import copy
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from benchmarks.gpu_cases.case_run import CaseRun
from benchmarks.gpu_cases.measuring import compare
from benchmarks.gpu_cases.models import Net, fit, tokens, transformer
from lightning_speedkit.precision import Float8Precision, SpeedkitMixedPrecision
from lightning_speedkit.precision.compile import CompileModel, compile_modules
from lightning_speedkit.precision.compiled_call import CompileLog

__all__ = ["callback", "default", "fp8_training", "max_autotune", "reduce_overhead"]


def default(run: CaseRun) -> None:
    """A training step in bf16 with compiled blocks, against eager ones."""
    x = tokens(run)
    eager = transformer(run, layers=8)
    compiled, log = copy.deepcopy(eager), CompileLog()
    compile_modules(compiled, "blocks", backend=run.pick("eager", "inductor"), log=log)
    steps = {"eager": _training(run, eager, x), "compiled": _training(run, compiled, x)}
    start = time.perf_counter()
    found = steps["compiled"]()
    run.number("first step s", time.perf_counter() - start)
    wanted = steps["eager"]()
    _told(run, log, found, wanted)
    compare(run, steps, 0.3)


def reduce_overhead(run: CaseRun) -> None:
    """Inference with one short row, where launching is what takes time: CUDA graphs against eager."""
    _inference(run, "reduce-overhead", rows=1, length=128)


def max_autotune(run: CaseRun) -> None:
    """Inference with kernels that were chosen by trying them."""
    _inference(run, "max-autotune-no-cudagraphs", rows=8, length=1024)


def _inference(run: CaseRun, mode: str, rows: int, length: int) -> None:
    x = tokens(run, rows, length).bfloat16()
    eager = transformer(run, layers=8).bfloat16().eval()
    compiled, log = copy.deepcopy(eager), CompileLog()
    compile_modules(compiled, "blocks", mode=mode, log=log)

    def forward(model: nn.Module) -> Tensor:
        if mode == "reduce-overhead":
            torch.compiler.cudagraph_mark_step_begin()
        with torch.no_grad():
            out: Tensor = model(x)
            return out.clone()

    wanted, found = forward(eager), forward(compiled)
    error = float((found - wanted).float().norm() / wanted.float().norm())
    run.check("outputs", error < 0.02, f"relative difference {error:.2g}")
    _failures(run, log)
    compare(run, {"eager": lambda: forward(eager), mode: lambda: forward(compiled)}, 0.2, warmup=3)


def _training(run: CaseRun, model: nn.Module, x: Tensor) -> Callable[[], Tensor]:
    def step() -> Tensor:
        model.zero_grad()
        with torch.autocast(run.device.type, torch.bfloat16):
            loss: Tensor = model(x).float().square().mean()
        loss.backward()
        return loss.detach()

    return step


def _told(run: CaseRun, log: CompileLog, found: Tensor, wanted: Tensor) -> None:
    apart = abs(float(found / wanted) - 1)
    run.check("the loss", apart < 0.01, f"{float(found):.6g}, {float(wanted):.6g} in eager mode")
    _failures(run, log)


def _failures(run: CaseRun, log: CompileLog) -> None:
    run.number("compiling s", log.seconds)
    run.number("compiled graphs", log.graphs)
    run.check("nothing fell back to eager", not log.failures, "; ".join(log.failures.values())[:300])
    if not run.tiny:
        run.check("something was compiled", log.graphs > 0)


def _data(run: CaseRun, steps: int, rows: int) -> TensorDataset:
    length, width = run.pick((16, 32), (512, 1024))
    return TensorDataset(torch.randn(steps * rows, length, width, generator=torch.Generator().manual_seed(4)))


def _fit(run: CaseRun, plugin: Any, callbacks: list[Any], steps: int) -> Net:
    module = Net(transformer(run, layers=6).cpu())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fit(run, module, _data(run, steps, 4), 4, plugins=[plugin], callbacks=callbacks)
    return module


def callback(run: CaseRun) -> None:
    """CompileModel in a Trainer whose module logs in its step: the losses, and whether compiling pays."""
    steps = run.pick(8, 60)
    compiling = CompileModel("blocks", backend=run.pick("eager", "inductor"), eager_steps=run.pick(2, 15))
    found = _fit(run, SpeedkitMixedPrecision("bf16-mixed"), [compiling], steps).losses
    wanted = _fit(run, SpeedkitMixedPrecision("bf16-mixed"), [], steps).losses
    apart = float((torch.stack(found) / torch.stack(wanted) - 1).abs().max())
    run.check("losses of the eager run", apart < 0.02, f"relative difference {apart:.2g}")
    _report(run, compiling)


def _report(run: CaseRun, compiling: CompileModel) -> None:
    report = compiling.report
    if report is None:
        run.check("there is a report", False)
        return
    run.check("nothing fell back to eager", not report.failures, str(report.failures)[:300])
    run.number("compiling s", report.compile_seconds)
    for name, value in (("eager ms", report.eager_seconds), ("compiled ms", report.compiled_seconds)):
        if value is not None:
            run.number(name, value * 1e3)
    if report.speedup is not None:
        run.number("compiled x", report.speedup)
    if report.break_even_step is not None:
        run.number("even after steps", report.break_even_step)


def fp8_training(run: CaseRun) -> None:
    """Linear layers in float8 against bf16-mixed, both with compiled blocks."""
    steps, seconds, losses = 30, {}, {}
    for name, plugin in (("bf16", SpeedkitMixedPrecision("bf16-mixed")), ("fp8", Float8Precision())):
        compiling = CompileModel("blocks", eager_steps=3)
        losses[name] = _fit(run, plugin, [compiling], steps).losses
        report = compiling.report
        run.check(f"{name}: compiled", report is not None and not report.failures, str(report)[:300])
        if report is not None and report.compiled_seconds:
            seconds[name] = report.compiled_seconds
            run.number(f"{name} step ms", 1e3 * report.compiled_seconds)
            run.number(f"{name} compiling s", report.compile_seconds)
    if len(seconds) == 2:
        run.number("fp8 x", seconds["bf16"] / seconds["fp8"])
    last = {name: float(each[-1]) for name, each in losses.items()}
    run.check("the loss after 30 steps", abs(last["fp8"] / last["bf16"] - 1) < 0.1, str(last))
