"""The DataModules with a Trainer: what is served, in which order, on one process and on two."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, Dataset, IterableDataset

from lightning_speedkit.data import LMDBDataModule, SpeedkitDataModule
from lightning_speedkit.data.device.device_transform import DeviceTransform
from tests.data.numbers import SIZES, Numbers, Recorder, flat, trainer
from tests.two_ranks import on_two_ranks


def epochs_of(data: SpeedkitDataModule, epochs: int = 2) -> list[list[int]]:
    model = Recorder()
    trainer(max_epochs=epochs, limit_val_batches=0).fit(model, datamodule=data)
    seen = flat(model.seen["train"])
    return [seen[i : i + SIZES["train"]] for i in range(0, len(seen), SIZES["train"])]


LOADERS = [
    ("auto", None),
    ("auto", 0),
    ("threads", 2),
    ("processes", 2),
    ("inline", None),
    ("torch", None),
    ("torch", 2),
]


@pytest.mark.parametrize(("loader", "workers"), LOADERS)
def test_all_stages(tmp_path: Path, loader: str, workers: int | None) -> None:
    model, data = Recorder(), Numbers(tmp_path / "stores", batch_size=4, loader=loader, num_workers=workers)
    run = trainer(max_epochs=2)
    run.fit(model, datamodule=data)
    run.validate(model, datamodule=data)
    run.test(model, datamodule=data)
    predictions = run.predict(model, datamodule=data)
    first, second = flat(model.seen["train"][:6]), flat(model.seen["train"][6:])
    assert sorted(first) == sorted(second) == list(range(24))
    assert first != second
    assert flat(model.seen["val"]) == list(range(6)) * 3
    assert model.seen["test"] == [[0, 1, 2, 3], [4, 5, 6]]
    assert model.seen["predict"] == [[0, 1, 2, 3], [4]]
    assert len(predictions) == 2
    assert {file.name for file in data.root.iterdir()} == {f"{split}.lmdb" for split in SIZES}


def test_the_order_is_a_function_of_seed_and_epoch(tmp_path: Path) -> None:
    def expected(seed: int) -> list[list[int]]:  # torch's documented order of a DistributedSampler of one rank
        return [torch.randperm(24, generator=torch.Generator().manual_seed(seed + e)).tolist() for e in (0, 1)]

    first = epochs_of(Numbers(tmp_path, batch_size=5, seed=3))
    torch.manual_seed(99)
    assert epochs_of(Numbers(tmp_path, batch_size=5, seed=3, num_workers=1)) == first == expected(3)
    assert epochs_of(Numbers(tmp_path, batch_size=5, seed=4)) == expected(4) != first
    assert epochs_of(Numbers(tmp_path, batch_size=5, shuffle=False)) == [list(range(24))] * 2


def test_a_resumed_run_sees_the_order_of_its_epoch(tmp_path: Path) -> None:
    torch.manual_seed(1)
    whole = Recorder()
    trainer(max_epochs=3, limit_val_batches=0).fit(whole, datamodule=Numbers(tmp_path, batch_size=6))
    torch.manual_seed(1)
    first, second = Recorder(), Recorder()
    run = trainer(max_epochs=1, limit_val_batches=0)
    run.fit(first, datamodule=Numbers(tmp_path, batch_size=6))
    run.save_checkpoint(tmp_path / "a.ckpt")
    resumed = trainer(max_epochs=3, limit_val_batches=0)
    resumed.fit(second, datamodule=Numbers(tmp_path, batch_size=6), ckpt_path=tmp_path / "a.ckpt")
    assert first.seen["train"] + second.seen["train"] == whole.seen["train"]
    assert torch.equal(second.layer.weight, whole.layer.weight)


@pytest.mark.parametrize("workers", [0, 1])
def test_the_global_random_state_is_neither_read_nor_changed(tmp_path: Path, workers: int) -> None:
    data = Numbers(tmp_path, batch_size=5, num_workers=workers)
    data.prepare_data()
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    for loader in (data.train_dataloader(), data.val_dataloader(), data.test_dataloader()):
        list(loader)
    after = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    assert torch.equal(before[0], after[0])
    assert before[1:] == after[1:]


class RandomTransform(Numbers):
    def transform(self, split: str) -> Callable[[Any], Any]:
        return lambda sample: torch.randint(1 << 30, (1,))


def test_workers_draw_their_own_numbers_from_the_seed(tmp_path: Path) -> None:
    def drawn(seed: int) -> list[int]:
        data = RandomTransform(tmp_path, batch_size=1, num_workers=2, seed=seed, shuffle=False)
        data.prepare_data()
        return [int(batch) for batch in data.train_dataloader()]

    first = drawn(1)
    torch.manual_seed(5)
    assert drawn(1) == first
    assert len(set(first)) == 24
    assert drawn(2) != first


def test_overfitting_takes_the_same_first_batches_each_time(tmp_path: Path) -> None:
    model = Recorder()
    trainer(max_epochs=2, overfit_batches=2).fit(model, datamodule=Numbers(tmp_path, batch_size=4))
    assert model.seen["train"] == [[0, 1, 2, 3], [4, 5, 6, 7]] * 2


def test_a_second_fit_with_the_same_objects(tmp_path: Path) -> None:
    model, data, run = Recorder(), Numbers(tmp_path, batch_size=4, num_workers=1), trainer(max_epochs=1)
    run.fit(model, datamodule=data)
    run.fit_loop.max_epochs = 2
    run.fit(model, datamodule=data)
    assert [sorted(flat(model.seen["train"][i : i + 6])) for i in (0, 6)] == [list(range(24))] * 2


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"batch_size": 0}, ValueError),
        ({"batch_size": 2.0}, TypeError),
        ({"batch_size": True}, TypeError),
        ({"num_workers": -1}, ValueError),
        ({"prefetch_factor": 0}, ValueError),
        ({"seed": -1}, ValueError),
        ({"shuffle": "no"}, ValueError),
        ({"shuffle": 1}, TypeError),
        ({"loader": "thread"}, ValueError),
        ({"loader": None}, TypeError),
        ({"remainder": "exact"}, ValueError),
        ({"shuffle": None}, TypeError),
        ({"drop_last": 3}, TypeError),
        ({"pin_memory": "x"}, TypeError),
        ({"pin_memory": 1}, TypeError),
        ({"start_method": "spwan"}, ValueError),
        ({"start_method": True}, TypeError),
    ],
)
def test_arguments_are_checked(tmp_path: Path, arguments: dict[str, Any], error: type[Exception]) -> None:
    name, value = next(iter(arguments.items()))
    with pytest.raises(error, match=f"{name} must be .*got {value!r}"):
        LMDBDataModule(tmp_path, **arguments)


def test_any_dataset_can_be_served() -> None:
    class Squares(SpeedkitDataModule):
        def dataset(self, split: str) -> list[tuple[torch.Tensor, int]] | None:
            return [(torch.full((4,), i / 10), i) for i in range(24)] if split == "train" else None

    class NoDataset(SpeedkitDataModule):
        def dataset(self, split: str) -> None:
            return None

    assert sorted(epochs_of(Squares(batch_size=8), epochs=1)[0]) == list(range(24))
    with pytest.raises(MisconfigurationException, match="NoDataset has no dataset for the split 'train'"):
        trainer(max_epochs=1).fit(Recorder(), datamodule=NoDataset())
    with pytest.raises(NotImplementedError, match="must define dataset"):
        SpeedkitDataModule().train_dataloader()


class Streamed(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(3))


@pytest.mark.parametrize("split", ["train", "val", "test", "predict"])
@pytest.mark.parametrize(
    ("given", "name"),
    [(DataLoader([1]), "DataLoader"), (Streamed(), "Streamed"), (iter([1]), "list_iterator"), (5, "int")],
)
def test_what_is_no_map_style_dataset_is_named(given: Any, name: str, split: str) -> None:
    class Given(SpeedkitDataModule):
        def dataset(self, split: str) -> Any:
            return given

    with pytest.raises(TypeError, match=rf"dataset\('{split}'\) of Given returned an? {name}: it must be a map-style"):
        getattr(Given(), f"{split}_dataloader")()


class Doubled(Numbers):
    """A ``collate`` of its own, which uses what the object holds and, in the training process, the Trainer."""

    factor = 2

    def collate(self, samples: Any) -> Any:
        vectors, numbers = super().collate(samples)
        return vectors, numbers * self.factor, self.trainer is not None


@pytest.mark.parametrize("data_class", [Numbers, Doubled])
def test_what_workers_get_pickled_holds_no_trainer(tmp_path: Path, data_class: type[Numbers]) -> None:
    data = data_class(tmp_path, batch_size=4, shuffle=False)
    data.prepare_data()
    data.trainer = trainer()
    data.trainer.unpicklable = lambda: None  # type: ignore[attr-defined]
    data.factor = 3  # type: ignore[attr-defined]
    with pytest.raises((AttributeError, pickle.PicklingError)):
        pickle.dumps(data)
    data.loader = "torch"
    loader = data.train_dataloader()
    samples = [loader.dataset[i] for i in range(4)]
    there = pickle.loads(pickle.dumps(loader.collate_fn))(samples)
    here = loader.collate_fn(samples)
    if data_class is Doubled:
        assert (there[1].tolist(), there[2], here[2]) == ([0, 3, 6, 9], False, True)
    assert torch.equal(there[1], here[1])
    assert data.trainer is not None


def test_a_collate_that_is_set_on_the_object_counts(tmp_path: Path) -> None:
    data = Numbers(tmp_path, batch_size=4, shuffle=False)
    data.prepare_data()
    data.collate = len  # type: ignore[method-assign,assignment]
    assert next(iter(data.train_dataloader())) == 4


class Unpicklable(Recorder):
    def __init__(self) -> None:
        super().__init__()
        self.function = lambda x: x


@pytest.fixture
def fork_server() -> Iterator[None]:
    """Processes are started by it while the test runs, unless the test says otherwise."""
    before = multiprocessing.get_start_method(allow_none=True)
    multiprocessing.set_start_method("forkserver", force=True)
    yield
    multiprocessing.set_start_method(before, force=True)


@pytest.mark.parametrize("loader", ["torch", "processes"])
def test_a_fit_with_workers_that_are_not_forked(tmp_path: Path, fork_server: None, loader: str) -> None:
    """Each batch comes from a process that must not get the model, which cannot be pickled."""
    data, model = Numbers(tmp_path, batch_size=8, loader=loader, num_workers=1, shuffle=False), Unpicklable()
    trainer(max_epochs=2, limit_val_batches=0).fit(model, datamodule=data)
    assert flat(model.seen["train"]) == list(range(24)) * 2


class Drawing(SpeedkitDataModule):
    """Samples that are random numbers of the workers."""

    def dataset(self, split: str) -> Any:
        return Draws() if split in ("train", "val") else None


class Draws(Dataset[int]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        return int(torch.randint(1 << 40, (1,)))


class Drawn(Recorder):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.seen["train"].append(batch.tolist())
        return self.layer.weight.sum()


@pytest.mark.parametrize("loader", ["torch", "auto", "processes", "inline"])
def test_a_resumed_run_does_not_repeat_the_workers_numbers(tmp_path: Path, loader: str) -> None:
    def fit(epochs: int, path: Path | None = None) -> tuple[list[int], Any]:
        model, run = Drawn(), trainer(max_epochs=epochs, limit_val_batches=0)
        data = Drawing(batch_size=2, loader=loader, num_workers=1 if loader == "torch" else None)
        run.fit(model, datamodule=data, ckpt_path=path)
        return flat(model.seen["train"]), run

    first, run = fit(1)
    run.save_checkpoint(tmp_path / "a.ckpt")
    second, _ = fit(2, tmp_path / "a.ckpt")
    assert len(set(first + second)) == 8
    assert fit(2, tmp_path / "a.ckpt")[0] == second
    assert fit(1)[0] == first
    if loader != "torch":
        assert fit(2)[0] == first + second  # and they are those of the unbroken run


Seen = tuple[list[list[int]], list[list[int]]]


def _fit_on_a_rank(root: str) -> list[Seen]:
    torch.manual_seed(int(os.environ["RANK"]))  # ranks that differ here must still agree on the order
    seen = []
    for shuffle, workers in ((True, 1), (False, 0)):
        model, data = Recorder(), Numbers(root, batch_size=4, shuffle=shuffle, num_workers=workers, seed=2)
        trainer(max_epochs=2, devices=2, strategy="ddp").fit(model, datamodule=data)
        seen.append((model.seen["train"], model.seen["val"]))
    return seen


def test_two_ranks_read_disjoint_halves_of_one_order(tmp_path: Path) -> None:
    first, second = on_two_ranks(_fit_on_a_rank, str(tmp_path / "stores"))
    for shuffle, (train, val), (other_train, other_val) in zip((True, False), first, second, strict=True):
        for epoch in range(2):
            halves = [flat(part[3 * epoch : 3 * epoch + 3]) for part in (train, other_train)]
            order = torch.randperm(24, generator=torch.Generator().manual_seed(2 + epoch)).tolist()
            order = order if shuffle else list(range(24))
            assert halves == [order[0::2], order[1::2]]
        assert sorted(flat(val[:1] + other_val[:1])) == list(range(6))


# A run that stops in the middle of an epoch and goes on


class ReadsSteps(Recorder):
    """Reads the number of steps before training, at which Lightning makes the loaders and forgets their state."""

    def configure_optimizers(self) -> Any:
        assert self.trainer.estimated_stepping_batches > 0
        return super().configure_optimizers()


def _stop_and_go(
    folder: Path, model: type[Recorder], loader: str, stop: int, **settings: Any
) -> tuple[Recorder, Recorder, Recorder]:
    def run(**more: Any) -> Any:
        return trainer(limit_val_batches=0, **{"max_epochs": 3, **settings, **more})

    def data() -> Numbers:
        return Numbers(folder, batch_size=5, seed=1, loader=loader)

    models = []
    for _ in range(3):
        torch.manual_seed(1)
        models.append(model())
    whole, first, second = models
    run().fit(whole, datamodule=data())
    save = ModelCheckpoint(folder / "checkpoints", every_n_train_steps=stop, save_top_k=-1)
    run(max_steps=stop, callbacks=[save], enable_checkpointing=True).fit(first, datamodule=data())
    run().fit(second, datamodule=data(), ckpt_path=next((folder / "checkpoints").glob("*.ckpt")))
    return whole, first, second


@pytest.mark.parametrize("stop", [1, 4, 5, 7, 10])
@pytest.mark.parametrize("model", [Recorder, ReadsSteps])
def test_a_run_resumes_in_the_middle_of_an_epoch(tmp_path: Path, model: type[Recorder], stop: int) -> None:
    """24 samples in batches of 5 are 5 steps an epoch: the stops are within, at the end, and at the start of one."""
    whole, first, second = _stop_and_go(tmp_path, model, "auto", stop)
    assert first.seen["train"] + second.seen["train"] == whole.seen["train"]
    assert torch.equal(second.layer.weight, whole.layer.weight)


@pytest.mark.parametrize("loader", ["processes", "inline"])
def test_every_kind_of_worker_resumes(tmp_path: Path, loader: str) -> None:
    whole, first, second = _stop_and_go(tmp_path, ReadsSteps, loader, 7)
    assert first.seen["train"] + second.seen["train"] == whole.seen["train"]


def test_accumulation_goes_on_where_it_stopped(tmp_path: Path) -> None:
    whole, first, second = _stop_and_go(tmp_path, ReadsSteps, "auto", 2, accumulate_grad_batches=2)
    assert first.seen["train"] + second.seen["train"] == whole.seen["train"]
    assert torch.equal(second.layer.weight, whole.layer.weight)


def _train_on_ranks(folder: str, ranks: int, checkpoint: str | None, steps: int) -> list[list[int]]:
    model = ReadsSteps()
    run = trainer(
        max_epochs=2,
        max_steps=steps,
        limit_val_batches=0,
        devices=ranks,
        strategy="ddp" if ranks > 1 else "auto",
        enable_checkpointing=True,
        callbacks=[ModelCheckpoint(folder, filename=f"{ranks}", every_n_train_steps=4)],
    )
    data = Numbers(folder, batch_size=4 // ranks, seed=1)
    run.fit(model, datamodule=data, ckpt_path=checkpoint)
    return model.seen["train"]


@pytest.mark.parametrize("sizes", [(2, 1), (1, 2)])
def test_a_run_goes_on_with_another_number_of_ranks(tmp_path: Path, sizes: tuple[int, int]) -> None:
    """24 samples, 4 in a step over all ranks; 4 steps are done when the run stops, and the rest are 2 + 6."""
    Numbers(tmp_path).prepare_data()
    seen: list[list[int]] = []
    for ranks, checkpoint, steps in ((sizes[0], None, 4), (sizes[1], f"{tmp_path}/{sizes[0]}.ckpt", -1)):
        arguments = (str(tmp_path), ranks, checkpoint, steps)
        parts = on_two_ranks(_train_on_ranks, *arguments) if ranks == 2 else [_train_on_ranks(*arguments)]
        assert len({len(part) for part in parts}) == 1
        seen += [sorted(flat(list(batches))) for batches in zip(*parts, strict=True)]
    expected = []
    for epoch in (0, 1):
        order = torch.randperm(24, generator=torch.Generator().manual_seed(1 + epoch)).tolist()
        expected += [sorted(order[i : i + 4]) for i in range(0, 24, 4)]
    assert seen == expected


def _evaluate_on_a_rank(root: str) -> dict[str, Any]:
    model, data = Recorder(), Numbers(root, batch_size=2)
    run = trainer(devices=2, strategy="ddp")
    run.validate(model, datamodule=data)
    run.test(model, datamodule=data)
    run.predict(model, datamodule=data)
    return model.seen


def test_evaluation_on_two_ranks_sees_every_sample_once(tmp_path: Path) -> None:
    Numbers(tmp_path).prepare_data()
    first, second = on_two_ranks(_evaluate_on_a_rank, str(tmp_path))
    for split in ("val", "test", "predict"):
        assert sorted(flat(first[split]) + flat(second[split])) == list(range(SIZES[split])), split
        assert len(first[split]) == len(second[split])


def test_two_datamodules_over_the_same_files(tmp_path: Path) -> None:
    first, second = Numbers(tmp_path, batch_size=4, shuffle=False), Numbers(tmp_path, batch_size=6, shuffle=False)
    first.prepare_data()
    batches = list(zip(first.train_dataloader(), second.train_dataloader(), strict=False))
    assert flat([numbers.tolist() for (_, numbers), _ in batches]) == list(range(16))
    assert flat([numbers.tolist() for _, (_, numbers) in batches]) == list(range(24))


class Scaled(Numbers):
    def device_transform(self) -> DeviceTransform:
        return DeviceTransform(train=[_negated], always=[_doubled])


def _negated(images: torch.Tensor) -> torch.Tensor:
    return -images


def _doubled(images: torch.Tensor) -> torch.Tensor:
    return 2 * images


class Sees(Recorder):
    def __init__(self) -> None:
        super().__init__()
        self.values: dict[str, list[float]] = {"train": [], "val": []}

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.values["train"] += batch[0][:, 0].tolist()
        return self.layer(batch[0]).square().mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if not self.trainer.sanity_checking:
            self.values["val"] += batch[0][:, 0].tolist()


class Shifts(Sees):
    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return (batch[0] + 1, *batch[1:])


@pytest.mark.parametrize(("model", "shift"), [(Sees, 0), (Shifts, 1)])
@pytest.mark.parametrize("loader", ["auto", "torch"])
def test_whole_batches_are_transformed_before_the_module_has_them(
    tmp_path: Path, model: type[Sees], shift: int, loader: str, recwarn: pytest.WarningsRecorder
) -> None:
    plain, transformed = Sees(), model()
    for network, data in ((plain, Numbers), (transformed, Scaled)):
        trainer(max_epochs=1).fit(network, datamodule=data(tmp_path, batch_size=4, loader=loader))
    assert transformed.values["train"] == pytest.approx([-2 * value + shift for value in plain.values["train"]])
    assert transformed.values["val"] == pytest.approx([2 * value + shift for value in plain.values["val"]])
    if not shift:  # else Lightning says that both have the hook, and does not know that ours calls the module's
        assert not [warning for warning in recwarn if "on_after_batch_transfer" in str(warning.message)]


def test_what_is_no_device_transform_is_named(tmp_path: Path) -> None:
    class Lists(Numbers):
        def device_transform(self) -> Any:
            return [torch.nn.Identity()]

    with pytest.raises(TypeError, match=r"device_transform\(\) of Lists must return a DeviceTransform or None, got \["):
        trainer(max_epochs=1).fit(Recorder(), datamodule=Lists(tmp_path))


def test_a_root_that_is_wrong_says_why(tmp_path: Path) -> None:
    Numbers(tmp_path).prepare_data()
    for root, words in (
        (tmp_path / "nowhere", f"There is no folder {tmp_path / 'nowhere'}"),
        (tmp_path / "train.lmdb", "is a file; give the folder that it is in"),
    ):
        with pytest.raises(MisconfigurationException, match=words) as caught:
            trainer(max_epochs=1).fit(Recorder(), datamodule=LMDBDataModule(root))
        assert f"speedkit pack SOURCE {tmp_path}" in str(caught.value)


def test_a_root_that_is_a_file_of_another_kind_says_how_to_pack_it(tmp_path: Path) -> None:
    file = tmp_path / "d.npz"
    np.savez(file, x=np.zeros(3))
    with pytest.raises(MisconfigurationException, match="is a file; pack it into a folder, and give that as root") as e:
        trainer(max_epochs=1).fit(Recorder(), datamodule=LMDBDataModule(file))
    assert f"`speedkit pack {file} {tmp_path / 'd_lmdb'}`" in str(e.value)


def test_an_evaluation_of_a_checkpoint_leaves_the_next_fit_alone(tmp_path: Path) -> None:
    save = ModelCheckpoint(tmp_path, filename="a", every_n_train_steps=3)
    trainer(max_steps=3, limit_val_batches=0, callbacks=[save], enable_checkpointing=True).fit(
        Recorder(), datamodule=Numbers(tmp_path, batch_size=4)
    )
    model, data, run = Recorder(), Numbers(tmp_path, batch_size=4), trainer(max_epochs=1)
    run.validate(model, datamodule=data, ckpt_path=tmp_path / "a.ckpt")
    run.fit(model, datamodule=data)
    assert sorted(flat(model.seen["train"])) == list(range(24))


class FailsToStart(Callback):
    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        raise KeyError("before the loaders are made")


def test_a_resumed_run_that_fails_leaves_the_next_fit_alone(tmp_path: Path) -> None:
    save = ModelCheckpoint(tmp_path, filename="a", every_n_train_steps=3)
    trainer(max_steps=3, limit_val_batches=0, callbacks=[save], enable_checkpointing=True).fit(
        Recorder(), datamodule=Numbers(tmp_path, batch_size=4)
    )
    model, data = Recorder(), Numbers(tmp_path, batch_size=4)
    with pytest.raises(KeyError, match="before the loaders"):
        trainer(max_epochs=1, callbacks=[FailsToStart()]).fit(model, datamodule=data, ckpt_path=tmp_path / "a.ckpt")
    trainer(max_epochs=1).fit(model, datamodule=data)
    assert sorted(flat(model.seen["train"])) == list(range(24))


class AsksForLoaders(Callback):
    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        trainer.datamodule.train_dataloader()
        trainer.datamodule.val_dataloader()


@pytest.mark.parametrize("loader", ["threads", "processes", "inline"])
def test_somebody_asks_for_a_loader_during_the_fit(tmp_path: Path, loader: str) -> None:
    model, data = Recorder(), Numbers(tmp_path, batch_size=4, loader=loader, num_workers=None)
    states = []

    class Watch(Callback):
        def on_train_batch_end(self, trainer: Any, *rest: Any) -> None:
            states.append(data.state_dict()["train"]["position"])

    trainer(max_epochs=1, callbacks=[AsksForLoaders(), Watch()]).fit(model, datamodule=data)
    assert sorted(flat(model.seen["train"])) == list(range(24))
    assert states == [4, 8, 12, 16, 20, 24]
    assert data._loaders == []


class Breaks(Recorder):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if batch_idx == 2:
            raise KeyError("in the step")
        return super().training_step(batch, batch_idx)


def test_workers_end_when_a_step_fails(tmp_path: Path) -> None:
    data = Numbers(tmp_path, batch_size=2, loader="processes", num_workers=1)
    with pytest.raises(KeyError, match="in the step"):
        trainer(max_epochs=1).fit(Breaks(), datamodule=data)
    assert data._loaders == []
    model = Recorder()
    trainer(max_epochs=1).fit(model, datamodule=data)
    assert sorted(flat(model.seen["train"])) == list(range(24))
