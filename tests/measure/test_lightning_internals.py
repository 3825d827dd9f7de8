"""Each private attribute of Lightning still is what the kit takes it for. A failure here means: read the new Lightning,
then change ``lightning_internals.py``."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import StochasticWeightAveraging
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torchmetrics import MeanMetric

from lightning_speedkit.measure.lightning_internals import (
    forget_metric_attributes,
    forget_static_graph_flush,
    has_hook_state,
    logs_this_step,
    read_optimizers,
    set_bucket_mb,
    uncount_step,
)
from tests.measure.short_fits import Norm, Watch, short_fit


def test_is_accumulating_says_whether_a_step_follows() -> None:
    watch = Watch()
    short_fit(watch, max_epochs=2, accumulate_grad_batches=2)
    expected = [True, False, True, False, False] * 2  # 5 batches, and the last one of an epoch steps
    assert watch.accumulating == {"start": expected, "backward": expected, "end": expected}
    assert watch.steps == [0, 1, 1, 2, 3, 3, 4, 4, 5, 6]


def test_skips_backward_is_true_in_the_epoch_that_weight_averaging_adds() -> None:
    watch = Watch()
    short_fit(watch, StochasticWeightAveraging(0.1, swa_epoch_start=1), max_epochs=2)
    assert watch.skips == [False] * 10 + [True] * 5


def test_the_state_of_a_hook_is_seen_on_a_strategy_that_was_given_one() -> None:
    assert not has_hook_state(DDPStrategy())
    assert not has_hook_state(DDPStrategy(ddp_comm_hook=lambda state, bucket: bucket))
    assert has_hook_state(DDPStrategy(ddp_comm_state=object(), ddp_comm_hook=lambda state, bucket: bucket))


def test_the_static_graph_flush_starts_as_not_done_and_is_forgotten() -> None:
    strategy = DDPStrategy(static_graph=True)
    assert strategy._pl_static_graph_delay_done is False
    strategy._pl_static_graph_delay_done = True
    forget_static_graph_flush(strategy)
    assert strategy._pl_static_graph_delay_done is False


def test_a_lightning_without_the_flush_is_told() -> None:
    strategy = DDPStrategy.__new__(DDPStrategy)
    with pytest.raises(AttributeError, match="no DDPStrategy"):
        forget_static_graph_flush(strategy)


def test_the_size_of_a_bucket_is_an_argument_of_the_wrapper(monkeypatch: pytest.MonkeyPatch) -> None:
    got: dict[str, Any] = {}
    monkeypatch.setattr("lightning.pytorch.strategies.ddp.DistributedDataParallel", lambda **kwargs: got.update(kwargs))
    strategy = DDPStrategy(parallel_devices=[torch.device("cpu")], bucket_cap_mb=25)
    monkeypatch.setattr(DDPStrategy, "root_device", torch.device("cpu"))
    set_bucket_mb(strategy, 3.5)
    strategy._setup_model(nn.Linear(1, 1))
    assert got["bucket_cap_mb"] == 3.5


class _LogsMetric(Norm):
    def __init__(self) -> None:
        super().__init__()
        self.mean = MeanMetric()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.mean.update(batch)
        self.log("mean", self.mean, on_step=False, on_epoch=True)
        return super().training_step(batch, batch_idx)


class _Copies(Callback):
    """Copies the module while it knows its metrics."""

    def __init__(self) -> None:
        self.known: Any = None
        self.copy: LightningModule | None = None

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.known = dict(pl_module._metric_attributes)
        self.copy = copy.deepcopy(pl_module)


def test_metrics_are_known_by_their_ids_and_a_copy_forgets_them() -> None:
    module, copies = _LogsMetric(), _Copies()
    assert module._metric_attributes is None
    short_fit(copies, max_epochs=1, module=module)
    assert copies.known == {id(module.mean): "mean"}
    twin = copies.copy
    assert twin is not None
    assert twin._metric_attributes == copies.known
    with pytest.raises(MisconfigurationException, match="Could not find the `LightningModule` attribute"):
        short_fit(max_epochs=1, module=twin)
    forget_metric_attributes(twin)
    assert twin._metric_attributes is None
    short_fit(max_epochs=1, module=twin)


def test_a_lightning_without_the_names_of_metrics_is_told() -> None:
    with pytest.raises(AttributeError, match=r"no LightningModule\._metric_attributes"):
        forget_metric_attributes(nn.Module())  # type: ignore[arg-type]


def test_optimizers_are_read_in_every_form_that_lightning_takes() -> None:
    one = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)
    line = torch.optim.lr_scheduler.ConstantLR(one)
    config = {"scheduler": line, "interval": "step"}
    forms: list[tuple[Any, tuple[list[Any], list[Any]]]] = [
        (None, ([], [])),
        (one, ([one], [])),
        ([one, one], ([one, one], [])),
        ({"optimizer": one}, ([one], [])),
        ({"optimizer": one, "lr_scheduler": config}, ([one], [config])),
        (([one], [line]), ([one], [line])),
        (({"optimizer": one, "lr_scheduler": config},), ([one], [config])),
    ]
    for configured, expected in forms:
        assert read_optimizers(configured) == expected


def test_what_is_logged_reaches_the_loggers_every_so_many_steps() -> None:
    class Asks(Callback):
        def __init__(self) -> None:
            self.told: list[bool] = []

        def on_train_batch_end(self, trainer: Any, *rest: Any) -> None:
            self.told.append(logs_this_step(trainer))

    asks, never = Asks(), Asks()
    short_fit(asks, max_epochs=2, log_every_n_steps=3)
    assert asks.told == [place % 3 == 2 for place in range(10)]  # counted over the whole run
    short_fit(never, max_epochs=1, log_every_n_steps=0)
    assert never.told == [False] * 5


def test_a_step_can_be_taken_off_the_counter() -> None:
    class Uncounts(Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx in (1, 4):
                uncount_step(trainer)

    watch = Watch()
    short_fit(Uncounts(), watch, max_epochs=2)
    assert watch.steps == [1, 1, 2, 3, 3, 4, 4, 5, 6, 6]
