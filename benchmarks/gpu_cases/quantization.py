"""Quantized copies for the device: all engines through the callback, and each 8-bit scheme of torchao by itself.

``TOLERANCES`` has the relative difference (norms) that each scheme may have from the float32 outputs on the device.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.gpu_cases.case_run import CaseRun
from benchmarks.gpu_cases.measuring import compare, relative_difference, tensor_bytes
from benchmarks.gpu_cases.models import Net, fit, net_and_rows, tokens, transformer
from lightning_speedkit.compress import QuantizeOnFitEnd, convert_model, load_quantized
from lightning_speedkit.compress.engine import engines_for
from lightning_speedkit.errors import QuantizationError

__all__ = ["TOLERANCES", "fp8", "int8", "on_fit_end"]

TOLERANCES = {"weight-only-int8": 0.02, "dynamic-int8": 0.06, "static-int8": 0.1, "fp8": 0.1, "weight-only-int4": 0.15}
_MIB = 2**20
_NO_FAULT = ("kept", "missing", "slower", "not smaller", "metric", "not needed")  # all else is an engine that is wrong


class _Validated(Net):
    """A module that logs its loss on rows of its own, on which the copies are judged."""

    def __init__(self, net: nn.Module, rows: Tensor) -> None:
        super().__init__(net)
        self._rows = TensorDataset(rows)
        self.trained: list[Tensor] = []

    def on_train_end(self) -> None:
        self.trained = [p.detach().cpu().clone() for p in self.net.parameters()]

    def validation_step(self, batch: Sequence[Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.net(batch[0]).float().square().mean())

    def val_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        return DataLoader(self._rows, 4)


def on_fit_end(run: CaseRun) -> None:
    """QuantizeOnFitEnd tries every engine of the device after a fit there; the float model is as without."""
    length, width = run.pick((32, 32), (256, 1024))
    draw = torch.Generator().manual_seed(4)
    rows, held = (torch.randn(count, length, width, generator=draw) for count in (40, 8))
    net = transformer(run, layers=1).cpu()
    with_it, without = _Validated(copy.deepcopy(net), held), _Validated(copy.deepcopy(net), held)
    with TemporaryDirectory() as folder:
        callback = QuantizeOnFitEnd(
            device=run.kind, objective="size", max_metric_drop=0.05, calibration_batches=2, folder=folder
        )
        fit(run, with_it, TensorDataset(rows), 4, callbacks=[callback])
        fit(run, without, TensorDataset(rows), 4)
        pairs = zip(with_it.net.parameters(), with_it.trained, strict=True)
        run.check("the float weights are those of the training", all(a.detach().cpu().equal(b) for a, b in pairs))
        found, wanted = torch.stack(with_it.losses).cpu(), torch.stack(without.losses).cpu()
        run.check("losses of a fit without", bool(torch.allclose(found, wanted, rtol=1e-4)), f"{found}, {wanted}")
        _told(run, callback)
        if callback.quantized_model is not None:
            _same_outputs(run, callback, with_it, held[:4], Path(folder))


def _told(run: CaseRun, callback: QuantizeOnFitEnd) -> None:
    report = callback.report
    run.check("a copy is kept", report is not None and report.kept, "" if report is None else report.reason)
    if report is None:
        return
    for name, value, factor in (
        ("float32 ms", report.seconds_before_batch, 1e3),
        ("float32 one ms", report.seconds_before_one, 1e3),
        ("float32 MiB", report.bytes_before, 1 / _MIB),
    ):
        if value is not None:
            run.number(name, value * factor)
    for each in report.candidates:
        if each.seconds_batch and report.seconds_before_batch:
            run.number(f"{each.backend} ms", each.seconds_batch * 1e3)
            run.number(f"{each.backend} x", report.seconds_before_batch / each.seconds_batch)
        if each.seconds_one:
            run.number(f"{each.backend} one ms", each.seconds_one * 1e3)
        if each.bytes:
            run.number(f"{each.backend} MiB", each.bytes / _MIB)
        # products of 8 bits overflow on some CPUs, of which the report tells
        fine = each.outcome in _NO_FAULT or (each.outcome == "saturation" and not run.is_cuda)
        run.check(f"{each.backend}: it works, or says what it lacks", fine, f"{each.outcome}: {each.reason}")
        run.note(f"{each.backend}: {each.outcome}, {each.reason}")


def _same_outputs(run: CaseRun, callback: QuantizeOnFitEnd, module: Net, x: Tensor, folder: Path) -> None:
    """The copy that was kept, and the one that comes back from its folder, against the float network."""
    quantized, report = callback.quantized_model, callback.report
    assert quantized is not None
    assert report is not None
    x = x.to(run.device)
    with torch.no_grad():
        wanted = module.net.to(run.device).eval()(x)
        found = quantized.get_submodule("net")(x)
        error, most = relative_difference(found, wanted), TOLERANCES[report.scheme]
        run.check("outputs of the copy", error <= most, f"{report.scheme}: relative difference {error:.2g} of {most:g}")
        again = load_quantized(folder, _Validated(copy.deepcopy(module.net).cpu(), x.cpu())).to(run.device)
        error = relative_difference(again.get_submodule("net")(x), found)
        run.check("outputs of the copy from its folder", error <= 0.01, f"relative difference {error:.2g}")


def int8(run: CaseRun) -> None:
    """convert_model with int8 weights, and with int8 weights and inputs, against float32 and compiled bfloat16."""
    _converted(run, ("weight-only-int8", "dynamic-int8"))
    _single_rows(run)


def fp8(run: CaseRun) -> None:
    """convert_model with float8 weights and inputs, against float32 and compiled bfloat16."""
    _converted(run, ("fp8",))


def _converted(run: CaseRun, schemes: Sequence[str]) -> None:
    few, x = tokens(run, rows=2, length=256), tokens(run, rows=8)
    net = transformer(run, layers=2).eval()
    made = {}
    for scheme in schemes:
        lacking = [engine.missing(run.kind) for engine in engines_for(scheme, run.kind)]
        if all(lacking):
            _refused(run, scheme, net, few, "; ".join(filter(None, lacking)))
            continue
        made[scheme] = convert_model(net, [few], scheme=scheme, device=run.kind)
        run.number(f"{scheme} MiB", made[scheme].bytes / _MIB)
        run.note(f"{scheme} by {made[scheme].engine}: {len(made[scheme].quantized)} layers quantized")
        before = tensor_bytes(net)
        run.check(f"{scheme}: smaller", made[scheme].bytes < before, f"{made[scheme].bytes} of {before} bytes")
    if not made:
        return
    torch.compiler.reset()  # else the larger batch is compiled for batches of any size, which is slower
    plain = copy.deepcopy(net).bfloat16()
    half, compiled = x.bfloat16(), torch.compile(plain, backend=run.pick("eager", "inductor"))
    calls = {"float32": _forward(net, x), "bf16 compiled": _forward(compiled, half)}
    calls |= {scheme: _forward(each.module, x) for scheme, each in made.items()}
    run.number("float32 MiB", tensor_bytes(net) / _MIB)
    run.number("bf16 MiB", tensor_bytes(plain) / _MIB)
    wanted = calls["float32"]()
    for scheme in made:
        error, most = relative_difference(calls[scheme](), wanted), TOLERANCES[scheme]
        run.check(f"{scheme}: outputs", error <= most, f"relative difference {error:.2g} of {most:g}")
    seconds = compare(run, calls, 0.3)
    for scheme in made:
        run.number(f"{scheme} against bf16 x", seconds["bf16 compiled"] / seconds[scheme])


def _forward(model: Callable[[Tensor], Tensor], x: Tensor) -> Callable[[], Tensor]:
    def forward() -> Tensor:
        with torch.no_grad():
            return model(x)

    return forward


def _refused(run: CaseRun, scheme: str, net: nn.Module, x: Tensor, lacking: str) -> None:
    run.note(f"{scheme} cannot run here: {lacking}")
    try:
        convert_model(net, [x], scheme=scheme, device=run.kind)
        told = "it was converted"
    except QuantizationError as error:
        told = str(error)
    run.check(f"{scheme}: refused, and the reason is said", lacking in told, told[:300])


def _single_rows(run: CaseRun) -> None:
    """One row of numbers, for which kernels of 8-bit products are too large: a right answer or a refusal."""
    net, data = net_and_rows(run, steps=8, tiny=64)
    x = torch.stack([data[index][0] for index in range(64)])
    try:
        made = convert_model(net, [x], scheme="dynamic-int8", device=run.kind)
    except QuantizationError as error:
        run.note(f"dynamic-int8 of single rows is refused: {str(error)[:300]}")
        return
    with torch.no_grad():
        wanted, found = net.eval()(x[:1]), made.module(x[:1].to(run.device))
    error = relative_difference(found, wanted)
    run.check("dynamic-int8: one row", error <= TOLERANCES["dynamic-int8"], f"relative difference {error:.2g}")
