"""The callback in a Trainer: what the optimizer steps with, when, and what is logged."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import DeepSpeedStrategy
from torch import Tensor, nn

from lightning_speedkit.measure.lightning_hooks import BATCH_HOOKS
from lightning_speedkit.optimize.accumulate import AccumulationScheduler
from lightning_speedkit.optimize.clip import GradientClipping
from lightning_speedkit.optimize.clip_thresholds import ZScoreLimit
from lightning_speedkit.optimize.non_finite_guard import NonFiniteGuard
from tests.optimize.line import Line, batches_of, loader, steps, trainer

ONE_TO_SIX = batches_of(1, 1, 1, 1, 1, 1)
SCALE = 1024.0


def _scaler() -> MixedPrecision:
    return MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=SCALE))


@pytest.mark.parametrize("by", ["norm", "value"])
def test_the_optimizer_steps_with_the_clipped_gradient(by: str) -> None:
    assert steps(ONE_TO_SIX, GradientClipping(by, 3.5)) == pytest.approx([1, 2, 3, 3.5, 3.5, 3.5], rel=1e-6)


def test_it_equals_lightnings_to_the_bit() -> None:
    ours = steps(ONE_TO_SIX, GradientClipping(limit=2.5))
    assert ours == steps(ONE_TO_SIX, gradient_clip_val=2.5)


@pytest.mark.parametrize("first", [True, False])
def test_once_per_window_on_its_true_gradient(first: bool) -> None:
    clip, accumulate = GradientClipping(limit=3.0), AccumulationScheduler(4)
    callbacks: list[Callback] = [clip, accumulate] if first else [accumulate, clip]
    assert steps(ONE_TO_SIX, *callbacks) == pytest.approx([2.5, 3.0], rel=1e-6)  # means of 1..4 and of 5, 6


def test_units_and_thresholds_of_the_run() -> None:
    # w = 1 with a learning rate of 0: a unit of norm 1 may have a gradient of 2
    assert steps(ONE_TO_SIX, GradientClipping("agc", 2.0), model=Line(lr=0.0)) == pytest.approx([1, 2, 2, 2, 2, 2])
    rising = steps(ONE_TO_SIX, GradientClipping("percentile", 50.0))
    assert rising == pytest.approx([1, 1.5, 2, 2.5, 3, 3.5], rel=1e-6)
    limit = ZScoreLimit(2.5, 0.9, 3)
    expected = [limit(torch.tensor(float(x))).item() for x in range(1, 7)]
    found = steps(ONE_TO_SIX, GradientClipping("zclip", smoothing=0.9, warmup=3))
    assert found == pytest.approx(expected, rel=1e-6)
    assert found[3] < 4.0


def test_under_a_scaler_a_window_without_a_last_loss_is_not_counted() -> None:
    """Its gradients are still scaled, and Lightning takes no step with them."""

    class Last(Line):
        def training_step(self, batch: Tensor, batch_idx: int) -> Any:
            return None if batch_idx == 3 else super().training_step(batch, batch_idx)

    clip = GradientClipping("percentile", 100.0)
    model = Last(lr=0.0, dtype=torch.float32)
    data = batches_of(1, 1, 1, 1, 1, 1, dtype=torch.float32)
    trainer(clip, plugins=[_scaler()], accumulate_grad_batches=2).fit(model, loader(data))
    assert clip.state_dict()["next"] == 2
    assert clip.state_dict()["norms"][:3].tolist() == pytest.approx([1.5, 5.5, float("nan")], nan_ok=True)


@pytest.mark.parametrize("sparse", [True, False])
@pytest.mark.parametrize("by", ["norm", "value", "agc"])
def test_a_sparse_embedding_is_trained_as_a_dense_one(by: str, sparse: bool) -> None:
    class Words(Line):
        def __init__(self, sparse: bool) -> None:
            super().__init__(dtype=torch.float32)
            torch.manual_seed(1)
            self.table, self.head = nn.Embedding(5, 2, sparse=sparse), nn.Linear(2, 1)

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            return (self.head(self.table(batch)) * self.w).square().mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.5)

    def weights(sparse: bool, *callbacks: Callback) -> list[Tensor]:
        model = Words(sparse)
        data = [torch.tensor([1, 3, 1]), torch.tensor([0, 0, 2])]
        trainer(*callbacks, NonFiniteGuard(), log_every_n_steps=1).fit(model, loader(data))
        return [p.detach() for p in model.parameters()]

    found = weights(sparse, GradientClipping(by, 0.05))
    torch.testing.assert_close(found, weights(False, GradientClipping(by, 0.05)))
    assert not torch.equal(found[1], weights(False)[1])


class _Adam(Line):
    def __init__(self, fused: bool) -> None:
        super().__init__(dtype=torch.float32)
        self.fused = fused
        self.seen: list[Any] = []

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.125, fused=self.fused)

    def on_train_batch_end(self, *_: Any) -> None:
        self.seen.append(self.w.item())


def _weights(plugins: list[Any], fused: bool, callbacks: list[Callback], data: list[Tensor], **options: Any) -> Any:
    model = _Adam(fused)
    trainer(*callbacks, plugins=plugins, **options).fit(model, loader(data))
    return model.seen


@pytest.mark.parametrize("by", ["norm", "value", "agc"])
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_fused_optimizers_under_16_bits(precision: str, fused: bool, by: str) -> None:
    """Lightning's own clipping raises for a fused optimizer. The third batch overflows and is skipped by the scaler."""
    data = [torch.tensor([x]) for x in (1.0, 4.0, float("inf"), 5.0)]
    plugins: list[Any] = [_scaler()] if precision == "fp16" else [MixedPrecision("bf16-mixed", "cpu")]
    if precision == "bf16":
        data.pop(2)
    limit = 100.0 if by == "agc" else 2.0
    found = _weights(plugins, fused, [GradientClipping(by, limit)], data)
    expected = [1.0 - 0.125, 1.0 - 3 * 0.125, 1.0 - 3 * 0.125, 1.0 - 5 * 0.125]
    if by == "agc":
        expected = [0.875, 0.375, 0.375, -0.25]
    if precision == "bf16":
        expected.pop(2)
    assert found == pytest.approx(expected, rel=1e-5)


