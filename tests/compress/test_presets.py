"""The presets of this area."""

from __future__ import annotations

import pytest
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn

from lightning_speedkit.compress.presets import PRESETS
from lightning_speedkit.presets.catalogue import REGISTRY
from lightning_speedkit.registry import Preset
from tests.compress.models import Digits, digit_loader, quiet_trainer


def _blocks() -> nn.Module:
    blocks = (nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(2))
    return nn.Sequential(nn.Flatten(), nn.Sequential(*blocks), nn.Linear(64, 10))


def test_these_are_the_presets() -> None:
    assert [preset.name for preset in PRESETS] == [
        *("quantize-int8", "quantize-aware", "prune", "prune-2-4", "prune-channels"),
    ]
    assert {preset.kind for preset in PRESETS} == {"compress"}


@pytest.mark.parametrize("preset", PRESETS, ids=lambda preset: preset.name)
def test_preset_builds_a_new_callback_each_time(preset: Preset) -> None:
    (part,) = preset.patch.callbacks  # type: ignore[union-attr]
    assert part.build() is not part.build()


@pytest.mark.parametrize(
    ("preset", "other"),
    [pytest.param(preset, other, id=f"{preset.name} {other}") for preset in PRESETS for other in preset.not_beside],
)
def test_what_is_not_taken_beside_it_is_what_the_callbacks_refuse(preset: Preset, other: str) -> None:
    pytest.importorskip("torch_pruning")
    parts = (*preset.patch.callbacks, *REGISTRY.get(other).patch.callbacks)  # type: ignore[union-attr]
    callbacks = [part.build() for part in parts]
    with pytest.raises(MisconfigurationException):
        quiet_trainer(callbacks=callbacks, max_epochs=2).fit(
            Digits(_blocks()), digit_loader(0, 128), digit_loader(1024, 1088)
        )


def test_beside_the_rest_it_runs() -> None:
    pytest.importorskip("torch_pruning")
    cuts = next(preset for preset in PRESETS if preset.not_beside)
    beside = ("clip-norm", "accumulate-4", "checkpoint-activations", "quantize-int8", "adamw", "warmup-cosine")
    for other in beside:
        assert other not in cuts.not_beside
        parts = (*cuts.patch.callbacks, *REGISTRY.get(other).patch.callbacks)  # type: ignore[union-attr]
        trainer = quiet_trainer(callbacks=[part.build() for part in parts], max_epochs=3)
        trainer.fit(Digits(_blocks()), digit_loader(0, 128), digit_loader(1024, 1088))
        assert trainer.state.finished
