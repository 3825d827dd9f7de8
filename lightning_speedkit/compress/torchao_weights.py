"""Quantizes the weights of layers in place by torchao, without what it says at its import."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import nn

from lightning_speedkit.errors import QuantizationError

__all__ = ["INT4_GROUP", "quantize_layers", "quiet_torchao"]

INT4_GROUP = 32


def quantize_layers(root: nn.Module, names: Sequence[str], scheme: str, device: str) -> None:
    """Quantize the weights of the layers ``names`` of ``root`` in place."""
    wanted = {id(root.get_submodule(name)) for name in names}
    with quiet_torchao():
        import torchao.quantization as tq

        config: Any
        if scheme == "weight-only-int8":
            config = tq.Int8WeightOnlyConfig()
        elif scheme == "weight-only-int4" and device == "cpu":
            granularity: Any = tq.PerGroup(INT4_GROUP)
            config = tq.IntxWeightOnlyConfig(weight_dtype=cast("Any", torch).int4, granularity=granularity)
        elif scheme == "weight-only-int4":
            config = tq.Int4WeightOnlyConfig()
        elif scheme == "fp8":
            config = tq.Float8DynamicActivationFloat8WeightConfig()
        elif scheme == "dynamic-int8":
            config = tq.Int8DynamicActivationInt8WeightConfig()
        else:
            raise QuantizationError(f"torchao has no scheme {scheme!r} here")
        tq.quantize_(root, config, filter_fn=lambda module, _: id(module) in wanted)


@contextmanager
def quiet_torchao() -> Iterator[None]:
    """torchao tells of missing GPU extensions and of deprecations at its import; not here."""
    loggers = [logging.getLogger(name) for name in ("torchao", "torch.utils._pytree")]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.CRITICAL)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
