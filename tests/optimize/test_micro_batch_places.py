"""Places where memory runs out, kinds of batches it runs out with, and what is not the callback's to catch."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from lightning.pytorch import Callback
from torch import Tensor

from lightning_speedkit.optimize.accumulate import AccumulationScheduler
from lightning_speedkit.optimize.micro_batch import AutoMicroBatch
from tests.optimize.line import trainer
from tests.optimize.scarce_memory import Scarce, batches, fit, loader, plain, weights


class _At(Scarce):
    """Has no room in its passes of these numbers, forward or backward."""

    def __init__(self, what: str, *numbers: int) -> None:
        super().__init__()
        self.what, self.numbers = what, numbers

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        setattr(self, self.what, 0 if len(self.calls) in self.numbers else float("inf"))
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("what", ["forward_most", "backward_most"])
def test_the_last_piece_of_a_window(what: str) -> None:
    data = batches(8, 7, 8)
    model = _At(what, 0, 6)  # the first batch, and the last piece of the last one
    fit(model, data, AutoMicroBatch(grow_after=None), AccumulationScheduler(3))
    assert model.calls == [8, 4, 4, 4, 3, 4, 4, 2, 2, 2, 2]
    torch.testing.assert_close(weights(model), plain([data]), rtol=1e-12, atol=0)


@pytest.mark.parametrize("what", ["forward_most", "backward_most"])
def test_an_optimizer_that_evaluates_a_batch_many_times(what: str) -> None:
    runs = []
    for numbers in ((), (0, 5)):
        model = _At(what, *numbers)
        model.optimizer = lambda parameters: torch.optim.LBFGS(parameters, lr=0.1, max_iter=4)
        fit(model, batches(8, 6), AutoMicroBatch())
        runs.append(model)
    assert (set(runs[0].calls), min(runs[1].calls)) == ({8, 6}, 2)
    torch.testing.assert_close(weights(runs[1]), weights(runs[0]), rtol=1e-9, atol=0)


class _Mine(Callback):
    """Runs out of memory itself, in this hook."""

    def __init__(self, hook: str) -> None:
        self.calls = 0
        setattr(self, hook, self._raise)

    def _raise(self, *_: Any, **__: Any) -> None:
        self.calls += 1
        raise torch.OutOfMemoryError("CUDA out of memory, of mine.")


@pytest.mark.parametrize(
    "hook",
    [
        "on_train_batch_start",
        "on_before_backward",
        "on_after_backward",
        "on_before_optimizer_step",
        "on_before_zero_grad",
        "on_train_batch_end",
        "on_validation_batch_end",
    ],
)
def test_what_fails_in_another_callback_is_not_repeated(hook: str) -> None:
    callback, mine, model = AutoMicroBatch(), _Mine(hook), Scarce()
    run = trainer(callback, mine, num_sanity_val_steps=0)
    with pytest.raises(torch.OutOfMemoryError, match=r"^CUDA out of memory, of mine\.$"):
        run.fit(model, loader(batches(8, 8)), loader(batches(4)))
    assert (mine.calls, callback.micro_batch_size) == (1, None)
    assert set(model.calls) <= {8}
    assert "training_step" not in vars(run.strategy).keys() | vars(model).keys()


def test_the_check_before_training_and_test_steps() -> None:
    class Tested(Scarce):
        def test_step(self, batch: Tensor, batch_idx: int) -> None:
            self.validation_step(batch, batch_idx)

    found = []
    for most in (float("inf"), 2):
        model, callback = Tested(), AutoMicroBatch()
        model.validation_most = most
        run = trainer(callback, num_sanity_val_steps=2)
        run.fit(model, loader(batches(8)), loader(batches(6, 4)))
        fitted = run.callback_metrics["val"].item()
        found.append((weights(model), fitted, run.test(model, loader(batches(6, 4)), verbose=False)[0]["val"]))
        assert callback.micro_batch_size is None
    torch.testing.assert_close(found[1][0], found[0][0], rtol=0, atol=0)
    assert found[1][1:] == pytest.approx(found[0][1:], rel=1e-6)


def test_predictions_are_left_alone() -> None:
    class Predicts(Scarce):
        def predict_step(self, batch: Tensor, batch_idx: int) -> None:
            raise torch.OutOfMemoryError("CUDA out of memory, in predict.")

    with pytest.raises(torch.OutOfMemoryError, match=r"^CUDA out of memory, in predict\.$"):
        trainer(AutoMicroBatch()).predict(Predicts(), loader(batches(4)))


class _Named(NamedTuple):
    x: Tensor
    scale: Tensor


@dataclasses.dataclass
class _Fields:
    x: Tensor
    scale: Tensor
    names: tuple[str, ...]


class _Encoding(collections.UserDict):  # type: ignore[type-arg]
    """As the batches of tokenizers."""


_ONE = torch.tensor(1.0)
KINDS: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]] = {
    "named tuple": (lambda x: _Named(x, _ONE), lambda batch: batch.x * batch.scale),
    "dataclass": (lambda x: _Fields(x, _ONE, ("name",) * len(x)), lambda batch: batch.x[: len(batch.names)]),
    "encoding": (
        lambda x: _Encoding(ids=x, mask=torch.ones(len(x), 7), labels=torch.ones(len(x), 2, 1)),
        lambda batch: batch["ids"] * batch["mask"][:, :1] * batch["labels"][:, 0],
    ),
    "tuple of rows": (
        lambda x: {"x": tuple(x), "targets": [{"boxes": torch.zeros(3, 4)}] * len(x)},
        lambda batch: torch.stack(batch["x"])[: len(batch["targets"])],
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_kinds_of_batches(kind: str) -> None:
    make, read = KINDS[kind]

    class Reads(Scarce):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return super().training_step(read(batch), batch_idx)

    model, data = Reads(), batches(4, 3, 1, 8)
    model.forward_most = 2
    fit(model, [make(x) for x in data], AutoMicroBatch())
    assert model.calls == [4, 2, 2, 2, 1, 1, 2, 2, 2, 2]
    torch.testing.assert_close(weights(model), plain([[x] for x in data]), rtol=1e-12, atol=0)
