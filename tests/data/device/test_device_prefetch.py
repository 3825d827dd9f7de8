"""Fetching ahead: what is fetched when, what lives how long, which state is saved; with a device made up for it.

The made-up device records what is asked of it. The tests marked ``gpu`` do the same with a real one.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, DistributedSampler

from lightning_speedkit.data import LMDBDataset, RingLoader, write_lmdb
from lightning_speedkit.data.device.device_prefetch import DevicePrefetcher
from lightning_speedkit.errors import HardwareNeedError


class Batch:
    """On the host; a weak reference tells when it is gone."""

    def __init__(self, number: int) -> None:
        self.number = number


class MadeUpDevice:
    """Copies are done only when ``finish`` says so, or when they are waited for."""

    def __init__(self, log: list[str]) -> None:
        self.log = log
        self.copies: list[MadeUpCopy] = []

    def begin(self, batch: Any) -> MadeUpCopy:
        self.copies.append(MadeUpCopy(batch, self.log))
        return self.copies[-1]


class MadeUpCopy:
    def __init__(self, batch: Batch, log: list[str]) -> None:
        self.host: Any = batch
        self.number, self.log, self.done = batch.number, log, False
        log.append(f"copy {self.number}")

    def hand_out(self) -> int:
        self.log.append(f"hand out {self.number}")
        return self.number

    def is_done(self) -> bool:
        return self.done

    def wait(self) -> None:
        self.log.append(f"wait {self.number}")
        self.done = True


class Loader:
    """Counts what it handed out, as a loader that resumes does; may fail at a batch."""

    def __init__(self, batches: int = 4, log: list[str] | None = None, fails_at: int | None = None) -> None:
        self.batches, self.fails_at = batches, fails_at
        self.log: list[str] = [] if log is None else log
        self.state = {"position": 0, "epoch": 0}
        self.made: list[weakref.ref[Batch]] = []
        self.start = 0

    def __len__(self) -> int:
        return self.batches

    def __iter__(self) -> Iterator[Batch]:
        start, self.start = self.start, 0
        for number in range(start, self.batches):
            if number == self.fails_at:
                raise OSError(f"batch {number} cannot be read")
            self.log.append(f"fetch {number}")
            self.state["position"] = number + 1
            batch = Batch(number)
            self.made.append(weakref.ref(batch))
            yield batch
            del batch
        self.state.update(position=0, epoch=self.state["epoch"] + 1)

    def state_dict(self) -> dict[str, int]:
        return self.state  # the living one: a prefetcher must copy it

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.state = dict(state)
        self.start = state["position"]


class Epochs(Loader):
    """Numbers that say their epoch. After the last batch of an epoch it resumes with the next, as Lightning expects."""

    def __iter__(self) -> Iterator[Any]:
        for batch in super().__iter__():
            yield torch.full((2,), float(batch.number + 10 * self.state["epoch"]))

    def load_state_dict(self, state: dict[str, int]) -> None:
        ended = state["position"] == self.batches
        super().load_state_dict({"position": 0, "epoch": state["epoch"] + 1} if ended else state)


def numbers_of(batches: list[weakref.ref[Batch]]) -> list[int]:
    return [batch.number for ref in batches if (batch := ref()) is not None]


def ahead(monkeypatch: pytest.MonkeyPatch, loader: Any, depth: int = 1) -> tuple[DevicePrefetcher, MadeUpDevice]:
    device = MadeUpDevice(getattr(loader, "log", []))
    prefetcher = DevicePrefetcher(loader, "cpu", depth=depth)
    monkeypatch.setattr(prefetcher, "_copies", lambda: device.begin)
    return prefetcher, device


def test_the_next_copy_begins_before_a_batch_is_handed_out(monkeypatch: pytest.MonkeyPatch) -> None:
    loader = Loader(3)
    prefetcher, _ = ahead(monkeypatch, loader)
    for number in prefetcher:
        loader.log.append(f"compute {number}")
    assert loader.log[:-3] == [
        "fetch 0", "copy 0", "fetch 1", "copy 1", "hand out 0", "compute 0",
        "fetch 2", "copy 2", "hand out 1", "compute 1",
        "hand out 2", "compute 2",
    ]  # fmt: skip
    assert loader.log[-3:] == ["wait 0", "wait 1", "wait 2"]


@pytest.mark.parametrize("depth", [1, 2, 3, 9])
def test_so_many_batches_are_fetched_ahead_and_no_more(monkeypatch: pytest.MonkeyPatch, depth: int) -> None:
    loader = Loader(6)
    prefetcher, device = ahead(monkeypatch, loader, depth)
    for count, number in enumerate(prefetcher):
        assert number == count
        assert len(device.copies) == min(6, count + 1 + depth)


def test_nothing_is_fetched_before_the_first_batch_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    # Lightning makes the iterator before it calls set_epoch
    loader = Loader()
    prefetcher, _ = ahead(monkeypatch, loader)
    iterator = iter(prefetcher)
    assert loader.log == []
    assert next(iterator) == 0


@pytest.mark.parametrize("depth", [1, 3])
def test_memory_on_the_host_lives_until_its_copy_is_done(monkeypatch: pytest.MonkeyPatch, depth: int) -> None:
    loader = Loader(8)
    prefetcher, device = ahead(monkeypatch, loader, depth)
    # the prefetcher alone must hold the batch through its copy, so the copies are not held here
    iterator = iter(prefetcher)

    def alive() -> list[int]:
        return numbers_of(loader.made)

    for _ in range(4):
        next(iterator)
    under_way = [weakref.ref(copy) for copy in device.copies]
    device.copies.clear()
    assert alive() == list(range(4 + depth))  # not one copy is done
    for i in (0, 1):
        copy = under_way[i]()
        assert copy is not None
        copy.done = True
        del copy
    next(iterator)
    device.copies.clear()
    assert alive() == list(range(2, 5 + depth))
    del iterator
    gc.collect()
    assert alive() == []


def test_memory_of_a_copy_that_is_done_is_free_while_the_next_batch_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    alive: list[list[int]] = []

    class Watched(Loader):
        def __iter__(self) -> Iterator[Batch]:
            for batch in super().__iter__():
                alive.append([number for number in numbers_of(self.made) if number != batch.number])
                yield batch
                del batch

    class DoneAtOnce(MadeUpCopy):
        def is_done(self) -> bool:
            return True

    loader = Watched(5)
    prefetcher, _ = ahead(monkeypatch, loader)
    monkeypatch.setattr(prefetcher, "_copies", lambda: lambda batch: DoneAtOnce(batch, loader.log))
    assert list(prefetcher) == [0, 1, 2, 3, 4]
    assert alive == [[], [0], [1], [2], [3]]  # the one that is waiting to be handed out


def test_leaving_early_waits_for_the_copies_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    loader = Loader()
    prefetcher, device = ahead(monkeypatch, loader)
    for _ in prefetcher:
        break
    gc.collect()
    assert all(copy.done for copy in device.copies)
    assert loader.log[-2:] == ["wait 0", "wait 1"]
    assert list(prefetcher) == [0, 1, 2, 3]


@pytest.mark.parametrize("depth", [1, 2, 5])
@pytest.mark.parametrize("fails_at", [0, 1, 3])
def test_an_error_comes_where_its_batch_would(monkeypatch: pytest.MonkeyPatch, depth: int, fails_at: int) -> None:
    prefetcher, device = ahead(monkeypatch, Loader(5, fails_at=fails_at), depth)
    seen: list[int] = []
    with pytest.raises(OSError, match=f"batch {fails_at} cannot be read") as error:
        record(prefetcher, seen)
    assert seen == list(range(fails_at))
    assert any(entry.name == "__iter__" for entry in error.traceback)  # the loader's own line
    assert all(copy.done for copy in device.copies)


def record(items: Any, seen: list[Any]) -> None:
    for item in items:
        seen.append(item)


def test_an_error_of_the_copy_comes_there_too(monkeypatch: pytest.MonkeyPatch) -> None:
    prefetcher, device = ahead(monkeypatch, Loader())
    begin = device.begin

    def fails(batch: Batch) -> MadeUpCopy:
        if batch.number == 2:
            raise torch.OutOfMemoryError("no memory on the device")
        return begin(batch)

    monkeypatch.setattr(prefetcher, "_copies", lambda: fails)
    seen: list[int] = []
    with pytest.raises(torch.OutOfMemoryError):
        record(prefetcher, seen)
    assert seen == [0, 1]


def test_an_interrupt_is_not_put_off(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted() -> Iterator[Batch]:
        yield Batch(0)
        raise KeyboardInterrupt

    prefetcher, device = ahead(monkeypatch, interrupted())
    with pytest.raises(KeyboardInterrupt):
        next(iter(prefetcher))
    assert device.copies[0].done


@pytest.mark.parametrize("depth", [1, 3])
def test_the_state_is_that_of_the_batches_handed_out(monkeypatch: pytest.MonkeyPatch, depth: int) -> None:
    plain, loader = Loader(), Loader()
    prefetcher: Any = ahead(monkeypatch, loader, depth)[0]
    for _ in range(2):
        assert prefetcher.state_dict() == plain.state_dict()
        states = []
        for number, batch in zip(prefetcher, plain, strict=True):
            assert number == batch.number
            assert prefetcher.state_dict() == plain.state_dict() == {**plain.state, "position": number + 1}
            states.append(prefetcher.state_dict())
        assert prefetcher.state_dict() == plain.state_dict()
        assert [state["position"] for state in states] == [1, 2, 3, 4]  # kept ones do not change


@pytest.mark.parametrize("stop", [0, 1, 2, 3, 4])
def test_resuming_gives_exactly_the_remaining_batches(monkeypatch: pytest.MonkeyPatch, stop: int) -> None:
    prefetcher: Any = ahead(monkeypatch, Loader(), 2)[0]
    iterator = iter(prefetcher)
    first = [next(iterator) for _ in range(stop)]
    state = prefetcher.state_dict()
    other: Any = ahead(monkeypatch, Loader(), 2)[0]
    other.load_state_dict(state)
    assert other.state_dict() == state
    assert first + list(other) == [0, 1, 2, 3]
    prefetcher.load_state_dict({"position": 3, "epoch": 0})  # in the middle of an iteration
    assert prefetcher.state_dict()["position"] == 3
    del iterator
    assert list(prefetcher) == [3]


def test_the_latest_iteration_is_the_one_that_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    prefetcher: Any = ahead(monkeypatch, Loader())[0]
    old, new = iter(prefetcher), iter(prefetcher)
    next(old)
    next(old)
    next(new)
    next(old)
    assert prefetcher.state_dict()["position"] == 1


def test_only_a_loader_with_both_methods_has_a_state() -> None:
    class Half:
        def __iter__(self) -> Iterator[int]:
            return iter(())

        def state_dict(self) -> dict[str, int]:
            return {}

    for loader in (DataLoader(torch.arange(4)), Half(), [1, 2]):
        prefetcher = DevicePrefetcher(loader, "cpu")
        assert not (hasattr(prefetcher, "state_dict") and hasattr(prefetcher, "load_state_dict"))
    both = DevicePrefetcher(Loader(), "cpu")
    assert isinstance(both, DevicePrefetcher)
    assert hasattr(both, "state_dict")
    assert hasattr(both, "load_state_dict")


def test_what_the_loader_has_is_there() -> None:
    data = torch.arange(8)
    sampler = DistributedSampler(data, num_replicas=2, rank=1, shuffle=False)  # type: ignore[arg-type]
    loader = DataLoader(data, batch_size=2, sampler=sampler)  # type: ignore[arg-type]
    prefetcher = DevicePrefetcher(loader, "cpu")
    assert len(prefetcher) == 2
    assert prefetcher.batch_size == 2
    assert prefetcher.sampler is sampler
    assert prefetcher.batch_sampler is loader.batch_sampler
    assert prefetcher.dataset is data
    for name in ("nothing_of_the_kind", "set_epoch", "_iterator"):
        assert not hasattr(prefetcher, name)
    with pytest.raises(TypeError, match="len"):
        len(DevicePrefetcher(iter([1]), "cpu"))


def test_on_the_cpu_the_batches_pass_through(monkeypatch: pytest.MonkeyPatch) -> None:
    loader = Loader()
    prefetcher: Any = DevicePrefetcher(loader, "cpu", depth=3)
    for number, batch in enumerate(prefetcher):
        assert batch is loader.made[number]()
        assert loader.log == [f"fetch {i}" for i in range(number + 1)]
        assert prefetcher.state_dict() == loader.state


class Scale(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.seen: list[int] = []

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        self.seen.append(int(batch[0]))
        return self.layer(batch[:, None]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


class NumberOnDevice(MadeUpCopy):
    def __init__(self, batch: torch.Tensor) -> None:
        self.host, self.number, self.done, self.log = batch, int(batch[0]), False, []

    def hand_out(self) -> Any:
        return self.host.clone()


def fit(monkeypatch: pytest.MonkeyPatch, *callbacks: Callback, ckpt_path: Path | None = None) -> list[int]:
    prefetcher = DevicePrefetcher(Epochs(5), "cpu", depth=2)
    monkeypatch.setattr(prefetcher, "_copies", lambda: NumberOnDevice)
    model = Scale()
    quiet: dict[str, Any] = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
    trainer = Trainer(
        max_epochs=2, accelerator="cpu", callbacks=[*callbacks], enable_checkpointing=bool(callbacks), **quiet
    )
    trainer.fit(model, prefetcher, ckpt_path=ckpt_path)
    return model.seen


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_trainer_resumes_from_it_after_any_step(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    whole = fit(monkeypatch, ModelCheckpoint(tmp_path, "{step}", save_top_k=-1, every_n_train_steps=1))
    assert whole == [0, 1, 2, 3, 4, 10, 11, 12, 13, 14]
    for steps in range(1, 11):
        path = tmp_path / f"step={steps}.ckpt"
        (saved,) = torch.load(path, weights_only=True)["loops"]["fit_loop"]["state_dict"]["combined_loader"]
        assert saved["position"] == (steps - 1) % 5 + 1
        assert fit(monkeypatch, ckpt_path=path) == whole[steps:]


class LateCopy:
    """A copy that reads the host's memory as late as it may: when somebody hears that it is done."""

    def __init__(self, batch: torch.Tensor) -> None:
        self.host, self.arrived, self.asked = batch, torch.full_like(batch, -1), 0

    def hand_out(self) -> torch.Tensor:
        return self.arrived

    def is_done(self) -> bool:
        self.asked += 1
        if self.asked == 3:
            self.wait()
        return self.asked >= 3

    def wait(self) -> None:
        self.arrived.copy_(self.host)


