"""A run with spikes equals the run without those batches, or the run from the snapshot on."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelPruning
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn

from lightning_speedkit.errors import DivergenceError
from lightning_speedkit.optimize import non_finite_guard
from lightning_speedkit.optimize.accumulate import AccumulationScheduler
from lightning_speedkit.optimize.non_finite_guard import NonFiniteGuard
from lightning_speedkit.optimize.spike_guard import SpikeGuard, is_spike
from tests.optimize.line import Line, loader, trainer

NAN = float("nan")


@pytest.mark.parametrize(
    ("loss", "recent", "arguments", "expected"),
    [
        (2.99, [1.0, 1.0], {}, False),
        (3.0, [1.0, 1.0], {}, True),
        (3.5, [1.0, 1.0, 4.0], {}, False),  # better than the last one, and less than 3 times the mean of 2
        (5.0, [1.0, 1.0, 6.0], {"threshold": 0.5}, False),  # better than the last one
        (3.0, [1.0, 1.0], {"threshold": 3.0}, False),
        (0.9, [0.1, 0.1], {"margin": 1.0}, False),
        (1.2, [0.1, 0.1], {"margin": 1.0}, True),
        (-0.5, [-1.0, -1.0], {}, False),
        (1.0, [-1.0, -1.0], {}, True),
        (-5.0, [1.0, 1.0], {}, False),
        (1e9, [], {}, False),
        (math.inf, [], {}, True),
        (-math.inf, [1.0], {}, True),
        (NAN, [1.0], {}, True),
    ],
)
def test_what_is_a_spike(loss: float, recent: list[float], arguments: dict[str, float], expected: bool) -> None:
    assert is_spike(loss, recent, **arguments) is expected


class _Net(Line):
    """The loss is multiplied by what the first number of the batch says; so is the gradient."""

    def __init__(self, decay: float = 1.0) -> None:
        super().__init__(dtype=torch.float32)
        torch.manual_seed(2)
        self.net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
        self.w.requires_grad_(False)  # DDP wants to have every weight used
        self.decay = decay
        self.counted: list[int] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return (self.net(batch[:, 1:]).square().mean() * 0.1 + 1.0) * batch[0, 0]

    def on_train_batch_end(self, *_: Any) -> None:
        self.counted.append(self.trainer.global_step)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.05)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, self.decay)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def batches(count: int = 24, spikes: dict[int, float] | None = None) -> list[Tensor]:
    data = torch.randn(count, 5, 4, generator=torch.Generator().manual_seed(4))
    data[:, 0, 0] = 1.0
    for place, factor in (spikes or {}).items():
        data[place, 0, 0] = factor
    return list(data)


def without(data: list[Tensor], *places: int) -> list[Tensor]:
    return [batch for place, batch in enumerate(data) if place not in places]


def fit(data: list[Tensor], *callbacks: Callback, model: Any = None, **options: Any) -> _Net:
    model = model or _Net()
    trainer(*callbacks, **options).fit(model, loader(data))
    return model


def _assert_equal(one: nn.Module, other: nn.Module) -> None:
    torch.testing.assert_close(one.state_dict(), other.state_dict(), rtol=0, atol=0)


def test_a_skipped_spike_leaves_no_trace() -> None:
    guard, spikes = SpikeGuard(window=5), {3: NAN, 8: 100.0, 9: 50.0, 15: float("inf")}
    with pytest.warns(UserWarning, match="A spike in epoch 0: a loss of nan") as told:
        found = fit(batches(spikes=spikes), guard, model=_Net(0.9))
    assert len([w for w in told if "spike" in str(w.message)]) == 1
    _assert_equal(found, fit(without(batches(), *spikes), model=_Net(0.9)))
    assert guard.spikes == 4
    assert found.counted[-1] == 20


def test_before_the_window_is_full_only_what_is_not_finite_is_a_spike() -> None:
    guard = SpikeGuard(window=10)
    fit(batches(spikes={4: 100.0}), guard)
    assert guard.spikes == 0


@pytest.mark.parametrize("action", ["skip", "rollback"])
def test_a_clean_run_is_unchanged_to_the_bit(action: str) -> None:
    _assert_equal(fit(batches(), SpikeGuard(action, window=3)), fit(batches()))


@pytest.mark.parametrize("on_disk", [False, True])
@pytest.mark.parametrize("other", [None, NonFiniteGuard()])
def test_a_rollback_goes_on_from_the_snapshot(on_disk: bool, other: Callback | None, tmp_path: Path) -> None:
    """Snapshots before steps 0, 4, 8 and 12. The spike is batch 14, so steps 8 to 13 are taken back; then batch 15 is
    a spike too, and batches 16 to 23 are learnt from."""
    folder = str(tmp_path / "snapshots") if on_disk else None
    guard = SpikeGuard("rollback", window=5, snapshot_every=4, snapshot_folder=folder)
    callbacks = [guard] if other is None else [other, guard]
    with pytest.warns(UserWarning, match="the weights of 6 steps ago are restored"):
        found = fit(batches(spikes={14: 100.0, 15: NAN}), *callbacks)
    _assert_equal(found, fit(without(batches(), *range(8, 16))))
    assert found.counted[-1] == 22  # steps that were taken back were steps; the two spikes were none
    assert list(tmp_path.rglob("*.pt")) == []


def test_the_loss_of_a_window_is_the_mean_of_its_micro_batches() -> None:
    """A micro-batch of 6 in a window of 2 is a mean of 3.5 and a spike; one of 4 is 2.5 and none."""
    guard = SpikeGuard(window=3)
    found = fit(batches(23, {9: 6.0, 13: 4.0, 22: 9.0}), guard, AccumulationScheduler(2))
    assert guard.spikes == 2  # the last window is short
    plain = fit(without(batches(23, {13: 4.0}), 8, 9, 22), AccumulationScheduler(2))
    _assert_equal(found, plain)


@pytest.mark.parametrize(
    ("accumulation", "options", "sizes"),
    [
        (None, {"accumulate_grad_batches": 3}, [3, 3, 3, 3]),
        (AccumulationScheduler(3), {}, [3, 3, 3, 3]),
        (AccumulationScheduler({0: 1, 2: 4, 4: 2}, unit="step"), {}, [1, 1, 4, 4, 2]),
        (AccumulationScheduler(target_batch=5), {}, [3, 2, 3, 2, 2]),  # of 2, 2, 2, 3, 2, 2, 2, 2, 3, 2, 2, 2 samples
    ],
)
def test_the_mean_is_right_whatever_the_loss_is_divided_by(accumulation: Any, options: Any, sizes: list[int]) -> None:
    """With a learning rate of 0 the loss of a micro-batch is the mean of its numbers, about 1: nothing is a spike."""
    data = [torch.ones(3 if place in (3, 8) else 2) + place / 100 for place in range(12)]
    guard = SpikeGuard(threshold=0.5, window=2, max_in_a_row=1)
    run = trainer(guard, *([] if accumulation is None else [accumulation]), **options)
    run.fit(Line(lr=0.0, dtype=torch.float32), loader(data))
    assert guard.spikes == 0
    starts = [sum(sizes[:place]) for place in range(len(sizes))]
    means = [1 + sum(range(start, start + size)) / size / 100 for start, size in zip(starts, sizes, strict=True)]
    assert guard.state_dict()["recent"] == pytest.approx(means[-2:], rel=1e-6)


class _Fused(_Net):
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.05, fused=True)


def _fp16() -> MixedPrecision:
    return MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=4))


@pytest.mark.parametrize("model", [_Net, _Fused])
@pytest.mark.parametrize("others", [[], [NonFiniteGuard()]])
def test_under_fp16_the_loss_is_unscaled_and_the_scaler_goes_on(model: type[_Net], others: list[Callback]) -> None:
    guard, net = SpikeGuard(window=5), model()
    fit(batches(spikes={12: 100.0}), guard, *others, model=net, plugins=[_fp16()])
    assert guard.spikes == 1
    assert net.counted[-1] == 23
    assert all(1.0 <= loss < 3.0 for loss in guard.state_dict()["recent"])


@pytest.mark.parametrize("fused_late", [False, True])
@pytest.mark.parametrize("action", ["skip", "rollback"])
def test_two_guards_count_a_step_that_both_skip_once(
    action: str, fused_late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On CUDA the other guard learns of it a step later, when this one has undone it."""
    if fused_late:
        monkeypatch.setattr(non_finite_guard, "is_read_freely", lambda flag: False)
    guard, other = SpikeGuard(action, window=5, snapshot_every=4 if action == "rollback" else None), NonFiniteGuard()
    net = _Fused() if fused_late else _Net()
    found = fit(batches(spikes={14: NAN}), other, guard, model=net)
    gone = [14] if action == "skip" else range(8, 15)
    _assert_equal(found, fit(without(batches(), *gone), model=type(net)()))
    assert found.counted[-1] == found.trainer.global_step == 23
    assert (other.skipped_steps, guard.spikes) == (1, 1)


