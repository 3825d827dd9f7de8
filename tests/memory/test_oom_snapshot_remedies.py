"""Which presets are named for what fills the memory; that they exist is asked of the registry."""

from __future__ import annotations

import itertools

import pytest

from lightning_speedkit.memory.oom_snapshot_parts import MemoryParts
from lightning_speedkit.memory.oom_snapshot_remedies import suggest_remedies
from lightning_speedkit.presets.catalogue import REGISTRY


def _parts(weights: int = 1, state: int = 0, activations: int = 0, fragmentation: int | None = None) -> MemoryParts:
    return MemoryParts(
        device="cuda:0",
        parameters=weights,
        gradients=weights,
        optimizer_state=state,
        buffers=0,
        activations=activations,
        fragmentation=fragmentation,
    )


@pytest.mark.parametrize(
    ("parts", "options", "first"),
    [
        (_parts(weights=10, state=20, activations=5), {}, "adamw-8bit"),
        (_parts(weights=10, state=20, activations=5), {"has_torchao": False}, "adafactor"),
        (_parts(weights=10, state=20, activations=5), {"on_host": True}, "adafactor"),
        (_parts(weights=1, state=2, activations=50), {}, "bf16-mixed"),
        (_parts(weights=1, state=2, activations=50), {"precision": "bf16-mixed"}, "checkpoint-activations"),
        (_parts(weights=1, state=2, activations=50), {"has_tensor_cores": False}, "checkpoint-activations"),
        (_parts(weights=10, state=0, activations=1), {}, "bf16-true"),
    ],
)
def test_the_first_remedy_is_for_the_largest_part(parts: MemoryParts, options: dict[str, bool], first: str) -> None:
    assert suggest_remedies(parts, **options)[0].preset == first  # type: ignore[arg-type]


def test_fragmentation_goes_before_all_else() -> None:
    remedies = suggest_remedies(_parts(weights=1, activations=5, fragmentation=7))
    assert remedies[0].preset == ""
    assert "expandable_segments" in remedies[0].why
    assert all("expandable" not in one.why for one in suggest_remedies(_parts(1, 0, 50, fragmentation=7)))


def test_validation_is_not_told_of_what_works_in_training_only() -> None:
    remedies = suggest_remedies(_parts(weights=1, activations=50), training=False)
    assert [one.preset for one in remedies] == ["", "bf16-mixed"]
    assert "batch_size" in remedies[0].why


def test_every_preset_that_is_ever_named_exists() -> None:
    shapes = itertools.product((1, 10), (0, 20), (0, 5, 50), (None, 100))
    flags = itertools.product((True, False), repeat=4)
    named = set()
    for shape, (training, cores, torchao, host) in itertools.product(shapes, flags):
        for one in suggest_remedies(
            _parts(*shape), training=training, has_tensor_cores=cores, has_torchao=torchao, on_host=host
        ):
            named.add(one.preset)
            assert one.why
    named.discard("")
    assert {"adamw-8bit", "checkpoint-activations", "auto-micro-batch", "bf16-mixed"} <= named
    assert named <= set(REGISTRY.names())
