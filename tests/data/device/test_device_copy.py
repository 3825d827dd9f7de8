"""Batches of every structure on their way to a device; the copy itself needs one."""

from __future__ import annotations

import weakref
from collections import OrderedDict, UserDict, defaultdict
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
import torch
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from lightning_speedkit.data.device.device_copy import CudaCopies, _CudaCopy, change_tensors


class Pair(NamedTuple):
    image: Any
    label: Any


@dataclass(frozen=True)
class Record:
    image: torch.Tensor
    name: str
    doubled: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "doubled", self.image * 2)


def plus_one(tensor: torch.Tensor) -> torch.Tensor:
    return tensor + 1


def one() -> torch.Tensor:
    return torch.ones(2)


@pytest.mark.parametrize(
    "batch",
    [
        one(),
        (one(), one()),
        [one(), "name"],
        {"x": one(), 3: [one()]},
        OrderedDict(x=one()),
        defaultdict(list, x=one()),
        Pair(one(), {"y": one()}),
        ((one(), None), [Pair(1, (one(),))]),
    ],
)
def test_tensors_are_replaced_and_the_structure_stays(batch: Any) -> None:
    before = repr(batch)
    new = change_tensors(batch, plus_one)
    assert type(new) is type(batch)
    assert repr(new) == before.replace("tensor([1., 1.])", "tensor([2., 2.])")
    assert repr(batch) == before


def test_a_dataclass_is_copied_with_all_of_its_fields() -> None:
    batch = Record(one(), "a")
    new = change_tensors(batch, plus_one)
    assert type(new) is Record
    assert (new.image.tolist(), new.name, new.doubled.tolist()) == ([2, 2], "a", [3, 3])
    assert batch.image.tolist() == [1, 1]


@pytest.mark.parametrize("batch", [pack_sequence([one()]), UserDict(x=one()), "text", None, 3, {"a"}, Record])
def test_what_moves_itself_and_what_holds_no_tensor_is_left_alone(batch: Any) -> None:
    assert change_tensors(batch, plus_one) is batch


class MadeUpStream:
    def __init__(self, log: list[str], name: str) -> None:
        self.log, self.name, self.event = log, name, MadeUpEvent()

    def __enter__(self) -> None:
        self.log.append(f"into {self.name}")

    def __exit__(self, *error: object) -> None:
        self.log.append(f"out of {self.name}")

    def record_event(self) -> MadeUpEvent:
        self.log.append(f"event of {self.name}")
        return self.event

    def wait_event(self, event: MadeUpEvent) -> None:
        self.log.append(f"{self.name} waits")


class MadeUpEvent:
    passed = False

    def query(self) -> bool:
        return self.passed

    def synchronize(self) -> None:
        self.passed = True


def test_streams_and_memory_are_told_what_they_must_know(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []
    side, current = MadeUpStream(log, "side"), MadeUpStream(log, "current")

    def pinned(tensor: torch.Tensor) -> torch.Tensor:
        log.append(f"pin {len(tensor)}")
        return tensor.clone()

    monkeypatch.setattr(torch.cuda, "stream", lambda stream: stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current)
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda tensor: len(tensor) == 3)
    monkeypatch.setattr(torch.Tensor, "pin_memory", pinned)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda x, stream: log.append(f"{len(x)} used on {stream.name}"))
    images, there = torch.zeros(3), torch.zeros(5, device="meta")
    alive = weakref.ref(images)
    batch = {"x": images, "y": [torch.zeros(2)], "there": there}
    copy = _CudaCopy(batch, torch.device("meta"), side)  # type: ignore[arg-type]
    del batch, images
    assert log == ["pin 2", "into side", "event of side", "out of side"]
    assert alive() is not None
    log.clear()
    result = copy.hand_out()
    assert log == ["current waits", "3 used on current", "2 used on current"]
    assert {tensor.device.type for tensor in (result["x"], result["y"][0])} == {"meta"}
    assert result["there"] is there
    on_device = weakref.ref(result["x"])
    del result
    assert on_device() is None  # the memory on the device is the consumer's alone
    assert not copy.is_done()
    assert alive() is not None
    copy.wait()
    assert copy.is_done()
    del copy
    assert alive() is None


@pytest.mark.gpu
@pytest.mark.parametrize("pinned", [True, False])
def test_a_copy_arrives(pinned: bool) -> None:
    images = torch.rand(4, 5, 6, 3).permute(0, 3, 1, 2)
    batch = {
        "x": images.pin_memory() if pinned else images,
        "y": (torch.arange(4), "name"),
        "z": pack_sequence([one()]),
    }
    copies = CudaCopies(torch.device("cuda"))
    under_way = copies.begin(batch)
    result = under_way.hand_out()
    under_way.wait()
    assert under_way.is_done()
    assert result["x"].is_cuda
    assert result["x"].stride() == images.stride()
    assert torch.equal(result["x"].cpu(), images)
    assert result["y"][0].tolist() == [0, 1, 2, 3]
    assert result["y"][1] == "name"
    assert isinstance(result["z"], PackedSequence)
    assert result["z"].data.is_cuda
    assert not result["z"].batch_sizes.is_cuda
    assert not batch["x"].is_cuda
