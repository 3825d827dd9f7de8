"""The callback in one process: every step against numbers worked out by hand, and against Lightning's own where its
result is right."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import Callback, StochasticWeightAveraging
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_speedkit.optimize import AccumulationScheduler, factor_at
from tests.optimize.line import Line, Stream, batches_of, loader, steps, trainer

ONE_TO_SIX = batches_of(1, 1, 1, 1, 1, 1)  # windows of 4: mean(1..4) = 2.5, and mean(5, 6) = 5.5


def _stream(batches: list[Any]) -> DataLoader[Any]:
    return DataLoader(Stream(batches), batch_size=None)


@pytest.mark.parametrize("count", ["samples", "batches"])
@pytest.mark.parametrize(
    ("data", "options"),
    [
        (loader(ONE_TO_SIX), {}),
        (_stream(ONE_TO_SIX), {}),
        (loader(batches_of(*[1] * 9)), {"limit_train_batches": 6}),
        (_stream(batches_of(*[1] * 9)), {"limit_train_batches": 6}),
        (loader(ONE_TO_SIX), {"barebones": True, "logger": None, "enable_checkpointing": None}),
    ],
    ids=["loader", "stream", "limited loader", "limited stream", "barebones"],
)
def test_the_short_last_window_has_the_mean_of_its_own(data: Any, options: dict[str, Any], count: str) -> None:
    if options.get("barebones"):
        options = {**options, "enable_progress_bar": None, "enable_model_summary": None}
    assert steps(data, AccumulationScheduler(4, count=count), **options) == [2.5, 5.5]


@pytest.mark.parametrize("data", [loader(batches_of(1, 3, 2, 4, 1, 2)), _stream(batches_of(1, 3, 2, 4, 1, 2))])
def test_each_sample_weighs_the_same(data: Any) -> None:
    # samples 1..10 in the first four micro-batches, 11..13 in the last two
    assert steps(data, AccumulationScheduler(4)) == pytest.approx([5.5, 12.0], rel=1e-14)


def test_each_batch_weighs_the_same_if_asked_for() -> None:
    # means of the micro-batches: 1, 3, 5.5, 8.5 | 11, 12.5
    data = batches_of(1, 3, 2, 4, 1, 2)
    assert steps(data, AccumulationScheduler(4, count="batches")) == pytest.approx([4.5, 11.75], rel=1e-14)


@pytest.mark.parametrize(("clip", "seen"), [(100.0, [2.5, 5.5]), (3.0, [2.5, 3.0]), (1.0, [1.0, 1.0])])
@pytest.mark.parametrize("algorithm", ["norm", "value"])
def test_clipping_sees_the_true_gradient(clip: float, seen: list[float], algorithm: str) -> None:
    found = steps(ONE_TO_SIX, AccumulationScheduler(4), gradient_clip_val=clip, gradient_clip_algorithm=algorithm)
    assert found == pytest.approx(seen, rel=1e-5)


class _Watch(Callback):
    """Keeps what another callback sees of the gradient."""

    def __init__(self) -> None:
        self.after_backward: list[float] = []
        self.before_step: list[float] = []

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        self.after_backward.append(pl_module.w.grad.item())

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self.before_step.append(pl_module.w.grad.item())


@pytest.mark.parametrize("first", [True, False])
def test_callbacks_on_either_side_see_the_true_gradient(first: bool) -> None:
    watch, ours = _Watch(), AccumulationScheduler(4)
    steps(batches_of(1, 3, 2, 4, 1, 2), *((watch, ours) if first else (ours, watch)))
    assert watch.before_step == pytest.approx([5.5, 12.0], rel=1e-14)
    assert [watch.after_backward[3], watch.after_backward[5]] == pytest.approx([5.5, 12.0], rel=1e-14)


def test_float16_with_a_scaler() -> None:
    plugin = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=1024.0))
    model = Line(dtype=torch.float32)
    data = batches_of(1, 3, 2, 4, 1, 2, dtype=torch.float32)
    found = steps(data, AccumulationScheduler(4), model=model, plugins=[plugin], gradient_clip_val=6.0)
    assert found == pytest.approx([5.5, 6.0], rel=1e-3)


class _Half(Line):
    """The same gradient by a product that runs in float16."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return (batch[:, None] @ self.w.reshape(1, 1)).mean()


