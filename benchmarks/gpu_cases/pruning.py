"""Zeros that sparse tensor cores skip, and channels that are really gone: right, and what they gain on the device.

What is pruned is compared with the dense network with the same zeros: 1e-2 apart at most in 16 bits, 1e-4 in float32
(norms).
"""

from __future__ import annotations

import copy
from tempfile import TemporaryDirectory

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from benchmarks.gpu_cases.case_run import CaseRun
from benchmarks.gpu_cases.measuring import compare, relative_difference, tensor_bytes
from benchmarks.gpu_cases.models import Net, ResNet, fit, images
from lightning_speedkit.compress import Pruning, StructuredPruning, prune_weights, shrink_model, to_semi_structured
from lightning_speedkit.compress.prune_semi_structured import runs_semi_structured

__all__ = ["channels", "two_of_four", "two_of_four_fit"]

_MIB = 2**20


def _layers(run: CaseRun) -> tuple[nn.Sequential, int]:
    """A seeded MLP on the device, and its width."""
    torch.manual_seed(0)
    width = run.pick(64, 2048)
    return nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)).to(run.device), width


def two_of_four(run: CaseRun) -> None:
    """prune_weights to 2:4 and to_semi_structured, in both types of 16 bits."""
    able = runs_semi_structured(run.device)
    for name, dtype in (("fp16", torch.float16), ("bf16", torch.bfloat16)):
        dense, width = _layers(run)
        dense = dense.to(dtype).eval()
        masks = prune_weights(dense, 0.5, pattern="2:4")
        run.check(f"{name}: half of the weights", masks.sparsity() == 0.5, f"{masks.sparsity()}")
        sparse = copy.deepcopy(dense)
        _accelerated(run, name, dense, sparse, to_semi_structured(sparse), able)
        x = torch.randn(run.pick(32, 8192), width, generator=torch.Generator().manual_seed(1)).to(run.device, dtype)
        _compared(run, name, dense, sparse, x, 0.3)


def _accelerated(
    run: CaseRun, name: str, dense: nn.Module, sparse: nn.Module, told: dict[str, str], able: bool
) -> None:
    done = [word == "converted" for word in told.values()]
    if able:
        run.check(f"{name}: all layers are converted", all(done), str(told))
        fewer, all_of_them = tensor_bytes(sparse), tensor_bytes(dense)
        run.check(f"{name}: smaller", fewer < all_of_them, f"{fewer} of {all_of_them} bytes")
    else:
        said = all("no sparse tensor cores" in word for word in told.values())
        run.check(f"{name}: left as they are, and the reason is said", said and not any(done), str(told))
        run.note(f"{name}: {next(iter(told.values()))}")


def _compared(run: CaseRun, name: str, dense: nn.Module, sparse: nn.Module, x: Tensor, share: float) -> None:
    with torch.no_grad():
        error = relative_difference(sparse(x), dense(x))
        run.check(f"{name}: outputs", error <= 1e-2, f"relative difference {error:.2g}")
        run.number(f"{name} dense MiB", tensor_bytes(dense) / _MIB)
        run.number(f"{name} 2:4 MiB", tensor_bytes(sparse) / _MIB)
        compare(run, {f"{name} dense": lambda: dense(x), f"{name} 2:4": lambda: sparse(x)}, share)


