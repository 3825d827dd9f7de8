"""The table names every public callback, strategy, plugin and DataModule, and nothing that is not public."""

from __future__ import annotations

import inspect

from lightning.pytorch import Callback, LightningDataModule
from lightning.pytorch.plugins import Precision
from lightning.pytorch.strategies import Strategy, StrategyRegistry

import lightning_speedkit
from tests.conformance.cases import CALLBACKS, DATAMODULES, PLUGINS, STRATEGIES


def _public(kind: type) -> set[str]:
    objects = {name: getattr(lightning_speedkit, name) for name in lightning_speedkit.__all__}
    return {name for name, value in objects.items() if inspect.isclass(value) and issubclass(value, kind)}


def test_every_public_callback_has_its_line() -> None:
    assert {case.name for case in CALLBACKS} == _public(Callback)
    assert all(case.working.cls.__name__ == case.neutral.cls.__name__ == case.name for case in CALLBACKS)


def test_every_public_plugin_and_datamodule_has_its_line() -> None:
    assert {part.cls.__name__ for part in PLUGINS} == _public(Precision)
    assert set(DATAMODULES) == _public(LightningDataModule)


def test_every_registered_strategy_name_has_its_line() -> None:
    registered = {name for name in StrategyRegistry.available_strategies() if name.startswith("speedkit")}
    assert set(STRATEGIES) == registered
    assert _public(Strategy) == {"ModelParallelPlan", "PipelineStrategy", "SpeedkitDDPStrategy"}


def test_every_hook_that_a_callback_defines_exists() -> None:
    hooks = {name for name in dir(Callback) if not name.startswith("_")}
    for case in CALLBACKS:
        defined = {n for cls in case.working.cls.__mro__[:-1] for n in vars(cls) if n.startswith("on_")}
        assert defined <= hooks, f"{case.name} defines hooks that Lightning never calls: {defined - hooks}"