@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("workers", ["threads", "inline"])
def test_a_ring_is_not_written_while_it_is_copied_from(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, workers: str, depth: int
) -> None:
    path = write_lmdb([torch.full((50,), i) for i in range(60)], tmp_path / "numbers.lmdb")
    plain, inner = (
        RingLoader(LMDBDataset(path), batch_size=2, shuffle="full", seed=3, workers=workers) for _ in range(2)
    )
    prefetcher: Any = DevicePrefetcher(inner, "cpu", depth=depth)
    monkeypatch.setattr(prefetcher, "_copies", lambda: LateCopy)
    assert len(prefetcher) == 30
    for epoch in range(2):
        prefetcher.batch_sampler.sampler.set_epoch(epoch)
        plain.set_epoch(epoch)
        arrived, expected = [], []
        for batch, same in zip(prefetcher, plain, strict=True):
            assert prefetcher.state_dict() == plain.state_dict()
            arrived.append(batch)
            expected.append(same.clone())
            del same
        assert all(torch.equal(a, b) for a, b in zip(arrived, expected, strict=True))
    state, rest = None, []
    for number, batch in enumerate(prefetcher):
        if number == 9:
            state = prefetcher.state_dict()
        if number > 9:
            rest.append(batch)
    prefetcher.load_state_dict(state)
    again = list(prefetcher)
    assert len(again) == 20
    assert all(torch.equal(a, b) for a, b in zip(again, rest, strict=True))
    plain.close()
    prefetcher.close()


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: DevicePrefetcher([], "cpu", depth=0), ValueError, "depth must be at least 1"),
        (lambda: DevicePrefetcher([], "cpu", depth=1.0), TypeError, "depth must be an int"),
        (lambda: DevicePrefetcher([], "cpu", depth=True), TypeError, "depth must be an int"),
        (lambda: DevicePrefetcher(3, "cpu"), TypeError, "loader must be an iterable of batches, got an int"),
        (lambda: DevicePrefetcher([], "nowhere"), RuntimeError, "nowhere"),
    ],
)
def test_arguments_that_are_wrong(make: Callable[[], Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        make()


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_a_cuda_device_that_is_not_there() -> None:
    with pytest.raises(HardwareNeedError, match="needs a CUDA device"):
        DevicePrefetcher([], "cuda:0")


def test_a_device_for_which_nothing_is_done_is_said() -> None:
    with pytest.warns(UserWarning, match="copies nothing ahead to meta"):
        assert list(DevicePrefetcher([1, 2], "meta")) == [1, 2]


@pytest.mark.gpu
@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("pinned", [True, False])
def test_batches_arrive_whole_while_the_device_is_busy(depth: int, pinned: bool) -> None:
    ring = [torch.empty(4, 1_000_000) for _ in range(depth + 3)]
    ring = [slot.pin_memory() if pinned else slot for slot in ring]
    free = list(range(len(ring)))

    def loader() -> Iterator[torch.Tensor]:
        for number in range(40):
            slot = free.pop()  # a slot is written again as soon as the last tensor over it has died
            view = ring[slot].numpy()[:]
            weakref.finalize(view, free.append, slot)
            view[:] = number
            yield torch.from_numpy(view)

    weight, sums = torch.rand(2000, 2000, device="cuda"), []
    for batch in DevicePrefetcher(loader(), "cuda", depth=depth):
        assert batch.is_cuda
        for _ in range(20):
            weight = torch.nn.functional.normalize(weight @ weight)  # the batch is used long after the next was asked
        sums.append((batch + 0 * weight.sum()).double().mean())
        del batch
    assert [round(float(value)) for value in sums] == list(range(40))