def _half(precision: str) -> dict[str, Any]:
    if precision == "16-true":
        return {"precision": precision}
    return {"plugins": [MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=1024.0))]}


@pytest.mark.parametrize("precision", ["16-mixed", "16-true"])
@pytest.mark.parametrize("sizes", [[1, 400, 400, 400], [1, 2, 30, 800], [3, 1, 900, 7], [0, 1, 700, 2], [800, 1, 1, 1]])
def test_float16_survives_micro_batches_that_grow(sizes: list[int], precision: str) -> None:
    # A weight of 400 times the gradient of the scaled loss is above 65504, and infinite in float16.
    worth = 300.0 if precision == "16-true" else 1.0
    window = [torch.full((size,), worth * place) for place, size in enumerate(sizes, 1) if size]
    model = _Half(lr=0.0, dtype=torch.float32)
    data = window * 3
    found = steps(data, AccumulationScheduler(len(window)), model=model, **_half(precision))
    mean = worth * sum(size * place for place, size in enumerate(sizes, 1)) / sum(sizes)
    assert found == pytest.approx([mean] * 3, rel=5e-3)


@pytest.mark.parametrize(("factor", "sizes"), [(1, [2, 3, 1]), (3, [5] * 6), (3, [2, 2, 2, 7, 7, 7])])
def test_float16_is_lightnings_to_the_bit_where_that_is_right(factor: int, sizes: list[int]) -> None:
    losses, weights = _mlp_run([AccumulationScheduler(factor)], sizes, **_half("16-mixed"))
    expected_losses, expected = _mlp_run([], sizes, accumulate_grad_batches=factor, **_half("16-mixed"))
    assert torch.equal(losses, expected_losses)
    assert all(torch.equal(a, b) for a, b in zip(weights, expected, strict=True))


def test_a_window_with_an_infinite_gradient_is_skipped_and_the_next_one_is_right() -> None:
    plugin = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=1024.0))
    data = [torch.tensor([x]) for x in (1.0, float("inf"), 3.0, 5.0, 7.0)]
    model = Line(dtype=torch.float32)
    assert steps(data, AccumulationScheduler(2), model=model, plugins=[plugin]) == pytest.approx([4.0, 7.0], rel=1e-3)


def _mlp_run(callbacks: list[Callback], sizes: list[int], epochs: int = 2, **options: Any) -> tuple[Any, ...]:
    class Net(Line):
        def __init__(self) -> None:
            super().__init__(dtype=torch.float32)
            torch.manual_seed(2)
            self.net = nn.Sequential(nn.Linear(3, 5), nn.Dropout(0.3), nn.ReLU(), nn.Linear(5, 1))

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            loss = self.net(batch).square().mean() * self.w
            self.losses.append(loss.detach().clone())
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=0.05)

    model = Net()
    x = torch.randn(sum(sizes), 3, generator=torch.Generator().manual_seed(4))
    torch.manual_seed(9)
    trainer(*callbacks, max_epochs=epochs, **options).fit(model, loader(list(x.split(sizes))))
    return torch.stack(model.losses), [p.detach() for p in model.parameters()]


@pytest.mark.parametrize(("factor", "sizes"), [(1, [2, 3, 1]), (3, [5] * 6), (4, [3] * 8), (3, [2, 2, 2, 7, 7, 7])])
def test_where_lightning_is_right_the_weights_are_the_same_to_the_bit(factor: int, sizes: list[int]) -> None:
    losses, weights = _mlp_run([AccumulationScheduler(factor)], sizes)
    expected_losses, expected = _mlp_run([], sizes, accumulate_grad_batches=factor)
    assert torch.equal(losses, expected_losses)
    assert all(torch.equal(a, b) for a, b in zip(weights, expected, strict=True))