class _Logged(Callback):
    def __init__(self) -> None:
        self.before: list[float] = []
        self.after: list[float] = []

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if "gradient_norm" in trainer.callback_metrics:
            self.before.append(trainer.callback_metrics["gradient_norm"].item())
            self.after.append(trainer.callback_metrics["gradient_norm_clipped"].item())


@pytest.mark.parametrize("by", ["norm", "value", "percentile"])
@pytest.mark.parametrize("plugins", [[], [_scaler()]], ids=["fp32", "fp16"])
def test_norms_before_and_after_are_logged(by: str, plugins: list[Any]) -> None:
    logged, data = _Logged(), [batch.float() for batch in ONE_TO_SIX]
    clip = GradientClipping(by, 100.0 if by == "percentile" else 3.5)
    _weights(plugins, bool(plugins), [clip, logged], data, log_every_n_steps=1)
    assert logged.before == pytest.approx([1, 2, 3, 4, 5, 6])
    assert logged.after == pytest.approx([1, 2, 3, 4, 5, 6] if by == "percentile" else [1, 2, 3, 3.5, 3.5, 3.5])


def test_only_the_steps_that_are_logged_are_logged() -> None:
    with mock.patch.object(LightningModule, "log") as log:
        steps(ONE_TO_SIX, GradientClipping("value", 1.0), log_every_n_steps=3)
    assert [call.args[0] for call in log.call_args_list] == ["gradient_norm", "gradient_norm_clipped"] * 2


def test_norms_stay_to_be_read_and_cost_nothing_after_their_step() -> None:
    class Reads(Callback):
        def __init__(self) -> None:
            self.told: list[tuple[float, bool]] = []

        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            entries = trainer.fit_loop.epoch_loop._results.values()
            handled = any(not entry.has_reset for entry in entries)
            self.told.append((float(trainer.callback_metrics.get("gradient_norm", 0.0)), handled))

    reads = Reads()
    steps(ONE_TO_SIX, GradientClipping(limit=1.0), reads, log_every_n_steps=3)
    assert reads.told == [(0, False), (0, False), (3, True), (3, False), (3, False), (6, True)]


