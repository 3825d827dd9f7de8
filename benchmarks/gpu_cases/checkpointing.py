"""Activation checkpointing with the real peak of the device: policies, and budgets."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn

from benchmarks.gpu_cases.case_run import CaseRun
from benchmarks.gpu_cases.measuring import compare, median_seconds, peak_bytes
from benchmarks.gpu_cases.models import images, resnet, tokens, transformer
from lightning_speedkit.memory import checkpoint_modules
from lightning_speedkit.memory.checkpoint_budget import plan_checkpoints

__all__ = ["budget", "policies"]

_MIB = 2**20


def _step(run: CaseRun, model: nn.Module, x: Tensor) -> Callable[[], None]:
    def step() -> None:
        torch.manual_seed(3)  # the same dropout each time
        model.zero_grad()
        with torch.autocast(run.device.type, torch.bfloat16):
            loss = model(x).float().square().mean()
        loss.backward()

    return step


def _gradients(model: nn.Module) -> Tensor:
    return torch.cat([p.grad.flatten().float() for p in model.parameters() if p.grad is not None]).cpu()


def policies(run: CaseRun) -> None:
    """Full, selective and offload on the transformer in bf16: peak, time, and gradients as without."""
    x, plain = tokens(run), transformer(run, dropout=0.1)
    models = {"plain": plain}
    for policy in ("full", "selective", "offload"):
        models[policy] = copy.deepcopy(plain)
        paths = checkpoint_modules(models[policy], policy=policy)
        run.check(f"{policy}: takes the blocks", len(paths) == len(plain.layers), f"{len(paths)} modules")
    steps = {name: _step(run, model, x) for name, model in models.items()}
    steps["plain"]()
    wanted = _gradients(plain)
    steps["plain"]()
    noise = float((_gradients(plain) - wanted).abs().max())
    run.note(f"gradients of two plain runs differ by {noise:.2g}")
    for name in ("full", "selective", "offload"):
        steps[name]()
        error = float((_gradients(models[name]) - wanted).abs().max())
        # kernels that add in any order are no reason to be further away than a plain run is from itself
        run.check(
            f"{name}: gradients of the plain run", error <= 4 * noise, f"{error:.2g} apart, plain runs {noise:.2g}"
        )
    if run.is_cuda:
        peaks = {}
        for name, step in steps.items():
            models[name].zero_grad()
            peaks[name] = peak_bytes(run.device, step)
            run.number(f"{name} peak MiB", peaks[name] / _MIB)
            models[name].zero_grad()
        for name in ("full", "selective", "offload"):
            run.check(f"{name}: less memory", peaks[name] < peaks["plain"], f"{peaks[name]} of {peaks['plain']} bytes")
    compare(run, steps, share=0.5)


def budget(run: CaseRun) -> None:
    """Plans for parts of the plain peak, on the transformer and the ResNet-50: no peak is above its budget."""
    x = tokens(run, rows=4)
    _budgets(
        run, "transformer", transformer(run, dropout=0.1), x, run.pick((0.8,), (0.7, 0.4))
    )  # of tiny blocks, the state of the generators is a large part
    # some CPUs' convolutions take buffers as large as what two tiny pictures leave behind
    pictures = images(run, 32)[0].repeat(run.pick(16, 1), 1, 1, 1)
    _budgets(run, "resnet50", resnet(run), pictures, run.pick((0.8,), (0.7,)))


def _budgets(run: CaseRun, name: str, model: nn.Module, x: Tensor, parts: tuple[float, ...]) -> None:
    plain = _step(run, model, x)
    for part in parts[: run.pick(1, None)]:
        plan = plan_checkpoints(model, plain, part)
        run.check(f"{name} {part}: as planned", plan.peak_bytes <= plan.budget_bytes, f"{plan.peak_bytes} bytes")
        made = copy.deepcopy(model)
        if plan.paths:
            checkpoint_modules(made, plan.paths)
        step = _step(run, made, x)
        if run.is_cuda:
            step()
            made.zero_grad()
            peak = peak_bytes(run.device, step)
            grown = sum(p.grad.nbytes for p in made.parameters() if p.grad is not None)
            run.number(f"{name} {part} peak MiB", (peak - grown) / _MIB)
            run.number(f"{name} {part} budget MiB", plan.budget_bytes / _MIB)
            run.check(
                f"{name} {part}: the device's own peak", peak - grown <= plan.budget_bytes, f"{peak} with {grown} kept"
            )
        taken = median_seconds({"plain": plain, "planned": step}, run.device, run.budget_seconds / 8, run.pick(0, 1))
        run.number(f"{name} {part} extra %", 100 * (taken["planned"] / taken["plain"] - 1))
        run.note(f"{name} {part}: {len(plan.paths)} of {len(plan.profile)} modules")
