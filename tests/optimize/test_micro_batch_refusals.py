"""What cannot be computed again is refused with the way out. The wrapped models are in the tests on two ranks."""

from __future__ import annotations

from typing import Any

import pytest
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy, Strategy
from lightning.pytorch.strategies.xla import XLAStrategy
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_speedkit.optimize.micro_batch import AutoMicroBatch
from lightning_speedkit.optimize.micro_batch_refusals import check_wrapped
from tests.optimize.line import Line, trainer
from tests.optimize.scarce_memory import batches, loader


class _Manual(Line):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class _TakesIterator(Line):
    def training_step(self, dataloader_iter: Any) -> Tensor:  # type: ignore[override]
        return next(dataloader_iter)[0]


@pytest.mark.parametrize(
    ("model", "callbacks", "message"),
    [
        (_Manual, 1, "sets automatic_optimization = False"),
        (_TakesIterator, 1, "takes the dataloader_iter"),
        (Line, 2, "two AutoMicroBatch"),
    ],
)
def test_what_cannot_be_repeated_is_refused(model: Any, callbacks: int, message: str) -> None:
    class Other(AutoMicroBatch):
        pass

    with pytest.raises(MisconfigurationException, match=message):
        trainer(*[AutoMicroBatch(), Other()][:callbacks]).fit(model(), loader(batches(4)))


@pytest.mark.parametrize("stage", ["fit", "validate", "test"])
@pytest.mark.parametrize("kind", [DeepSpeedStrategy, FSDPStrategy, XLAStrategy])
def test_strategies_that_wait_inside_are_refused(
    kind: type[Strategy], stage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = trainer(callback := AutoMicroBatch())
    # None of these starts on this machine, so the Trainer is told to have one.
    monkeypatch.setattr(Trainer, "strategy", property(lambda _: kind.__new__(kind)))
    with pytest.raises(MisconfigurationException, match=f"does not work with {kind.__name__}"):
        callback.setup(run, Line(), stage)


def test_batch_norm_that_waits_for_other_ranks_is_refused() -> None:
    wrapped = DistributedDataParallel.__new__(DistributedDataParallel)
    nn.Module.__init__(wrapped)
    wrapped.static_graph = False
    check_wrapped(wrapped)
    wrapped.norm = nn.SyncBatchNorm(2)
    with pytest.raises(MisconfigurationException, match="does not work with SyncBatchNorm"):
        check_wrapped(wrapped)
    check_wrapped(nn.SyncBatchNorm(2))  # on one device