@pytest.mark.parametrize("plugins", [[], [_scaler()]], ids=["fp32", "fp16"])
def test_no_hook_of_a_batch_is_called_that_is_not_needed(plugins: list[Any]) -> None:
    class Looks(Callback):
        def on_before_optimizer_step(self, trainer: Any, *_: Any) -> None:
            self.left_out = [{n for n in BATCH_HOOKS if getattr(c, n) is None} for c in trainer.callbacks[:2]]

    looks, callbacks = Looks(), [GradientClipping(), NonFiniteGuard()]
    trainer(*callbacks, looks, plugins=plugins).fit(Line(dtype=torch.float32), loader([torch.ones(1)]))
    needed = {"on_train_batch_start", "on_before_backward"} if plugins else set()
    guards = {"on_before_optimizer_step", *needed, *(["on_train_batch_end"] if plugins else [])}
    assert looks.left_out == [set(BATCH_HOOKS) - needed, set(BATCH_HOOKS) - guards]
    assert all(callable(getattr(callback, name)) for callback in callbacks for name in BATCH_HOOKS)


def test_the_plugin_is_as_it_was_afterwards() -> None:
    class Fails(Line):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            raise ZeroDivisionError

    clip = GradientClipping()
    run = trainer(clip)
    run.fit(Line(), loader(ONE_TO_SIX))
    assert "clip_gradients" not in vars(run.precision_plugin)
    run = trainer(clip)
    with pytest.raises(ZeroDivisionError):
        run.fit(Fails(), loader(ONE_TO_SIX))
    assert "clip_gradients" not in vars(run.precision_plugin)


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"by": "nrom"}, ValueError, "'nrom' is unknown. Did you mean 'norm'"),
        ({"by": "norm", "warmup": 3}, ValueError, "warmup=3 belongs to by='zclip'"),
        ({"by": "zclip", "history": 3}, ValueError, "history=3 belongs to by='percentile'"),
        ({"limit": 0.0}, ValueError, "limit=0.0 must be above 0"),
        ({"limit": float("nan")}, ValueError, "limit=nan must be"),
        ({"limit": "1"}, TypeError, "got str"),
        ({"by": "percentile", "limit": 101}, ValueError, "at most 100"),
        ({"by": "zclip", "smoothing": 1.5}, ValueError, "smoothing=1.5"),
        ({"by": "zclip", "warmup": 2.5}, TypeError, "warmup=2.5"),
        ({"by": "percentile", "history": 0}, ValueError, "history=0"),
    ],
)
def test_arguments_that_cannot_be_are_told(arguments: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words.replace(".", r"\.")):
        GradientClipping(**arguments)


class _Other(GradientClipping): ...


class _OwnClipping(Line):
    def configure_gradient_clipping(self, *_: Any, **__: Any) -> None: ...


class _Manual(Line):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


@pytest.mark.parametrize(
    ("model", "callbacks", "options", "words"),
    [
        (Line, [GradientClipping], {"gradient_clip_val": 1.0}, r"gradient_clip_val=1\.0"),
        (Line, [GradientClipping, _Other], {}, "Two GradientClipping"),
        (_OwnClipping, [GradientClipping], {}, "configure_gradient_clipping"),
        (_Manual, [GradientClipping], {}, "automatic_optimization = False"),
    ],
)
def test_combinations_that_cannot_be_are_told(model: Any, callbacks: Any, options: Any, words: str) -> None:
    with pytest.raises(MisconfigurationException, match=words):
        trainer(*[callback() for callback in callbacks], **options).fit(model(), loader(ONE_TO_SIX))


def test_deepspeed_is_refused() -> None:
    run = mock.Mock(gradient_clip_val=None, callbacks=[], strategy=DeepSpeedStrategy.__new__(DeepSpeedStrategy))
    with pytest.raises(MisconfigurationException, match="DeepSpeedStrategy"):
        GradientClipping().setup(run, Line(), "fit")


@pytest.mark.parametrize(("saved", "loaded"), [("zclip", "percentile"), ("percentile", "zclip")])
def test_a_threshold_of_another_kind_begins_anew(saved: str, loaded: str) -> None:
    state = GradientClipping(by=saved).state_dict()
    clipping = GradientClipping(by=loaded)
    fresh = clipping.state_dict()
    with pytest.warns(UserWarning, match=f"saved with another by: the threshold of by='{loaded}' begins anew"):
        clipping.load_state_dict(state)
    torch.testing.assert_close(clipping.state_dict(), fresh, equal_nan=True)
