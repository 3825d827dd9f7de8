"""Distillation in a Trainer on the device: the losses of a plain loop, what it costs, and what is learned.

Losses may be 1e-4 apart, relative to the largest.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from benchmarks.gpu_cases.case_run import CaseRun
from benchmarks.gpu_cases.measuring import compare, peak_bytes, tensor_bytes
from benchmarks.gpu_cases.models import Net, fit, net_and_rows
from lightning_speedkit.compress import Distillation, distillation_loss

__all__ = ["distilled"]

_TEMPERATURE, _WEIGHT, _ROWS = 2.0, 0.75, 64
_MIB = 2**20


def distilled(run: CaseRun) -> None:
    """A student with a teacher four times as wide."""
    student, data = net_and_rows(run, steps=run.pick(4, 30), rows=_ROWS)
    teacher = _teacher(student)
    before = [p.clone() for p in teacher.parameters()]
    module, plain = Net(copy.deepcopy(student)), Net(copy.deepcopy(student))
    fit(run, module, data, _ROWS, callbacks=[Distillation(teacher, temperature=_TEMPERATURE, weight=_WEIGHT)])
    fit(run, plain, data, _ROWS)
    found, wanted = torch.stack(module.losses).cpu(), _plain_loop(run, student, teacher, data)
    apart = float((found - wanted).abs().max() / wanted.abs().max())
    run.check("losses of a plain loop", apart <= 1e-4, f"relative difference {apart:.2g}")
    unchanged = all(a.equal(b.cpu()) for a, b in zip(before, teacher.parameters(), strict=True))
    run.check("the teacher is unchanged", unchanged)
    homes = {p.device.type for p in teacher.parameters()}
    run.check("the teacher is back in its place and mode", homes == {"cpu"} and teacher.training, str(homes))
    run.check("the teacher is no part of the module", module.state_dict().keys() == plain.state_dict().keys())
    with torch.no_grad():
        x = torch.stack([data[index][0] for index in range(_ROWS)])
        answers = teacher(x)
        gaps = [float(distillation_loss(each.net.cpu()(x), answers)) for each in (module, plain)]
    run.number("distance to the teacher nats", gaps[0])
    run.number("distance without it nats", gaps[1])
    run.check("nearer to the teacher than without", gaps[0] < gaps[1], f"{gaps[0]:.4g}, {gaps[1]:.4g} without")
    _costs(run, student, teacher, data)


def _teacher(student: nn.Module) -> nn.Module:
    first = student.get_submodule("0")
    assert isinstance(first, nn.Linear)
    torch.manual_seed(5)
    width = first.in_features
    return nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))


def _plain_loop(run: CaseRun, student: nn.Module, teacher: nn.Module, data: Dataset[tuple[Tensor, ...]]) -> Tensor:
    student, teacher = copy.deepcopy(student).to(run.device), copy.deepcopy(teacher).to(run.device).eval()
    optimizer = torch.optim.AdamW(student.parameters(), lr=1e-4, fused=True)
    losses = []
    for (x,) in DataLoader(data, _ROWS):
        x = x.to(run.device)
        optimizer.zero_grad()
        logits = student(x)
        with torch.no_grad():
            soft = torch.softmax(teacher(x) / _TEMPERATURE, -1)
        divergence = nn.functional.kl_div(
            torch.log_softmax(logits / _TEMPERATURE, -1), soft, reduction="batchmean"
        )  # batchmean divides by the rows
        loss = (1 - _WEIGHT) * logits.square().mean() + _WEIGHT * _TEMPERATURE**2 * divergence
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses).cpu()


def _costs(run: CaseRun, student: nn.Module, teacher: nn.Module, data: Dataset[tuple[Tensor, ...]]) -> None:
    def fitted(with_teacher: bool) -> Callable[[], object]:
        def call() -> None:
            callbacks = [Distillation(teacher, temperature=_TEMPERATURE, weight=_WEIGHT)] if with_teacher else []
            fit(run, Net(copy.deepcopy(student)), data, _ROWS, callbacks=callbacks)

        return call

    fits = {"plain fit": fitted(False), "distilling fit": fitted(True)}
    run.number("teacher MiB", tensor_bytes(teacher) / _MIB)
    if run.is_cuda:
        for name, call in fits.items():
            run.number(f"{name} peak MiB", peak_bytes(run.device, call) / _MIB)
    compare(run, fits, 0.4, warmup=0)
