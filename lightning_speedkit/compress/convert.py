"""Converts a network by the first engine that can, with its self-check, and without a Trainer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import nn

from lightning_speedkit.compress.engine import Converted, engine_named, engines_for
from lightning_speedkit.compress.float_copy import fingerprint, float_copy
from lightning_speedkit.compress.quantize_arguments import calls_from, check_float_answers, check_skip
from lightning_speedkit.compress.self_check import check_copy
from lightning_speedkit.errors import QuantizationError
from lightning_speedkit.measure.own_random_numbers import own_random_numbers

__all__ = ["convert_model"]


def convert_model(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    scheme: str = "auto",
    backend: str | None = None,
    device: str = "cpu",
    skip: Sequence[str] = (),
) -> Converted:
    """``model`` converted for inference by the first engine that can and whose result passes the self-check.

    ``model`` is not changed. Nothing is timed, and no metric is asked: that is what ``QuantizeOnFitEnd`` does.

    Args:
        model: Any module, also a LightningModule; on any device, in any floating dtype, in either mode.
        batches: Inputs to calibrate with, at least one: a tensor, a tuple or list of positional arguments, or a dict of
            keyword arguments. Some hundred samples of the training data are enough.
        scheme: One of ``SCHEMES``; ``"auto"`` takes the int8 that is fastest on ``device`` as a rule.
        backend: The name of one engine of ``ENGINES``, such as ``"onnxruntime-static"``, in the place of ``scheme``.
        device: ``"cpu"`` or ``"cuda"``: where the result is to run.
        skip: Names of modules that stay in float; ``*`` and ``?`` are wildcards.

    Returns:
        What was made: call its ``module``, and keep it by ``save(folder)``, which :func:`load_quantized` reads.

    Raises:
        QuantizationError: No engine could; the message says of each why. Or the model itself cannot be called on the
            batches, or answers with NaN. A module with lazy layers has to run once before.
        ValueError: There is no batch, or an entry of ``skip`` matches no module.

    >>> import torch
    >>> model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
    >>> made = convert_model(model, [torch.randn(4, 8)], backend="torch-ao-dynamic")
    >>> made.engine, made.quantized, tuple(made.module(torch.randn(3, 8)).shape)
    ('torch-ao-dynamic', ('0', '2'), (3, 2))
    """
    calls = calls_from(model, batches, "convert_model")
    engines = (engine_named(backend),) if backend is not None else engines_for(scheme, device)
    before, failures = fingerprint(model), []
    with own_random_numbers(device):
        floating = float_copy(model)
        skip = check_skip(floating, skip)
        check_float_answers(floating, calls)
        for engine in engines:
            if (missing := engine.missing(device)) is not None:
                failures.append(f"{engine.name}: {missing}")
                continue
            try:
                made = engine.convert(floating, calls, skip, device)
            except Exception as failure:  # the libraries behind an engine raise anything
                failures.append(f"{engine.name}: {failure}")
                continue
            checked = check_copy(floating, made.module, calls, scheme=made.scheme, layers=made.quantized, device=device)
            if fingerprint(model) != before:
                raise QuantizationError("The float model changed while it was quantized; the result is not to be used.")
            if checked.passed:
                return made
            failures.append(f"{engine.name}: {checked.message}")
    raise QuantizationError(f"{type(model).__name__} could not be quantized. {' '.join(failures)}")
