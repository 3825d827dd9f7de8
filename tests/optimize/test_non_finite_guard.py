"""A run with bad batches equals the run without them; under fp16 the scaler's skips are not counted as steps either."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers.logger import DummyLogger
from torch import Tensor, nn

from lightning_speedkit.optimize.accumulate import AccumulationScheduler
from lightning_speedkit.optimize.clip import GradientClipping
from lightning_speedkit.optimize.non_finite_guard import NonFiniteGuard
from tests.optimize.line import Line, loader, trainer

NAN, INF = float("nan"), float("inf")
OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1),
    "fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    "fused-sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
}


class Net(Line):
    """A net with BatchNorm; the learning rate halves with every step."""

    def __init__(self, optimizer: str = "adamw", decay: float = 0.5) -> None:
        super().__init__(dtype=torch.float32)
        torch.manual_seed(2)
        self.net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
        self.name, self.decay = optimizer, decay
        self.rates: list[float] = []
        self.counted: list[int] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.net(batch).square().mean() * self.w

    def on_train_batch_end(self, *_: Any) -> None:
        self.rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])
        self.counted.append(self.trainer.global_step)

    def configure_optimizers(self) -> Any:
        optimizer = OPTIMIZERS[self.name](self.parameters())
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, self.decay)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def batches(count: int = 8) -> list[Tensor]:
    return list(torch.randn(count, 5, 3, generator=torch.Generator().manual_seed(4)))


def with_bad(data: list[Tensor], bad: dict[int, float]) -> list[Tensor]:
    data = [batch.clone() for batch in data]
    for place, value in bad.items():
        data[place][1, 1] = value
    return data


def fit(data: list[Tensor], *callbacks: Callback, model: Any = None, **options: Any) -> Net:
    model = model or Net()
    trainer(*callbacks, **options).fit(model, loader(data))
    return model


def assert_equal(one: nn.Module, other: nn.Module) -> None:
    torch.testing.assert_close(one.state_dict(), other.state_dict(), rtol=0, atol=0)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_bad_batches_leave_no_trace(optimizer: str) -> None:
    guard, bad = NonFiniteGuard(explain=False), {0: NAN, 3: INF, 4: -INF, 7: NAN}
    with pytest.warns(UserWarning, match="batch 0 in epoch 0 is not finite, and its step is skipped") as told:
        found = fit(with_bad(batches(), bad), guard, model=Net(optimizer))
    assert len([w for w in told if "not finite" in str(w.message)]) == 1
    plain = fit([b for place, b in enumerate(batches()) if place not in bad], model=Net(optimizer))
    assert_equal(found, plain)
    assert guard.skipped_steps == 4
    assert found.counted == [0, 1, 2, 2, 2, 3, 4, 4]
    assert found.rates == pytest.approx([0.1 * 0.5**steps for steps in found.counted])


def test_without_it_the_run_is_lost() -> None:
    assert math.isnan(fit(with_bad(batches(), {3: NAN})).net[0].weight[0, 0].item())


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_clean_run_is_unchanged_to_the_bit(optimizer: str) -> None:
    assert_equal(fit(batches(), NonFiniteGuard(), model=Net(optimizer)), fit(batches(), model=Net(optimizer)))


@pytest.mark.parametrize("first", [True, False])
def test_a_window_is_skipped_as_a_whole_and_clipping_passes_over_it(first: bool) -> None:
    guards: list[Callback] = [NonFiniteGuard(), GradientClipping("percentile", 50.0)]
    found = fit(with_bad(batches(), {2: NAN}), *guards[:: 1 if first else -1], AccumulationScheduler(2))
    plain = [b for place, b in enumerate(batches()) if place not in (2, 3)]
    assert_equal(found, fit(plain, GradientClipping("percentile", 50.0), AccumulationScheduler(2)))
    assert found.counted == [0, 1, 1, 1, 1, 2, 2, 3]


def test_the_loggers_count_the_steps_that_are_taken() -> None:
    class Keeps(DummyLogger):
        def __init__(self) -> None:
            super().__init__()
            self.places: list[int] = []

        def log_metrics(self, metrics: Any, step: int) -> None:
            self.places.append(step)

    class Logs(Net):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            self.log("loss", 1.0, on_step=True, on_epoch=False)
            return super().training_step(batch, batch_idx)

    keeps = Keeps()
    data = with_bad(batches(), {2: NAN, 5: NAN})
    fit(data, NonFiniteGuard(explain=False), model=Logs(), logger=keeps, log_every_n_steps=1)
    assert keeps.places == [0, 1, 1, 2, 3, 3, 4, 5]  # a skipped batch is beside the last step that was taken


def test_skips_are_logged_from_the_first_one_on() -> None:
    class Reads(Callback):
        def __init__(self) -> None:
            self.seen: list[float] = []

        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            self.seen.append(float(trainer.callback_metrics.get("skipped_steps", -1)))

    reads = Reads()
    fit(with_bad(batches(), {2: NAN, 5: NAN}), NonFiniteGuard(), reads, log_every_n_steps=1)
    assert reads.seen == [-1, -1, 1, 1, 1, 2, 2, 2]


def test_a_resumed_run_goes_on_counting(tmp_path: Path) -> None:
    save = ModelCheckpoint(tmp_path, filename="a", save_top_k=1)
    fit(with_bad(batches(), {2: NAN}), NonFiniteGuard(), save, enable_checkpointing=True)
    guard, model = NonFiniteGuard(), Net()
    run = trainer(guard, max_epochs=2)
    run.fit(model, loader(with_bad(batches(), {5: NAN})), ckpt_path=tmp_path / "a.ckpt")
    assert guard.skipped_steps == 2
    assert run.global_step == 14


@pytest.mark.gpu
def test_on_a_gpu_nothing_waits_for_the_device() -> None:
    class Watched(Net):
        def on_train_start(self) -> None:
            torch.cuda.set_sync_debug_mode("error")

        def on_train_end(self) -> None:
            torch.cuda.set_sync_debug_mode("default")

    data = [batch.cuda() for batch in with_bad(batches(), {3: NAN})]
    guard, model = NonFiniteGuard(explain=False), Watched("fused", decay=1.0)
    try:
        fit(data, guard, GradientClipping("zclip"), model=model, accelerator="gpu", log_every_n_steps=100)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert guard.skipped_steps == 1
    assert all(p.isfinite().all() for p in model.parameters())


def test_explain_is_a_truth_value() -> None:
    with pytest.raises(TypeError, match="explain='no' must be true or false"):
        NonFiniteGuard(explain="no")  # type: ignore[arg-type]