def two_of_four_fit(run: CaseRun) -> None:
    """Pruning in a fit in bfloat16: the sparsity, and the copy for sparse tensor cores that it makes at the end."""
    net, width = _layers(run)
    module, callback = Net(net.cpu()), Pruning(pattern="2:4", start=0, end=0.5)
    draw = torch.Generator().manual_seed(2)
    data = TensorDataset(torch.randn(10 * run.pick(8, 512), width, generator=draw).bfloat16())
    fit(run, module, data, run.pick(8, 512), precision="bf16-true", callbacks=[callback])
    weights = [layer.weight for layer in module.net if isinstance(layer, nn.Linear)]
    fours = torch.cat([(weight == 0).view(-1, 4).sum(1).cpu() for weight in weights])
    run.check("two of each four are zero", bool((fours == 2).all()), f"{int((fours != 2).sum())} are not")
    run.check("losses are finite", bool(torch.stack(module.losses).isfinite().all()))
    made, able = callback.accelerated_model, runs_semi_structured(run.device)
    run.check("a copy for sparse tensor cores where there are any", (made is not None) == able, f"there are: {able}")
    dense = copy.deepcopy(module.net).to(run.device, torch.bfloat16).eval().requires_grad_(False)
    if made is None:
        run.note("no sparse tensor cores here, so there is no accelerated copy")
        made = copy.deepcopy(module).to(run.device, torch.bfloat16).eval()
    x = torch.randn(run.pick(32, 8192), width, generator=draw).to(run.device, torch.bfloat16)
    _compared(run, "bf16", dense, made.get_submodule("net"), x, 0.5)


def channels(run: CaseRun) -> None:
    """Half of the channels of a ResNet: shrink_model finds those that are zero, StructuredPruning trains on."""
    _without_dead_channels(run)
    size, classes = run.pick((32, 10), (96, 1000))
    before = _resnet(run)
    module = Net(copy.deepcopy(before).cpu())
    draw = torch.Generator().manual_seed(3)
    data = TensorDataset(torch.randn(24, 3, size, size, generator=draw))
    with TemporaryDirectory() as folder:
        callback = StructuredPruning(ratio=0.5, start_epoch=1, round_to=run.pick(1, 8), folder=folder)
        fit(run, module, data, 8, max_epochs=2, callbacks=[callback])
    losses, report = torch.stack(module.losses), callback.report
    run.check("six steps with finite losses", len(losses) == 6 and bool(losses.isfinite().all()), str(losses.tolist()))
    run.check("a step of pruning was done", report is not None and report.steps_done == 1, str(report)[:300])
    if report is not None:
        run.note(report.describe())
    after = module.net.to(run.device).eval()
    counts = [sum(p.numel() for p in net.parameters()) for net in (before, after)]
    run.check("it has less than 0.4 of the weights", counts[1] < 0.4 * counts[0], f"{counts[1]} of {counts[0]}")
    run.number("before MiB", tensor_bytes(before) / _MIB)
    run.number("after MiB", tensor_bytes(after) / _MIB)
    x = images(run)[0]
    before.eval()
    with torch.no_grad():
        wanted = (len(x), classes)
        run.check("the shape of the outputs", tuple(after(x).shape) == wanted, str(wanted))
        compare(run, {"before": lambda: before(x), "after": lambda: after(x)}, 0.4)
        one = x[:1]
        compare(run, {"before, one": lambda: before(one), "after, one": lambda: after(one)}, 0.2)


def _resnet(run: CaseRun) -> ResNet:
    """As wide as a ResNet-50, with a block for each of its stages: what is removed is checked on the CPU."""
    torch.manual_seed(0)
    return ResNet(*run.pick(((1, 1), 8, 10), ((1, 1, 1, 1), 64, 1000))).to(run.device)


def _without_dead_channels(run: CaseRun) -> None:
    """A ResNet whose odd channels are zero everywhere computes the same without them."""
    net = _resnet(run).eval()
    for layer in net.modules():
        if isinstance(layer, (nn.Conv2d, nn.BatchNorm2d)):
            for parameter in layer.parameters():
                parameter.data[1::2] = 0.0
    x = images(run, 32)[0]
    with torch.no_grad():
        wanted = net(x)
        again = relative_difference(net(x), wanted)
    plan = shrink_model(net, x[:2, :, :96, :96], 0.5)
    halved = sum(after * 2 == before for before, after in plan.layers.values())
    run.check("layers are halved", halved == len(plan.layers) > 0, f"{halved} of {len(plan.layers)}; {plan.skipped}")
    run.check("the weights are on the device", all(p.device.type == run.kind for p in net.parameters()))
    with torch.no_grad():
        error = relative_difference(net(x), wanted)
    most = max(1e-4, 4 * again)
    run.check("outputs without the zero channels", error <= most, f"relative difference {error:.2g} of {most:.2g}")
