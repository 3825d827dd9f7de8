"""Optimizers by name, clipping, and the guard against steps that are not finite."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Subset, TensorDataset

from benchmarks.gpu_cases.case_run import CaseRun
from benchmarks.gpu_cases.measuring import compare, median_seconds
from benchmarks.gpu_cases.models import Net, fit, net_and_rows, transformer
from benchmarks.optimizer_step import state_bytes
from lightning_speedkit.optimize import NonFiniteGuard, build_optimizer
from lightning_speedkit.optimize.clip_gradients import clip_by_norm, gradient_norm

__all__ = ["clipping", "eight_bit", "named", "non_finite_guard", "offloaded"]

_MIB = 2**20


def _with_gradients(run: CaseRun, model: nn.Module) -> nn.Module:
    draw = torch.Generator(run.device).manual_seed(5)
    for p in model.parameters():
        p.grad = torch.randn(p.shape, generator=draw, device=run.device) * 1e-2
    return model


def _state_mib(optimizer: torch.optim.Optimizer) -> float:
    tensors = [v for state in optimizer.state.values() for v in state.values() if isinstance(v, Tensor)]
    return state_bytes([*tensors]) / _MIB


def _difference(found: nn.Module, wanted: nn.Module) -> float:
    pairs = zip(found.parameters(), wanted.parameters(), strict=True)
    return max(float((a.detach() - b.detach()).abs().max()) for a, b in pairs)


def named(run: CaseRun) -> None:
    """A step of each optimizer on 50 million weights; AdamW as in torch's loop over single tensors."""
    start = _with_gradients(run, transformer(run, layers=4))
    optimizers: dict[str, Any] = {}
    models: dict[str, nn.Module] = {}
    for name in ("torch", "adamw", "adam", "sgd-momentum", "adafactor", "muon", "schedule-free"):
        models[name] = _with_gradients(run, copy.deepcopy(start))
        if name == "torch":
            optimizers[name] = torch.optim.AdamW(models[name].parameters(), lr=1e-3)
            continue
        optimizers[name] = build_optimizer(name, models[name], lr=1e-3)
        if hasattr(optimizers[name], "train"):
            optimizers[name].train()
    run.check("adamw is fused", bool(optimizers["adamw"].defaults["fused"]))
    loop = _with_gradients(run, copy.deepcopy(start))
    places = {id(p): q for p, q in zip(models["adamw"].parameters(), loop.parameters(), strict=True)}
    groups = [
        {"params": [places[id(p)] for p in group["params"]], "weight_decay": group["weight_decay"]}
        for group in optimizers["adamw"].param_groups
    ]
    plain = torch.optim.AdamW(groups, lr=1e-3, foreach=False, fused=False)
    for _ in range(3):
        plain.step(), optimizers["adamw"].step()
    error = _difference(models["adamw"], loop)
    run.check("adamw: weights of torch's loop", error < 1e-6, f"{error:.2g} apart after 3 steps of 1e-3")
    compare(run, {name: optimizer.step for name, optimizer in optimizers.items()}, 0.6)
    for name, optimizer in optimizers.items():
        run.number(f"{name} state MiB", _state_mib(optimizer))
        run.check(f"{name}: finite", all(bool(p.isfinite().all()) for p in models[name].parameters()))


def eight_bit(run: CaseRun) -> None:
    """States of a quarter of the bytes or less, and a training that arrives where AdamW arrives."""
    model, same = (_with_gradients(run, transformer(run, layers=4)) for _ in range(2))
    eight, full = build_optimizer("adamw-8bit", model, lr=1e-3), build_optimizer("adamw", same, lr=1e-3)
    compare(run, {"adamw": full.step, "adamw-8bit": eight.step}, 0.4)
    run.number("adamw state MiB", _state_mib(full))
    run.number("adamw-8bit state MiB", _state_mib(eight))
    if not run.tiny:  # small tensors keep states of 32 bits
        run.check("a third of the state or less", _state_mib(eight) < _state_mib(full) / 3)
    losses = {}
    for name in ("adamw", "adamw-8bit"):
        net, data = net_and_rows(run, 40, 8, 256)
        module = Net(net, lambda module, name=name: build_optimizer(name, module, lr=1e-3))
        fit(run, module, data)
        losses[name] = float(module.losses[-1])
    apart = abs(losses["adamw-8bit"] / losses["adamw"] - 1)
    run.check("loss after 40 steps", apart < 0.2, str(losses))


