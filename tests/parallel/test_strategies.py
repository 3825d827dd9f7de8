"""The names under which the Trainer finds the strategies."""

from __future__ import annotations

import importlib
from datetime import timedelta

import pytest
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import StrategyRegistry

import lightning_speedkit.parallel
from lightning_speedkit.parallel import SpeedkitDDPStrategy, register_strategies
from lightning_speedkit.parallel.presets import PRESETS
from lightning_speedkit.parallel.strategies import STRATEGIES


@pytest.mark.parametrize("name", STRATEGIES)
def test_the_trainer_takes_the_name(name: str) -> None:
    for spelling in (name, name.upper()):
        trainer = Trainer(strategy=spelling, accelerator="cpu", devices=2, logger=False)
        assert type(trainer.strategy) is STRATEGIES[name][0]


def test_each_trainer_has_a_strategy_of_its_own() -> None:
    first, second = (Trainer(strategy="speedkit_ddp", accelerator="cpu", devices=2, logger=False) for _ in range(2))
    assert first.strategy is not second.strategy


def test_names_are_lower_case_and_ours() -> None:
    # Trainer lowers the string that it gets, so a name in mixed case could not be chosen.
    assert all(name == name.lower() and name.startswith("speedkit_") for name in STRATEGIES)


def test_to_register_again_changes_nothing() -> None:
    before = {name: dict(StrategyRegistry[name]) for name in STRATEGIES}
    register_strategies()
    assert {name: dict(StrategyRegistry[name]) for name in STRATEGIES} == before


def test_a_second_import_is_no_error() -> None:
    importlib.reload(lightning_speedkit.parallel)
    strategy = Trainer(strategy="speedkit_ddp_static", accelerator="cpu", devices=2, logger=False).strategy
    assert type(strategy) is SpeedkitDDPStrategy


def test_arguments_reach_lightning() -> None:
    strategy = SpeedkitDDPStrategy(process_group_backend="gloo", timeout_seconds=90.0, start_method="fork")
    trainer = Trainer(strategy=strategy, accelerator="cpu", devices=2, logger=False)
    assert strategy.process_group_backend == "gloo"
    assert strategy._timeout == timedelta(seconds=90)
    assert trainer.strategy.launcher is not None
    assert trainer.strategy.launcher.is_interactive_compatible  # as only that of fork is


def test_presets_name_strategies_that_exist() -> None:
    assert [preset.name for preset in PRESETS] == [
        *("ddp", "ddp-static", "ddp-fp16", "ddp-bf16", "ddp-powersgd", "sync-batchnorm"),
        *("fsdp2", "fsdp2-offload", "hsdp", "tensor-parallel-2", "pipeline", "hang-watch"),
    ]
    for preset in PRESETS:
        assert not callable(preset.patch)
        if preset.name == "hang-watch":
            assert preset.needs == ()
            continue
        if preset.name != "sync-batchnorm":
            assert preset.patch.arguments["strategy"] in STRATEGIES
        assert preset.needs == (("devices>=4",) if preset.name == "hsdp" else ("devices>=2",))