@pytest.mark.parametrize("factor", [2, 3, 4])
def test_unequal_micro_batches_equal_a_plain_loop_of_big_batches(factor: int) -> None:
    sizes = [1, 3, 2, 4, 1, 2, 5]

    class Net(Line):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(2)
            self.net = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1)).double()

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            return self.net(batch).square().mean() * self.w

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)

    x = torch.randn(sum(sizes), 3, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    micro = list(x.split(sizes))
    model, plain = Net(), Net()
    trainer(AccumulationScheduler(factor), max_epochs=3).fit(model, loader(micro))
    optimizer = plain.configure_optimizers()
    for _ in range(3):
        for start in range(0, len(micro), factor):
            optimizer.zero_grad()
            (plain.net(torch.cat(micro[start : start + factor])).square().mean() * plain.w).backward()
            optimizer.step()
    for ours, expected in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        # six batches an epoch
        ({0: 1, 1: 4, 2: 6}, [1, 2, 3, 4, 5, 6, 2.5, 5.5, 3.5]),
        ({1: 4, 2: 3}, [1, 2, 3, 4, 5, 6, 2.5, 5.5, 2, 5]),
        ({0: 4, 2: 1}, [2.5, 5.5, 2.5, 5.5, 1, 2, 3, 4, 5, 6]),
        ({0: 100}, [3.5, 3.5, 3.5]),
    ],
)
def test_the_factor_changes_at_an_epoch_edge(schedule: dict[int, int], expected: list[float]) -> None:
    found = steps(ONE_TO_SIX, AccumulationScheduler(schedule), max_epochs=3)
    assert found == pytest.approx(expected, rel=1e-14)


def test_max_steps_ends_between_windows() -> None:
    assert steps(ONE_TO_SIX, AccumulationScheduler(2), max_steps=2, max_epochs=-1) == [1.5, 3.5]


@pytest.mark.parametrize("interval", [1, 3, 6])
def test_validation_inside_a_window_leaves_its_gradients_alone(interval: int) -> None:
    model = Line()
    trainer(AccumulationScheduler(4), val_check_interval=interval).fit(model, loader(ONE_TO_SIX), loader(batches_of(1)))
    assert model.optimizer.seen == [2.5, 5.5]


class _Quitting(Line):
    """Gives no loss for some batches."""

    def __init__(self, without: set[int]) -> None:
        super().__init__()
        self.without = without

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        return None if batch_idx in self.without else super().training_step(batch, batch_idx)


@pytest.mark.parametrize(
    ("without", "expected"),
    [
        ({0}, [3, 5.5]),
        ({1, 2}, [2.5, 5.5]),
        ({3}, [2, 5.5]),
        ({0, 3}, [2.5, 5.5]),
        ({5}, [2.5, 5]),
    ],
)
def test_a_batch_without_a_loss_does_not_count(without: set[int], expected: list[float]) -> None:
    assert steps(ONE_TO_SIX, AccumulationScheduler(4), model=_Quitting(without)) == pytest.approx(expected, rel=1e-14)


@pytest.mark.parametrize(
    ("precision", "without", "expected", "told"),
    [
        ("16-mixed", {3}, [6.5], 1),
        ("16-mixed", {3, 7}, [], 1),
        ("16-mixed", {0, 1, 2, 3}, [6.5], 0),  # nothing was collected
        ("16-mixed", {2}, [7 / 3, 6.5], 0),
        ("16-true", {3}, [2.0, 6.5], 0),  # no scaler: the step is taken
        ("bf16-mixed", {3}, [2.0, 6.5], 0),
    ],
)
def test_a_gradient_that_the_scaler_does_not_step_with_is_told_once(
    recwarn: pytest.WarningsRecorder, precision: str, without: set[int], expected: list[float], told: int
) -> None:
    # With a scaler, Lightning takes no step if the last micro-batch of a window has no loss.
    model, data = _Quitting(without).float(), batches_of(*[1] * 8, dtype=torch.float32)
    options = {"precision": precision} if precision == "bf16-mixed" else _half(precision)
    assert steps(data, AccumulationScheduler(4), model=model, **options) == pytest.approx(expected, rel=1e-2)
    assert sum("inside an accumulation window" in str(w.message) for w in recwarn) == told


