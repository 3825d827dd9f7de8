"""Smaller models: int8 after a fit on the device, 2:4 sparsity, and inference in 8 bits by torchao."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.gpu_cases.case_run import CaseRun
from benchmarks.gpu_cases.measuring import compare
from benchmarks.gpu_cases.models import Net, fit, net_and_rows
from lightning_speedkit.compress import QuantizeOnFitEnd

__all__ = ["fp8_inference", "int8_inference", "quantize_on_fit_end", "two_of_four"]


def quantize_on_fit_end(run: CaseRun) -> None:
    """The float model of a fit on the device is what it would be without, and the int8 copy is near it."""
    net, data = net_and_rows(run, steps=10, width=256, tiny=64)
    with_it, without = Net(copy.deepcopy(net)), Net(copy.deepcopy(net))
    devices: list[str] = []
    with_it.net.register_forward_hook(lambda *called: devices.append(called[-1].device.type))
    with TemporaryDirectory() as folder:
        callback = QuantizeOnFitEnd(folder=folder, backend="torch-ao-dynamic", objective="size")
        fit(run, with_it, data, callbacks=[callback])
    fit(run, without, data)
    pairs = zip(with_it.net.parameters(), without.net.parameters(), strict=True)
    run.check("the float model is untouched", all(bool(a.cpu().eq(b.cpu()).all()) for a, b in pairs))
    run.check("it trained on the device", devices[0] == run.device.type, str(set(devices)))
    report = callback.report
    run.check("kept", report is not None and report.kept, "" if report is None else report.reason)
    if report is not None and report.bytes_before and report.bytes_after:
        run.number("size x", report.bytes_before / report.bytes_after)
        run.note(report.describe())
    if callback.quantized_model is not None:
        x = data[:8][0]
        with torch.no_grad():
            wanted, found = with_it.net.cpu().eval()(x), callback.quantized_model.net(x)
        error = float((found - wanted).norm() / wanted.norm())
        run.check("int8 outputs", error < 0.1, f"relative difference {error:.2g}")


def two_of_four(run: CaseRun) -> None:
    """A linear layer of which two of four weights are zero, in the format that tensor cores skip zeros of."""
    from torch.sparse import to_sparse_semi_structured

    size, rows = run.pick((128, 64), (4096, 8192))
    for name, dtype in (("fp16", torch.float16), ("bf16", torch.bfloat16)):
        draw = torch.Generator().manual_seed(0)
        weight = torch.randn(size, size, generator=draw).view(-1, 4)
        kept = weight.abs().topk(2, dim=1).indices
        weight = torch.zeros_like(weight).scatter(1, kept, weight.gather(1, kept)).view(size, size)
        dense = weight.to(run.device, dtype)
        sparse: Any = to_sparse_semi_structured(dense)
        x = torch.randn(rows, size, generator=draw).to(run.device, dtype)
        wanted, found = nn.functional.linear(x, dense), nn.functional.linear(x, sparse)
        error = float((found - wanted).float().norm() / wanted.float().norm())
        run.check(f"{name}: the product", error < 1e-2, f"relative difference {error:.2g}")
        run.check(f"{name}: and back", bool(sparse.to_dense().eq(dense).all()))
        compare(
            run,
            {
                f"{name} dense": lambda x=x, dense=dense: nn.functional.linear(x, dense),
                f"{name} 2:4": lambda x=x, sparse=sparse: nn.functional.linear(x, sparse),
            },
            0.3,
        )


def int8_inference(run: CaseRun) -> None:
    """Linear layers with int8 weights and inputs, compiled, against bfloat16, compiled."""
    _inference(run, "int8", "Int8DynamicActivationInt8WeightConfig")


def fp8_inference(run: CaseRun) -> None:
    """Linear layers with float8 weights and inputs, compiled, against bfloat16, compiled."""
    _inference(run, "fp8", "Float8DynamicActivationFloat8WeightConfig")


def _inference(run: CaseRun, name: str, config: str) -> None:
    torchao = importlib.import_module("torchao.quantization")
    size, rows = run.pick((64, 32), (4096, 4096))
    torch.manual_seed(0)
    plain = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(size, size), nn.ReLU())))
    plain = plain.to(run.device, torch.bfloat16).eval()
    small = copy.deepcopy(plain)
    torchao.quantize_(small, getattr(torchao, config)())
    x = torch.randn(rows, size, device=run.device, dtype=torch.bfloat16)

    def compiled(model: nn.Module) -> Callable[[], Tensor]:
        call = torch.compile(model)

        def forward() -> Tensor:
            with torch.no_grad():
                out: Tensor = call(x)
                return out

        return forward

    calls = {"bf16": compiled(plain), name: compiled(small)}
    wanted, found = calls["bf16"]().float(), calls[name]().float()
    error = float((found - wanted).norm() / wanted.norm())
    run.check("outputs", error < 0.15, f"relative difference {error:.2g}")
    compare(run, calls, 0.3)
