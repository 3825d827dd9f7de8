"""The callback in real fits: what is trained stays the same bit for bit, and the loader is another one."""

from __future__ import annotations

import gc
import logging
import multiprocessing
import os
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, RandomSampler, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

from lightning_speedkit.data.settings import loader_auto
from lightning_speedkit.data.settings.loader_auto import LoaderSettingsSearch, suggest_for
from lightning_speedkit.data.settings.loader_settings import LoaderSettings
from lightning_speedkit.data.settings.settled_loader import SettledLoader
from lightning_speedkit.errors import LoaderError
from tests.data.processes import wait_until
from tests.two_ranks import on_two_ranks

NONE = LoaderSettings(num_workers=0)
KEPT = LoaderSettings(num_workers=2, prefetch_factor=2, persistent_workers=True)


class Numbers(Dataset[tuple[Tensor, int]]):
    def __len__(self) -> int:
        return 11

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.full((3,), float(index)), index


class Model(LightningModule):
    """Draws in each step, and keeps what it has seen."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.dropout = nn.Dropout(0.5)
        self.seen: list[list[int]] = []
        self.losses: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if isinstance(batch, dict):
            batch = batch["one"]
        loss = self.dropout(self.layer(batch[0])).pow(2).mean()
        self.seen.append(batch[1].tolist())
        self.losses.append(float(loss))
        return loss

    def on_train_epoch_start(self) -> None:
        torch.rand(1)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.01)


class _Watch(Callback):
    """The training loaders that Lightning really uses."""

    def __init__(self) -> None:
        self.loaders: Any = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.loaders = trainer.train_dataloader


class _Batches:
    """A loader of another kind: any iterable is one."""

    def __iter__(self) -> Iterator[Any]:
        return iter([(torch.zeros(2, 3), torch.zeros(2))] * 4)

    def __len__(self) -> int:
        return 4


def _loader(**arguments: Any) -> DataLoader[Any]:
    return DataLoader(Numbers(), **{"batch_size": 3, "shuffle": True, **arguments})


def _trainer(callbacks: list[Callback], **arguments: Any) -> Trainer:
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    quiet |= {"enable_checkpointing": False, "accelerator": "cpu", "max_epochs": 3}
    return Trainer(callbacks=callbacks, **{**quiet, **arguments})


def _fit(callbacks: list[Callback], data: Any, kind: type[Model] = Model, **arguments: Any) -> Model:
    torch.manual_seed(5)
    model = kind()
    trainer = _trainer(callbacks, **arguments)
    given = {"datamodule": data} if isinstance(data, LightningDataModule) else {"train_dataloaders": data}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(model, **given)
    model.random_state = torch.get_rng_state()  # type: ignore[assignment]
    return model


def _same(one: Model, other: Model) -> None:
    assert one.seen == other.seen
    assert one.losses == other.losses
    assert torch.equal(one.random_state, other.random_state)  # type: ignore[arg-type]
    torch.testing.assert_close(one.state_dict(), other.state_dict(), rtol=0, atol=0)


@pytest.fixture
def choose(monkeypatch: pytest.MonkeyPatch) -> Callable[[LoaderSettings], list[dict[str, Any]]]:
    """Settings as if they had been measured; gives the arguments of the measurements that were asked for."""

    def chosen(settings: LoaderSettings) -> list[dict[str, Any]]:
        asked: list[dict[str, Any]] = []

        def suggest(hardware: Any, dataset: Any, **arguments: Any) -> LoaderSettings:
            asked.append({"hardware": hardware, "dataset": dataset, **arguments})
            return settings

        monkeypatch.setattr(loader_auto, "suggest_loader", suggest)
        return asked

    return chosen


# What is trained


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"num_workers": 1},
        {"num_workers": 1, "persistent_workers": True, "generator": 3},
        {"shuffle": False, "sampler": 4},
        {"batch_size": 1, "shuffle": False, "batch_sampler": 5},
    ],
    ids=str,
)
@pytest.mark.parametrize("settings", [NONE, KEPT], ids=lambda s: f"to {s.num_workers}")
def test_order_loss_and_random_state_are_those_of_the_users_loader(
    arguments: dict[str, Any], settings: LoaderSettings, choose: Any
) -> None:
    def loader() -> DataLoader[Any]:
        own = dict(arguments)
        if "generator" in own:
            own["generator"] = torch.Generator().manual_seed(own["generator"])
        if "sampler" in own:
            own["sampler"] = RandomSampler(Numbers(), replacement=True, num_samples=7)
        if "batch_sampler" in own:
            own["batch_sampler"] = BatchSampler(RandomSampler(Numbers()), 4, True)
        return _loader(**own)

    choose(settings)
    watch = _Watch()
    plain = _fit([], loader())
    other = _fit([LoaderSettingsSearch(), watch], loader())
    _same(other, plain)
    if arguments.get("num_workers", 0) != settings.num_workers:
        assert type(watch.loaders) is SettledLoader
        assert watch.loaders.num_workers == settings.num_workers


@pytest.fixture
def other_children() -> set[Any]:
    """What earlier tests have left to the collector, which may take it at any time."""
    return set(multiprocessing.active_children())


def test_measured_for_real(other_children: set[Any]) -> None:
    plain = _fit([], _loader())
    search = LoaderSettingsSearch(seconds=0.1, max_workers=1)
    _same(_fit([search], _loader()), plain)
    (settings,) = search.settings
    assert settings is not None
    assert {trial.num_workers for trial in settings.trials} == {0, 1}
    assert wait_until(lambda: set(multiprocessing.active_children()) <= other_children)


class _FromModule(Model):
    def train_dataloader(self) -> Any:
        return _loader()


class _Data(LightningDataModule):
    def __init__(self) -> None:
        super().__init__()
        self.made = 0

    def train_dataloader(self) -> Any:
        self.made += 1
        return _loader()


def test_a_loader_of_the_module_or_of_a_datamodule(choose: Any) -> None:
    choose(KEPT)
    plain = _fit([], _loader())
    for data, kind in ((None, _FromModule), (_Data(), Model)):
        watch = _Watch()
        other = _fit([LoaderSettingsSearch(), watch], data, kind)
        assert type(watch.loaders) is SettledLoader
        _same(other, plain)


class _CountsWorkers(Callback):
    def __init__(self, others: set[Any]) -> None:
        self.others = others
        self.workers: list[int] = []

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        gc.collect()
        wait_until(lambda: self._count() <= 2, 10)  # torch does not wait for those that it ends
        self.workers.append(self._count())

    def _count(self) -> int:
        return len(set(multiprocessing.active_children()) - self.others)


def test_reloaded_loaders_get_the_settings_without_a_second_measurement(choose: Any, other_children: set[Any]) -> None:
    asked = choose(KEPT)
    plain = _fit([], _Data(), reload_dataloaders_every_n_epochs=1)
    data, count = _Data(), _CountsWorkers(other_children)
    _same(_fit([LoaderSettingsSearch(), count], data, reload_dataloaders_every_n_epochs=1), plain)
    assert data.made == 3
    assert count.workers == [2, 2, 2]  # those of a loader that was replaced have ended
    assert len(asked) == 1
    gc.collect()
    assert wait_until(lambda: set(multiprocessing.active_children()) <= other_children)


class _Estimates(Model):
    def configure_optimizers(self) -> Any:
        assert self.trainer.estimated_stepping_batches == 12  # asks for the loaders before on_fit_start
        return super().configure_optimizers()


def test_estimated_stepping_batches_may_be_read_first(choose: Any) -> None:
    asked = choose(KEPT)
    plain = _fit([], _loader(), _Estimates)
    _same(_fit([LoaderSettingsSearch()], _loader(), _Estimates), plain)
    assert len(asked) == 1


def test_resume_sees_the_samples_of_the_unbroken_run(choose: Any, tmp_path: Any) -> None:
    """A distributed sampler orders by epoch; workers that begin too early would order a resumed epoch as the first."""
    choose(KEPT)

    def loader() -> DataLoader[Any]:
        return _loader(shuffle=False, sampler=DistributedSampler(Numbers(), 1, 0, seed=7))

    whole = _fit([], loader(), max_epochs=4)
    trainer = _trainer([LoaderSettingsSearch()], max_epochs=2)
    trainer.fit(Model(), loader())
    trainer.save_checkpoint(tmp_path / "half.ckpt")
    resumed = Model()
    _trainer([LoaderSettingsSearch()], max_epochs=4).fit(resumed, loader(), ckpt_path=tmp_path / "half.ckpt")
    assert resumed.seen == whole.seen[len(whole.seen) // 2 :]


# What is asked for


def test_what_is_measured_is_what_the_loader_loads(choose: Any) -> None:
    asked = choose(NONE)

    def collate(samples: list[Any]) -> Any:
        return torch.utils.data.default_collate(samples)

    def init(worker: int) -> None:
        return None

    loader = _loader(
        batch_size=4, shuffle=False, collate_fn=collate, worker_init_fn=init, num_workers=1,
        multiprocessing_context="spawn",
    )  # fmt: skip
    suggest_for(loader, seconds=1.5, max_workers=7, loaders_on_machine=2)
    (arguments,) = asked
    assert arguments["dataset"] is loader.dataset
    assert (arguments["batch_size"], arguments["shuffle"], arguments["seconds"]) == (4, False, 1.5)
    assert (arguments["collate_fn"], arguments["worker_init_fn"]) == (collate, init)
    assert (arguments["max_workers"], arguments["loaders_on_machine"]) == (7, 2)
    assert arguments["multiprocessing_context"] == "spawn"


@pytest.mark.parametrize(
    ("arguments", "size"),
    [
        ({"batch_size": None, "shuffle": False}, None),
        ({"batch_size": 1, "shuffle": False, "batch_sampler": [[0, 1, 2], [3, 4], [5], [6]]}, 11 // 4),
        ({"batch_size": 1, "shuffle": False, "batch_sampler": iter([[0]])}, 32),
        ({"batch_size": 20}, 20),
    ],
    ids=["none", "of a list", "of an iterator", "given"],
)
def test_size_of_a_batch(arguments: dict[str, Any], size: int | None, choose: Any) -> None:
    asked = choose(NONE)
    suggest_for(_loader(**arguments))
    assert asked[0]["batch_size"] == size


def test_several_loaders_share_time_and_cores_and_keep_their_places(choose: Any) -> None:
    asked = choose(KEPT)
    plain = _fit([], {"one": _loader(), "two": [_loader(), _Batches()]})
    watch, search = _Watch(), LoaderSettingsSearch(seconds=3.0)
    given = {"one": _loader(), "two": [_loader(), _Batches()]}
    _same(_fit([search, watch], given), plain)
    assert [(arguments["seconds"], arguments["loaders_on_machine"]) for arguments in asked] == [(1.5, 2)] * 2
    assert type(watch.loaders["one"]) is type(watch.loaders["two"][0]) is SettledLoader
    assert isinstance(watch.loaders["two"][1], _Batches)
    assert search.settings == (KEPT, KEPT, None)
    assert type(given["one"]) is DataLoader


def test_a_combined_loader_keeps_its_mode_and_is_not_changed(choose: Any) -> None:
    choose(KEPT)
    given = CombinedLoader({"one": _loader(), "two": _loader(batch_size=5)}, "min_size")
    model = _fit([LoaderSettingsSearch()], given, max_epochs=1)
    assert len(model.seen) == 3  # the shorter one ends it
    assert all(type(loader) is DataLoader for loader in given.flattened)


# What is left alone


class _Stream(IterableDataset[tuple[Tensor, int]]):
    def __iter__(self) -> Iterator[tuple[Tensor, int]]:
        return (Numbers()[index] for index in range(6))


class _OwnKind(DataLoader[Any]):
    pass


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (_Batches(), "a _Batches is no torch DataLoader"),
        (DataLoader(_Stream(), batch_size=2), "an IterableDataset"),
        (_OwnKind(Numbers(), batch_size=2), "a _OwnKind is a DataLoader of its own kind"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_cannot_be_made_anew_is_left_alone_and_told_once(
    data: Any, reason: str, choose: Any, caplog: pytest.LogCaptureFixture
) -> None:
    asked = choose(KEPT)
    watch, search = _Watch(), LoaderSettingsSearch()
    with caplog.at_level(logging.INFO):
        _fit([search, watch], data)
    assert watch.loaders is data
    assert asked == []
    assert search.settings == (None,)
    assert [reason in message for message in caplog.messages if "LoaderSettingsSearch" in message] == [True]


@pytest.mark.parametrize(
    "setting", [{"fast_dev_run": True}, {"barebones": True}, {"overfit_batches": 2}], ids=lambda s: next(iter(s))
)
def test_fast_dev_run_barebones_and_overfit_batches_are_honoured(setting: dict[str, Any], choose: Any) -> None:
    asked = choose(KEPT)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        Trainer(max_epochs=1, accelerator="cpu", callbacks=[LoaderSettingsSearch()], **setting).fit(Model(), _loader())
    assert asked == []


def test_a_dataset_that_cannot_be_measured_is_trained_on_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any, **more: Any) -> LoaderSettings:
        raise LoaderError("it needs a licence.")

    monkeypatch.setattr(loader_auto, "suggest_loader", fail)
    watch = _Watch()
    model, trainer = Model(), _trainer([LoaderSettingsSearch(), watch])
    with pytest.warns(UserWarning, match="as it is. it needs a licence."):
        trainer.fit(model, _loader())
    assert type(watch.loaders) is DataLoader
    assert len(model.seen) == 12


def test_settings_that_the_loader_has_already_change_nothing(choose: Any, caplog: pytest.LogCaptureFixture) -> None:
    choose(NONE)
    given, watch = _loader(), _Watch()
    with caplog.at_level(logging.INFO):
        _fit([LoaderSettingsSearch(), watch], given)
    assert watch.loaders is given
    assert any("LoaderSettingsSearch keeps num_workers=0" in message for message in caplog.messages)


# Before and after


def test_what_was_chosen_and_why_is_logged(choose: Any, caplog: pytest.LogCaptureFixture) -> None:
    choose(LoaderSettings(num_workers=1, prefetch_factor=2, reason="because it is fast"))
    with caplog.at_level(logging.INFO):
        _fit([LoaderSettingsSearch()], _loader())
    (message,) = [message for message in caplog.messages if "LoaderSettingsSearch" in message]
    assert "chose num_workers=1" in message
    assert "because it is fast" in message


def test_a_second_fit_measures_again_and_everything_is_undone(choose: Any, other_children: set[Any]) -> None:
    asked = choose(KEPT)
    search, given = LoaderSettingsSearch(), _loader()
    trainer = _trainer([search], max_epochs=1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(Model(), given)
        assert "dataloader" not in vars(trainer.fit_loop._data_source)
        trainer.fit_loop.max_epochs = 2
        trainer.fit(Model(), given)
        _trainer([search], max_epochs=1).fit(Model(), given)
    assert len(asked) == 3
    assert (given.num_workers, type(given)) == (0, DataLoader)
    gc.collect()
    assert wait_until(lambda: set(multiprocessing.active_children()) <= other_children)


class _Fails(Model):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if batch_idx == 1:
            raise ZeroDivisionError
        return super().training_step(batch, batch_idx)


def test_an_exception_undoes_it_too(choose: Any) -> None:
    choose(KEPT)
    trainer = _trainer([LoaderSettingsSearch()])
    with pytest.raises(ZeroDivisionError):
        trainer.fit(_Fails(), _loader())
    assert "dataloader" not in vars(trainer.fit_loop._data_source)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"seconds": 0}, ValueError),
        ({"seconds": True}, TypeError),
        ({"seconds": "5"}, TypeError),
        ({"max_workers": -1}, ValueError),
        ({"max_workers": 1.0}, TypeError),
    ],
    ids=str,
)
def test_wrong_arguments(arguments: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error, match=next(iter(arguments))):
        LoaderSettingsSearch(**arguments)


# Two ranks


def _on_a_rank() -> tuple[list[list[int]], list[list[int]], str, int, list[int]]:
    """Rank 0 decides for two workers; rank 1 would decide for none. First without the callback, then with it."""
    own = KEPT if os.environ["RANK"] == "0" else NONE
    asked: list[int] = []

    def suggest(*arguments: Any, **more: Any) -> LoaderSettings:
        asked.append(more["loaders_on_machine"])
        return own

    loader_auto.suggest_loader = suggest
    watch = _Watch()
    plain = _fit([], _loader(), strategy="ddp", devices=2, max_epochs=2)
    settled = _fit([LoaderSettingsSearch(), watch], _loader(), strategy="ddp", devices=2, max_epochs=2)
    loader = watch.loaders
    assert isinstance(loader.sampler, DistributedSampler)
    _same(settled, plain)
    return plain.seen, settled.seen, type(loader).__name__, loader.num_workers, asked


def test_rank_zero_decides_for_all_and_each_rank_sees_its_own_samples() -> None:
    first, second = on_two_ranks(_on_a_rank)
    assert first[0] == first[1] != second[0] == second[1]
    assert first[2:4] == second[2:4] == ("SettledLoader", 2)
    assert (first[4], second[4]) == ([2], [])


def test_a_sequential_sampler_is_measured_in_order(choose: Any) -> None:
    asked = choose(NONE)
    suggest_for(_loader(shuffle=False, sampler=SequentialSampler(Numbers())))
    assert asked[0]["shuffle"] is False