def test_no_gradient_is_received_twice_if_the_loader_gives_none() -> None:
    # Lightning clears gradients at the first micro-batch of a window, and passes over one that is None.
    batches: list[Any] = [*ONE_TO_SIX]
    batches[2] = None
    assert steps(_stream(batches), AccumulationScheduler(2)) == [1.5, 4.0, 5.5]


def test_gradients_that_no_step_takes_are_told_once() -> None:
    batches: list[Any] = batches_of(*[1] * 8)
    batches[1] = batches[5] = None  # the last micro-batches of the first and the third window
    with pytest.warns(UserWarning, match="inside an accumulation window") as record:
        assert steps(_stream(batches), AccumulationScheduler(2)) == [3.5, 7.5]
    assert sum("inside an accumulation window" in str(w.message) for w in record) == 1


def _checkpoint(path: Path, callbacks: list[Callback], model: Line, epochs: int, resume: bool = False) -> None:
    run = trainer(*callbacks, max_epochs=epochs)
    run.fit(model, loader(ONE_TO_SIX), ckpt_path=path if resume else None, weights_only=True)
    if not resume:
        run.save_checkpoint(path)


def test_a_run_resumed_at_an_epoch_edge_takes_the_same_steps(tmp_path: Path) -> None:
    schedule = {0: 1, 1: 4, 2: 3, 3: 5}
    whole = Line()
    trainer(AccumulationScheduler(schedule), max_epochs=4).fit(whole, loader(ONE_TO_SIX))
    first, second = Line(), Line()
    _checkpoint(tmp_path / "c.ckpt", [AccumulationScheduler(schedule)], first, 2)
    _checkpoint(tmp_path / "c.ckpt", [AccumulationScheduler(schedule)], second, 4, resume=True)
    assert first.optimizer.seen + second.optimizer.seen == whole.optimizer.seen
    assert torch.equal(second.w, whole.w)


def test_a_second_fit_and_a_second_trainer_with_the_same_callback() -> None:
    ours = AccumulationScheduler({0: 4})
    run, first, second = trainer(ours), Line(), Line()
    run.fit(first, loader(ONE_TO_SIX))
    assert run.accumulate_grad_batches == 1
    run.fit_loop.epoch_progress.reset()
    run.fit(second, loader(ONE_TO_SIX))
    assert first.optimizer.seen == second.optimizer.seen == [2.5, 5.5]
    assert steps(batches_of(1, 3, 2, 4, 1, 2), ours) == pytest.approx([5.5, 12.0], rel=1e-14)


def test_the_trainers_factor_is_put_back_after_an_exception() -> None:
    class Fail(Line):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            raise RuntimeError("on purpose")

    run = trainer(AccumulationScheduler(4))
    with pytest.raises(RuntimeError, match="on purpose"):
        run.fit(Fail(), loader(ONE_TO_SIX))
    assert run.accumulate_grad_batches == 1


def test_configure_optimizers_sees_the_factor() -> None:
    class Plan(Line):
        def configure_optimizers(self) -> Any:
            self.planned = self.trainer.estimated_stepping_batches
            return super().configure_optimizers()

    model = Plan()
    assert len(steps(ONE_TO_SIX, AccumulationScheduler(4), model=model, max_epochs=3)) == model.planned == 6