def offloaded(run: CaseRun) -> None:
    """State and step on the host: weights as with AdamW, and the device holds no state."""
    x = torch.randn(8, 16, run.pick(32, 1024), device=run.device)
    models = {name: transformer(run, layers=2) for name in ("adamw", "adamw-cpu-offload")}
    held, steps = {}, {}
    for name, model in models.items():
        optimizer = build_optimizer(name, model, lr=1e-4)

        def step(model: nn.Module = model, optimizer: Any = optimizer) -> None:
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()

        before = torch.cuda.memory_allocated()
        for _ in range(3):
            step()
        torch.cuda.synchronize()
        optimizer.zero_grad()
        held[name] = torch.cuda.memory_allocated() - before
        run.number(f"{name} held MiB", held[name] / _MIB)
        steps[name] = step
    error = _difference(models["adamw-cpu-offload"], models["adamw"])
    run.check("weights of adamw", error < 2e-5, f"{error:.2g} apart after 3 steps of 1e-4")
    run.check("less on the device", held["adamw-cpu-offload"] < held["adamw"] / 2, str(held))
    compare(run, steps, 0.4)


def non_finite_guard(run: CaseRun) -> None:
    """A batch with a NaN changes nothing: the weights are those of the run without it."""
    steps, rows, bad = run.pick(6, 30), 8, 3
    net, data = net_and_rows(run, steps, rows)
    x = data[:][0].clone()
    x[bad * rows] = torch.nan
    for fused in (True, False):
        kind = "fused" if fused else "not fused"

        def configure(module: nn.Module, fused: bool = fused) -> torch.optim.Optimizer:
            return torch.optim.AdamW(module.parameters(), lr=1e-3, fused=fused)

        guard, module = NonFiniteGuard(), Net(copy.deepcopy(net), configure)
        trainer = fit(run, module, TensorDataset(x), rows, callbacks=[guard])
        run.check(f"{kind}: one step is skipped", guard.skipped_steps == 1, f"{guard.skipped_steps} are")
        run.check(f"{kind}: and not counted", trainer.global_step == steps - 1, f"{trainer.global_step} of {steps}")
        without = Net(copy.deepcopy(net), configure)
        others = [i for i in range(steps * rows) if i // rows != bad]
        fit(run, without, Subset(data, others), rows)
        error = _difference(module.net, without.net)
        run.check(f"{kind}: weights of the run without that batch", error < 1e-7, f"{error:.2g} apart")
    fits = {
        "fit": lambda: fit(run, Net(copy.deepcopy(net)), data, rows),
        "guarded fit": lambda: fit(run, Net(copy.deepcopy(net)), data, rows, callbacks=[NonFiniteGuard()]),
    }
    for name, seconds in median_seconds(fits, run.device, run.budget_seconds / 3, warmup=0).items():
        run.number(f"{name} ms", seconds * 1e3)


def clipping(run: CaseRun) -> None:
    """Clipping by the norm on 150 million gradients: as torch clips, and how fast."""
    ours, theirs = (_with_gradients(run, transformer(run)) for _ in range(2))
    norm = gradient_norm(ours.parameters())
    wanted = nn.utils.clip_grad_norm_(theirs.parameters(), 0.5)
    clip_by_norm(ours.parameters(), 0.5)
    run.check("the norm", abs(float(norm / wanted) - 1) < 1e-5, f"{float(norm):.9g}, {float(wanted):.9g} by torch")
    error = max(
        float((p.grad - q.grad).abs().max())
        for p, q in zip(ours.parameters(), theirs.parameters(), strict=True)
        if p.grad is not None and q.grad is not None
    )
    run.check("the gradients", error < 1e-8, f"{error:.2g} apart")
    ours_list, theirs_list = [*ours.parameters()], [*theirs.parameters()]
    compare(
        run,
        {
            "torch": lambda: nn.utils.clip_grad_norm_(theirs_list, 0.5),
            "clip_by_norm": lambda: clip_by_norm(ours_list, 0.5),
        },
        0.5,
    )