def test_a_rollback_beside_pruning_is_refused() -> None:
    with pytest.raises(MisconfigurationException, match="ModelPruning, which renames parameters"):
        fit(batches(), SpikeGuard("rollback"), ModelPruning("l1_unstructured"))


def test_too_many_in_a_row_are_an_error() -> None:
    spikes = dict.fromkeys(range(10, 14), 100.0)
    fit(batches(spikes=spikes), SpikeGuard(window=5, max_in_a_row=4))
    with pytest.raises(DivergenceError, match="4 optimizer steps in a row had a loss that spikes"):
        fit(batches(spikes=spikes), SpikeGuard(window=5, max_in_a_row=3))


def test_its_state_and_what_is_logged() -> None:
    class Reads(Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            self.seen = trainer.callback_metrics.get("loss_spikes")

    guard, reads = SpikeGuard(window=4), Reads()
    fit(batches(spikes={8: 100.0, 23: 100.0}), guard, reads, log_every_n_steps=1)
    assert float(reads.seen) == 2.0
    fresh = SpikeGuard(window=4)
    fresh.load_state_dict(guard.state_dict())
    assert fresh.state_dict() == guard.state_dict()
    assert guard.state_dict()["in_a_row"] == 1
    assert len(guard.state_dict()["recent"]) == 4


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"action": "stop"}, ValueError, "action='stop' is unknown"),
        ({"snapshot_every": 5}, ValueError, "have no effect here"),
        ({"snapshot_folder": "x"}, ValueError, "have no effect here"),
        ({"threshold": -1.0}, ValueError, r"threshold=-1\.0 must be 0 or more"),
        ({"threshold": "2"}, TypeError, "got str"),
        ({"margin": NAN}, ValueError, "margin=nan"),
        ({"threshold": math.inf}, ValueError, "threshold=inf"),
        ({"window": 0}, ValueError, "window=0"),
        ({"action": "rollback", "snapshot_every": 1.5}, TypeError, r"snapshot_every=1\.5"),
    ],
)
def test_arguments_that_cannot_be_are_told(arguments: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        SpikeGuard(**arguments)
