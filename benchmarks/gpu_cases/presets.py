"""Every preset by name in a Trainer on the device, and the switches that callbacks set and put back."""

from __future__ import annotations

import copy
import time
import warnings
from tempfile import TemporaryDirectory

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.gpu_cases.case_run import CaseRun
from benchmarks.gpu_cases.models import Bottleneck, Net, fit, transformer
from lightning_speedkit import presets
from lightning_speedkit.errors import SpeedkitError
from lightning_speedkit.memory import ActivationCheckpointing
from lightning_speedkit.precision.channels_last import ChannelsLast
from lightning_speedkit.precision.matmul import MatmulPrecision

__all__ = ["callbacks", "every_preset"]

_LATER = ("compile", "fp8", "largest", "fastest", "ddp", "multi")  # last: they take long, or have a case of their own
_SMALLER = "prune-channels"


def every_preset(run: CaseRun) -> None:
    """A short fit under each preset that this machine and this module can have, and losses that are finite."""
    names = [name for name in presets.names() if name != "cpu"]
    if run.tiny:  # one of each kind
        names = [*{presets.get(name).kind: name for name in names if not name.startswith(_LATER)}.values(), _SMALLER]
        names = list(dict.fromkeys(names))
    end = time.perf_counter() + max(run.budget_seconds, 5.0)
    refused, tried, left = [], 0, []
    net = transformer(run, layers=2).cpu()
    data = TensorDataset(torch.randn(12, *run.pick((16, 32), (128, 1024)), generator=torch.Generator().manual_seed(3)))
    for name in sorted(names, key=lambda name: name.startswith(_LATER)):
        if time.perf_counter() > end:
            left.append(name)
            continue
        module = Net(copy.deepcopy(net))
        try:
            arguments = presets.trainer_kwargs(name, accelerator=run.device.type, devices=1)
            tried += 1
            with warnings.catch_warnings(), TemporaryDirectory() as folder:
                warnings.simplefilter("ignore")
                loader = DataLoader(data, 2)
                short = {"max_epochs": 2, "limit_train_batches": 2}  # some presets begin with the second epoch
                fit(run, module, loader, default_root_dir=folder, **{**short, **arguments})
            finite = bool(torch.stack(module.losses).isfinite().all())
            run.check(name, finite, "" if finite else "a loss is not finite")
            if name == _SMALLER:
                counts = [sum(p.numel() for p in each.parameters()) for each in (module.net, net)]
                run.check(f"{name}: fewer weights", counts[0] < counts[1], f"{counts[0]} of {counts[1]}")
        except (SpeedkitError, MisconfigurationException, ValueError) as error:  # what it needs is not here
            refused.append(f"{name} ({type(error).__name__})")
        except Exception as error:  # the others are tried
            run.check(name, False, f"{type(error).__name__}: {str(error)[:300]}")
    run.number("presets tried", tried)
    run.note(f"refused here: {', '.join(refused) or 'none'}; no time for: {', '.join(left) or 'none'}")


def callbacks(run: CaseRun) -> None:
    """Switches, layouts and classes are as before after a fit, in which they were set; the losses are as without."""
    torch.manual_seed(0)
    width, side = run.pick(8, 64), run.pick(8, 56)
    net = nn.Sequential(*(Bottleneck(4 * width, width, 1) for _ in range(3)))
    data = TensorDataset(torch.randn(8, 4 * width, side, side, generator=torch.Generator().manual_seed(3)))
    plain = Net(copy.deepcopy(net))
    fit(run, plain, data, 4)
    for name, callback in {
        "MatmulPrecision": MatmulPrecision("high", convolutions="tf32", autotune=True),
        "ChannelsLast": ChannelsLast(),
        "ActivationCheckpointing": ActivationCheckpointing("Bottleneck"),
        "ActivationCheckpointing with a budget": ActivationCheckpointing("Bottleneck", budget=0.9),
    }.items():
        module = Net(copy.deepcopy(net))
        before = _settings(module)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            fit(run, module, data, 4, callbacks=[callback])
        run.check(f"{name}: all as before", _settings(module) == before)
        losses, wanted = torch.stack(module.losses), torch.stack(plain.losses)
        apart = float(((losses - wanted) / wanted).abs().max())
        run.check(f"{name}: losses", apart < 1e-2, f"relative difference {apart:.2g}")
        run.number(f"{name} apart", apart)


def _settings(module: nn.Module) -> list[object]:
    cuda, cudnn = torch.backends.cuda, torch.backends.cudnn
    switches = [torch.get_float32_matmul_precision(), cuda.matmul.allow_tf32, cudnn.allow_tf32, cudnn.benchmark]
    return [*switches, *(type(each) for each in module.modules()), *(p.stride() for p in module.parameters())]
