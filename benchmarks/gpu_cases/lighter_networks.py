"""Networks that are lighter by their architecture: lighten() in one that is there, and pick_backbone() for a new one.

Layers that have the structure of their replacement must answer alike: 1e-3 apart at most (norms, float32).
"""

from __future__ import annotations

import copy
import warnings
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.gpu_cases.case_run import CaseRun
from benchmarks.gpu_cases.measuring import compare, median_seconds, relative_difference, tensor_bytes
from lightning_speedkit.architecture import BackboneTable, LightenReport, apply_plan, lighten, pick_backbone

__all__ = ["backbones", "lightened"]

_MIB = 2**20
_NAMES = {  # the light one of each library first
    "timm": ("timm:mobilenetv3_small_100", "timm:resnet18"),
    "torchvision": ("torchvision:mobilenet_v3_small", "torchvision:resnet18"),
}


def lightened(run: CaseRun) -> None:
    """Linear layers of a low rank, and a convolution that is a product of two: the same outputs from less work."""
    torch.manual_seed(0)
    width, rows = run.pick((64, 16), (2048, 8192))
    x = torch.randn(rows, width, device=run.device)
    linear = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width)).to(run.device).eval()
    with torch.no_grad():
        for layer in (linear[0], linear[2]):
            up, down = (torch.randn(shape, device=run.device) for shape in ((width, width // 8), (width // 8, width)))
            layer.weight.copy_(up @ down / width)
    _same_with_less(run, "low-rank", linear, x, energy=1 - 1e-7)
    wide, size, count = run.pick((16, 8, 2), (128, 56, 64))
    image = torch.randn(count, wide, size, size, device=run.device)
    convolution = nn.Sequential(nn.Conv2d(wide, wide, 3, padding=1), nn.ReLU()).to(run.device).eval()
    with torch.no_grad():
        spatial, point = torch.randn(1, wide, 3, 3), torch.randn(wide, wide, 1, 1)
        convolution[0].weight.copy_(spatial * point / wide)
    _same_with_less(run, "depthwise", convolution, image, rank=1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # nothing may pay on a CPU with tiny sizes; that is told below
        _, report = lighten(linear, x)
    run.note(f"timed on the device: {report.describe()}")
    timed = report.seconds_before is not None and report.seconds_after is not None
    run.check("timed on the device, or left since nothing pays", timed or not report.layers, str(dict(report.left)))
    if report.seconds_before is not None and report.seconds_after is not None:
        run.number("lighten's own before ms", report.seconds_before * 1e3)
        run.number("lighten's own after ms", report.seconds_after * 1e3)
    if run.is_cuda:
        run.check("it pays for wide linear layers", len(report.layers) == 2, str(dict(report.left)))


def _same_with_less(run: CaseRun, kind: str, model: nn.Module, x: Tensor, **arguments: Any) -> LightenReport:
    before = copy.deepcopy(model.state_dict())
    light, report = lighten(model, x, [kind], min_saving=None, **arguments)
    unchanged = all(bool(a.equal(b)) for a, b in zip(before.values(), model.state_dict().values(), strict=True))
    run.check(f"{kind}: the model is unchanged", unchanged)
    fewer = report.parameters_after < report.parameters_before and report.flops_after < report.flops_before
    run.check(f"{kind}: less of both", fewer and bool(report.layers), report.describe())
    again = apply_plan(model, report.plan, warm_start=False).eval()
    again.load_state_dict(light.state_dict())
    with torch.no_grad():
        wanted = model(x)
        for name, each in (("outputs", light), ("outputs by its plan", again)):
            error = relative_difference(each(x), wanted)
            run.check(f"{kind}: {name}", error <= 1e-3, f"relative difference {error:.2g}")
        run.number(f"{kind} before MiB", tensor_bytes(model) / _MIB)
        run.number(f"{kind} after MiB", tensor_bytes(light) / _MIB)
        run.number(f"{kind} FLOPs x", report.flops_before / report.flops_after)
        compare(run, {f"{kind} before": lambda: model(x), f"{kind} after": lambda: light(x)}, 0.25)
    return report


def backbones(run: CaseRun) -> None:
    """A light and a heavier network of each library that is here: the order, the limits, and the measured costs."""
    libraries = [name for name in _NAMES if find_spec(name) is not None]
    lacking = [name for name in _NAMES if name not in libraries]
    if lacking:
        run.note(f"not installed, so its networks are left out: {', '.join(lacking)}")
    names = [name for library in libraries for name in _NAMES[library]]
    shape, rows = run.pick(((3, 32, 32), 2), ((3, 224, 224), 64))
    _warmed_up(run)  # else the first candidate's look takes the seconds of the others
    settings = {"device": run.kind, "batch_size": rows, "progress": False}
    table = pick_backbone(shape, 10, None, names, seconds=max(4.0, run.budget_seconds / 2), **settings)
    run.check("measured on the device", table.device == run.kind, table.device)
    for row in table:
        if row.error is not None and row.error.startswith("not reached"):
            run.note(f"{row.name}: {row.error}")
            continue
        run.check(f"{row.name}: measured", row.error is None, row.error or "")
        for name, value in (
            (f"{row.name} one ms", row.latency_ms),
            (f"{row.name} batch ms", row.batch_latency_ms),
            (f"{row.name} training MiB", row.training_memory_mib),
        ):
            if value is not None:
                run.number(name, value)
    known = [row.latency_ms for row in table if row.latency_ms is not None]
    run.check("the quickest is first", table.best.latency_ms == min(known), str(known))
    light, heavy = _NAMES[libraries[0]]
    limited = pick_backbone(shape, 10, {"max_parameters": 5e6}, [heavy, light], seconds=2.0, **settings)
    run.check("the light one is taken under a limit", limited.best.name == light, limited.best.name)
    run.check(
        "the other one is over it", "max_parameters" in limited.note(limited[heavy]), limited.note(limited[heavy])
    )
    _as_measured(run, table, shape)


def _warmed_up(run: CaseRun) -> None:
    layer = nn.Conv2d(3, 8, 3).to(run.device)
    layer(torch.zeros(2, 3, 32, 32, device=run.device)).sum().backward()


def _as_measured(run: CaseRun, table: BackboneTable, shape: tuple[int, int, int]) -> None:
    """The best one built anew: its outputs on the device are those of the CPU, its latency is that of the table."""
    best = table.best
    model = best.build().eval()
    counted = sum(p.numel() for p in model.parameters())
    run.check("parameters", best.parameters == counted, f"{best.parameters} told, {counted} counted")
    x = torch.randn(1, *shape, generator=torch.Generator().manual_seed(6))
    with torch.no_grad():
        wanted = model(x)
        model, on_device = model.to(run.device), x.to(run.device)
        error = relative_difference(model(on_device), wanted)
        run.check("outputs of the CPU", error <= 1e-2, f"relative difference {error:.2g}")
        taken = median_seconds({"best": lambda: model(on_device)}, run.device, run.budget_seconds / 10, 3)["best"]
    run.number("the best again one ms", taken * 1e3)
    if run.is_cuda and best.latency_ms:
        ratio = 1e3 * taken / best.latency_ms
        run.check("the latency of the table, twice at most", 0.5 <= ratio <= 2.0, f"{ratio:.2f} times")