@pytest.mark.parametrize("first", [True, False])
def test_the_epoch_that_stochastic_weight_averaging_adds_keeps_its_own_factor(first: bool) -> None:
    # SWA adds an epoch without backward for BatchNorm, in which it sets the factor itself.
    class Norm(Line):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(1).double()

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            return super().training_step(self.norm(batch[:, None]).square() + batch, batch_idx)

    def averaging() -> Callback:
        return StochasticWeightAveraging(0.01, swa_epoch_start=1)

    data, model, expected = batches_of(*[2] * 8), Norm(), Norm()
    ours = AccumulationScheduler(4)
    found = steps(data, *((ours, averaging()) if first else (averaging(), ours)), model=model, max_epochs=3)
    assert found == steps(data, averaging(), model=expected, max_epochs=3, accumulate_grad_batches=4)
    assert all(torch.equal(a, expected.state_dict()[name]) for name, a in model.state_dict().items())


def test_fast_dev_run() -> None:
    assert steps(ONE_TO_SIX, AccumulationScheduler(4), fast_dev_run=1, enable_checkpointing=None) == [1.0]


def test_lbfgs_without_accumulation_is_left_alone() -> None:
    class Newton(Line):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            return (self.w * batch - 3.0).square().mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.LBFGS(self.parameters(), max_iter=4)

    ours, expected = Newton(), Newton()
    trainer(AccumulationScheduler(1)).fit(ours, loader(batches_of(1, 2)))
    trainer().fit(expected, loader(batches_of(1, 2)))
    assert torch.equal(ours.w, expected.w)
    assert ours.w.item() != 1.0


class _Weighted(AccumulationScheduler):
    """Takes the number of samples from the batch."""

    def __init__(self, schedule: int, kind: Any) -> None:
        super().__init__(schedule)
        self.kind = kind

    def count_samples(self, batch: Any) -> int:
        return self.kind(batch["n"])  # type: ignore[no-any-return]


class _Dicts(Line):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch["x"], batch_idx)


@pytest.mark.parametrize(
    "kind",
    [int, np.int64, torch.tensor, lambda n: torch.ones(n, dtype=torch.bool).sum()],
    ids=["int", "numpy", "tensor", "sum of a mask"],
)
def test_count_samples_can_be_overridden(kind: Any) -> None:
    data: list[Any] = [{"x": torch.full((size,), x).double(), "n": n} for size, x, n in ((1, 4.0, 3), (2, 8.0, 11))]
    # A double: a weight of 11 / 3 in the float32 of a tensor would be wrong from the eighth digit on.
    assert steps(data, _Weighted(2, kind), model=_Dicts()) == pytest.approx([100 / 14], rel=1e-14)


@pytest.mark.parametrize(
    "kind",
    [float, str, lambda n: None, lambda n: torch.tensor(float(n)), lambda n: torch.ones(2).long(), lambda n: []],
    ids=["float", "str", "None", "tensor of a float", "tensor of two", "list"],
)
def test_a_count_that_is_no_whole_number_is_told(kind: Any) -> None:
    with pytest.raises(TypeError, match=r"count_samples\(\) has to return a whole number, and returned"):
        steps([{"x": torch.tensor([4.0]), "n": 3}], _Weighted(2, kind), model=_Dicts())


def test_an_error_inside_count_samples_is_left_alone() -> None:
    with pytest.raises(TypeError, match="unsupported operand"):
        steps([{"x": torch.tensor([4.0]), "n": 3}], _Weighted(2, lambda n: n + "1"), model=_Dicts())


def test_the_callers_schedule_is_not_changed() -> None:
    mine = {2: 4}
    ours = AccumulationScheduler(mine)
    steps(ONE_TO_SIX, ours, max_epochs=1)
    assert mine == {2: 4}
    mine[0] = 9
    assert factor_at(ours.schedule, 0) == 1
    assert [factor_at(ours.schedule, epoch) for epoch in (1, 2, 3)] == [1, 4, 4]
