"""What the device is, before anything is measured on it. Not a case: it is in the head of the result file."""

from __future__ import annotations

import dataclasses
from importlib import metadata
from typing import Any

import torch

from benchmarks.gpu_cases.case_run import CaseRun
from lightning_speedkit.measure import read_hardware, read_versions

__all__ = ["facts"]

_LIBRARIES = ("torchao", "triton", "numpy", "torchvision", "timm", "torch-pruning", "onnxruntime")


def facts(run: CaseRun) -> None:
    """Hardware and versions; that a product of two matrices is right, and how fast."""
    versions: dict[str, Any] = {**read_versions(), "cuda": torch.version.cuda}
    versions["cudnn"] = torch.backends.cudnn.version() if run.is_cuda else None
    for library in _LIBRARIES:
        try:
            versions[library] = metadata.version(library)
        except metadata.PackageNotFoundError:
            versions[library] = None
    run.facts = {"hardware": dataclasses.asdict(read_hardware(run.device.type)), "versions": versions}
    a = torch.arange(16.0, device=run.device).view(4, 4)
    run.check("a product of two matrices", bool((a @ torch.eye(4, device=run.device)).eq(a).all()))
    if run.is_cuda:
        free, total = torch.cuda.mem_get_info()
        run.number("free GiB", free / 2**30)
        run.number("total GiB", total / 2**30)
