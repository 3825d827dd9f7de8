"""What a step leaves beside the gradient: random numbers, buffers, logged values, outputs, warnings."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchmetrics import MeanMetric

from lightning_speedkit.optimize.micro_batch import AutoMicroBatch
from tests.optimize.scarce_memory import NoRoom, Scarce, Token, batches, fit, weights

SIZES = (8, 8, 5, 8, 3, 7)


class _Noisy(Scarce):
    """Has dropout, BatchNorm, a metric, and logs in all ways."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.dropout = nn.BatchNorm1d(3, dtype=torch.float64), nn.Dropout(0.5)
        self.seen = MeanMetric()
        self.outputs: list[Any] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        self.seen.update(batch)
        self.log("before", batch.mean(), on_step=True, on_epoch=True)
        loss = super().training_step(self.dropout(self.norm(batch)), batch_idx)
        self.log_dict({"largest": batch.max(), "seen": self.seen}, on_step=False, on_epoch=True, reduce_fx=max)
        return {"loss": loss, "rows": batch * self.first.weight.sum(), "name": "a"}

    def on_train_batch_end(self, outputs: Any, batch: Tensor, batch_idx: int) -> None:
        self.outputs.append(outputs)


def test_what_fails_in_backward_leaves_random_numbers_buffers_and_logs_as_they_were() -> None:
    runs = []
    for most in (float("inf"), 4):
        model = _Noisy()
        model.backward_most = most
        fit(model, batches(8), AutoMicroBatch())
        runs.append((model, torch.rand(1)))
    (expected, random), (found, after) = runs
    assert found.calls == [8, 4, 4]
    assert torch.equal(random, after)
    torch.testing.assert_close(list(found.buffers()), list(expected.buffers()), rtol=0, atol=0)
    assert found.metrics == expected.metrics
    torch.testing.assert_close(found.outputs[0]["loss"], expected.outputs[0]["loss"], rtol=0, atol=0)
    torch.testing.assert_close(found.outputs[0]["rows"], expected.outputs[0]["rows"], rtol=0, atol=0)


def test_what_fails_in_forward_logs_the_whole_batch_once() -> None:
    data = batches(*SIZES)
    found = _Noisy()
    found.norm, found.dropout = nn.Identity(), nn.Identity()  # type: ignore[assignment]
    found.forward_most = 3
    fit(found, data, AutoMicroBatch(grow_after=None), max_epochs=1)
    whole = torch.cat(data)
    assert found.metrics["seen"] == pytest.approx(whole.mean().item())
    assert found.metrics["before_step"] == pytest.approx(data[-1].mean().item())
    assert found.metrics["before_epoch"] == pytest.approx(whole.mean().item())
    assert found.metrics["largest"] == pytest.approx(whole.max().item())
    assert [len(outputs["rows"]) for outputs in found.outputs] == list(SIZES)
    assert found.outputs[0]["name"] == "a"
    assert not any(outputs["rows"].requires_grad for outputs in found.outputs)


def test_it_warns_once_about_batchnorm_and_not_without_a_fault(recwarn: pytest.WarningsRecorder) -> None:
    model = _Noisy()
    model.forward_most = 5
    fit(model, batches(8, 8, 4), AutoMicroBatch())
    plain = Scarce()
    plain.forward_most = 3
    fit(plain, batches(*SIZES), AutoMicroBatch())
    told = [str(w.message) for w in recwarn if "Memory ran out" in str(w.message)]
    assert ["BatchNorm" in text for text in told] == [True, False]
    recwarn.clear()
    fit(_Noisy(), batches(*SIZES), AutoMicroBatch())
    assert not [w for w in recwarn if "Memory ran out" in str(w.message)]


class _Labelled(Scarce):
    """Cross entropy, which is no number over ignored labels alone."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if len(batch["x"]) > self.forward_most:
            raise MemoryError
        loss = nn.functional.cross_entropy(self.first(batch["x"]), batch["labels"])
        self.log("seen", loss)
        return loss * NoRoom.apply(batch["x"].requires_grad_(), self.backward_most, Token()).isfinite().all()


@pytest.mark.parametrize("fault", ["forward_most", "backward_most"])
def test_a_piece_without_labels_weighs_nothing(fault: str) -> None:
    labels = torch.tensor([1, 2, -100, -100, 3, -100, 0, 1])
    runs = []
    for most in (float("inf"), 2):
        model = _Labelled()
        setattr(model, fault, most)
        losses: list[Tensor] = []
        model.on_train_batch_end = lambda outputs, *_, kept=losses: kept.append(outputs["loss"])  # type: ignore[method-assign]
        data = [{"x": batch, "labels": labels} for batch in batches(8, 8)]
        fit(model, data, AutoMicroBatch(count="labels"))  # type: ignore[arg-type]
        runs.append((weights(model), losses, model.metrics["seen"]))
    torch.testing.assert_close(runs[1], runs[0], rtol=1e-6, atol=0)


def test_a_try_whose_backward_pass_fails_waits_twice_as_long() -> None:
    model, callback = Scarce(), AutoMicroBatch(grow_after=1)
    model.backward_most = 4
    fit(model, batches(8, 8, 6, 8, 8, 8), callback)
    # pieces of 4; tries of 8 and, two batches later, of 8 again
    assert model.calls == [8, 4, 4, 8, 4, 4, 3, 3, 8, 4, 4, 4, 4, 4, 4]
    assert callback.micro_batch_size == 4
