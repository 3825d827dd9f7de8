"""The table of everything public that plugs into a Trainer. A new technique adds its line here, and is then held to
every rule of this folder; ``test_table.py`` fails while a public name is missing."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_speedkit import (
    AccumulationScheduler,
    ActivationCheckpointing,
    LoaderSettingsSearch,
    QuantizeOnFitEnd,
    RunRecorder,
    SpeedkitMixedPrecision,
)
from lightning_speedkit.registry import Part


@dataclass(frozen=True)
class Case:
    """One callback: a setting that does something, and one that must change nothing, bit for bit."""

    name: str
    working: Part
    neutral: Part


CALLBACKS = (
    Case(
        "AccumulationScheduler",
        working=Part(AccumulationScheduler, {"schedule": {0: 2, 2: 3}}),
        neutral=Part(AccumulationScheduler, {"schedule": 1}),
    ),
    Case(
        "ActivationCheckpointing",
        working=Part(ActivationCheckpointing, {"modules": ["Block"]}),
        neutral=Part(ActivationCheckpointing, {"modules": ["Block"]}),
    ),
    Case(
        "LoaderSettingsSearch",
        working=Part(LoaderSettingsSearch, {"seconds": 0.1, "max_workers": 1}),
        neutral=Part(LoaderSettingsSearch, {"seconds": 0.1, "max_workers": 1}),
    ),
    Case(
        "QuantizeOnFitEnd",
        working=Part(QuantizeOnFitEnd, {}),
        neutral=Part(QuantizeOnFitEnd, {}),
    ),
    Case(
        "RunRecorder",
        working=Part(RunRecorder, {}),
        neutral=Part(RunRecorder, {}),
    ),
)

STRATEGIES = ("speedkit_ddp", "speedkit_ddp_static")

PLUGINS = (Part(SpeedkitMixedPrecision, {"precision": "bf16-mixed"}),)

DATAMODULES = ("LMDBDataModule", "SpeedkitDataModule")
