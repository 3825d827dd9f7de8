"""The mixed precision plugin in a Trainer: the losses of a plain loop, and what the gradient scaler skips."""

from __future__ import annotations

import copy
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.utils.data import DataLoader

from benchmarks.gpu_cases.case_run import CaseRun
from benchmarks.gpu_cases.measuring import median_seconds
from benchmarks.gpu_cases.models import Net, fit, net_and_rows
from lightning_speedkit.precision import SpeedkitMixedPrecision

__all__ = ["gradient_scaler", "mixed_precision"]

_CLIP = 0.01


def mixed_precision(run: CaseRun) -> None:
    """bf16-mixed with a fused optimizer and clipping, which Lightning's own plugin refuses (#21435)."""
    net, data = net_and_rows(run, steps=run.pick(3, 20))
    dtypes: list[torch.dtype] = []
    module = Net(copy.deepcopy(net))
    module.net[0].register_forward_hook(lambda *called: dtypes.append(called[-1].dtype))
    fit(run, module, data, plugins=[SpeedkitMixedPrecision("bf16-mixed")], gradient_clip_val=_CLIP)
    run.check("matrix products in bfloat16", set(dtypes) == {torch.bfloat16}, str(set(dtypes)))
    losses, _, _ = _plain_loop(run, net, data, torch.bfloat16, clip=_CLIP)
    _same(run, "losses of a plain loop with clipping", module.losses, losses)
    ours, theirs = Net(copy.deepcopy(net)), Net(copy.deepcopy(net))
    fit(run, ours, data, plugins=[SpeedkitMixedPrecision("bf16-mixed")])
    fit(run, theirs, data, precision="bf16-mixed")
    _same(run, "losses of Lightning's own plugin", ours.losses, theirs.losses)
    fits = {
        "Lightning's fit": lambda: fit(run, Net(copy.deepcopy(net)), data, precision="bf16-mixed"),
        "our fit": lambda: fit(run, Net(copy.deepcopy(net)), data, plugins=[SpeedkitMixedPrecision("bf16-mixed")]),
    }
    for name, seconds in median_seconds(fits, run.device, run.budget_seconds / 3, warmup=0).items():
        run.number(f"{name} ms", seconds * 1e3)


def gradient_scaler(run: CaseRun) -> None:
    """16-mixed from a loss scale that is far too high: steps are skipped, and the schedule waits for them."""
    net, data = net_and_rows(run, steps=30)
    schedules: list[Any] = []

    def configure(module: nn.Module) -> Any:
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4, fused=True)
        schedules.append(torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 20)))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedules[-1], "interval": "step"}}

    plugin = SpeedkitMixedPrecision("16-mixed", initial_scale=2.0**40)
    module = Net(copy.deepcopy(net), configure)
    fit(run, module, data, plugins=[plugin])
    losses, weights, skipped = _plain_loop(run, net, data, torch.float16, scale=2.0**40, warmup=20)
    run.number("skipped steps", plugin.skipped_steps)
    run.check("some steps are skipped, not all", 0 < skipped < 30, str(skipped))
    run.check("skipped as in a plain loop", plugin.skipped_steps == skipped, f"{plugin.skipped_steps}, {skipped}")
    run.check("the schedule waits", schedules[-1].last_epoch == 30 - skipped, f"{schedules[-1].last_epoch} steps of it")
    _same(run, "losses of a plain loop", module.losses, losses)
    pairs = [
        (a.detach().cpu().flatten(), b.detach().cpu().flatten())
        for a, b in zip(module.net.parameters(), weights, strict=True)
    ]
    _same(run, "weights of a plain loop", [torch.cat([a for a, _ in pairs])], [torch.cat([b for _, b in pairs])])
    try:
        fit(run, Net(copy.deepcopy(net)), data, plugins=[SpeedkitMixedPrecision("16-mixed")], gradient_clip_val=1.0)
        refused = False
    except MisconfigurationException:
        refused = True
    run.check("a fused optimizer with clipping is refused", refused)


def _plain_loop(
    run: CaseRun, net: nn.Module, data: Any, dtype: torch.dtype, clip: float = 0.0, scale: float = 1.0, warmup: int = 0
) -> tuple[list[Tensor], list[Tensor], int]:
    net = copy.deepcopy(net).to(run.device)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4, fused=True)
    scaler = torch.amp.GradScaler(run.device.type, init_scale=scale, enabled=dtype is torch.float16)
    losses, skipped = [], 0
    for (x,) in DataLoader(data, 8):
        if warmup:
            optimizer.param_groups[0]["lr"] = 1e-4 * min(1.0, (len(losses) - skipped + 1) / warmup)
        optimizer.zero_grad()
        with torch.autocast(run.device.type, dtype):
            loss = net(x.to(run.device)).float().square().mean()
        scaler.scale(loss).backward()
        if clip:
            nn.utils.clip_grad_norm_(net.parameters(), clip)
        before = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        skipped += scaler.get_scale() < before
        losses.append(loss.detach())
    return losses, [p.detach() for p in net.parameters()], skipped


def _same(run: CaseRun, name: str, found: list[Tensor], wanted: list[Tensor]) -> None:
    a, b = torch.stack(found).cpu(), torch.stack(wanted).cpu()
    error = float(((a - b).abs().max() / b.abs().max()).nan_to_num(torch.inf))
    run.check(name, error <= 1e-5, f"relative difference {error:.2g}")
