"""Slots that come back when the last tensor over them has died, and memory that other processes map."""

from __future__ import annotations

import copy
import gc
import io
import mmap
import multiprocessing
import os
import random
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lightning_speedkit.data.loading import ring as ring_module
from lightning_speedkit.data.loading.ring import ALIGNMENT, Ring, SharedMemory, bytes_as_tensor
from tests.data.child import run_child

BYTES = 4096


def batch_of(ring: Ring, value: int = 7) -> torch.Tensor:
    """A float batch over the next free slot, which nothing else holds."""
    slot = ring.take()
    assert slot is not None
    ring.memory(slot).view(np.float32)[:] = value
    return bytes_as_tensor(ring.memory(slot), ring.lend(slot)).view(torch.float32).view(-1, 8)


def cycle_around(batch: torch.Tensor) -> list[Any]:
    cycle: list[Any] = [batch]
    cycle.append(cycle)
    return cycle


def graph_that_saved(batch: torch.Tensor) -> torch.Tensor:
    return (batch * torch.ones(8, requires_grad=True)).sum()


def exported_to_numpy(batch: torch.Tensor) -> Any:
    return np.from_dlpack(batch)


VIEWS = {
    "itself": lambda batch: batch,
    "slice": lambda batch: batch[3:5],
    "element": lambda batch: batch[1, 1],
    "reshape": lambda batch: batch.reshape(4, -1, 2),
    "transpose": lambda batch: batch.t(),
    "other dtype": lambda batch: batch.view(torch.uint8),
    "strided": lambda batch: batch.as_strided((2, 2), (3, 1), 5),
    "unbind": lambda batch: batch.unbind()[-1],
    "chunk of a chunk": lambda batch: batch.chunk(4)[1].chunk(2)[0],
    "detach": lambda batch: batch.detach(),
    "changed in place": lambda batch: batch.mul_(1),
    "numpy view": lambda batch: batch.numpy()[::2],
    "dlpack": exported_to_numpy,
    "memory view": lambda batch: memoryview(batch.numpy()),
    "storage": lambda batch: batch.untyped_storage(),
    "parameter": lambda batch: torch.nn.Parameter(batch),
    "saved by a graph": graph_that_saved,
    "in a cycle": cycle_around,
    "shallow copy": lambda batch: copy.copy(batch),
    "as subclass": lambda batch: batch.as_subclass(torch.nn.Buffer),
}
COPIES = {
    "clone": lambda batch: batch.clone(),
    "deep copy": copy.deepcopy,
    "result": lambda batch: batch + 1,
    "graph that saved something else": lambda batch: (batch + torch.ones(8, requires_grad=True)).exp(),
    "moved to shared memory": lambda batch: batch.share_memory_(),
    "number": lambda batch: batch.sum().item(),
}


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("name", VIEWS)
def test_a_slot_comes_back_when_its_last_view_has_died(name: str, shared: bool) -> None:
    memory = SharedMemory(Ring.shared_bytes(1, BYTES)) if shared else None
    ring = Ring(1, BYTES, shared=memory)
    view = VIEWS[name](batch_of(ring))
    assert ring.take() is None
    assert ring.free == 0
    del view
    if name == "in a cycle":
        assert ring.free == 0
        gc.collect()
    assert ring.free == 1
    assert ring.take() == 0


@pytest.mark.parametrize("name", COPIES)
def test_a_copy_does_not_hold_the_slot(name: str) -> None:
    ring = Ring(1, BYTES)
    batch = batch_of(ring)
    value = COPIES[name](batch)
    del batch
    assert ring.take() == 0
    ring.memory(0)[:] = 255
    assert torch.is_tensor(value) or value == 7 * BYTES / 4
    if torch.is_tensor(value):
        assert float(value.detach().flatten()[0]) in (7.0, 8.0, pytest.approx(np.exp(8.0)))


def test_a_graph_keeps_its_batch_until_the_backward_pass() -> None:
    ring = Ring(1, BYTES)
    weight = torch.ones(8, requires_grad=True)
    loss = (batch_of(ring, 3) * weight).sum()
    assert ring.take() is None
    loss.backward()  # runs through the graph and frees what it saved
    assert weight.grad is not None
    assert weight.grad.tolist() == [3.0 * BYTES / 32] * 8
    assert ring.take() == 0


def test_a_saved_slice_holds_its_own_bytes_alone() -> None:
    ring = Ring(2, 1 << 20)
    slot = ring.take()
    assert slot is not None
    part = bytes_as_tensor(ring.memory(slot)[64:128], ring.lend(slot))
    file = io.BytesIO()
    torch.save(part, file)
    assert len(file.getvalue()) < 10_000
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    assert torch.equal(loaded, part)
    del part
    assert ring.free == 2


def test_slots_are_apart_aligned_and_the_last_freed_is_taken_first() -> None:
    for size in (0, 1, 63, 64, 65, 1000):
        ring = Ring(3, size)
        assert [ring.take() for _ in range(4)] == [0, 1, 2, None]
        for slot in range(3):
            assert ring.memory(slot).nbytes == size
            ring.memory(slot)[:] = slot + 1
            assert not size or ring.memory(slot).ctypes.data % ALIGNMENT == 0
        assert all((ring.memory(slot) == slot + 1).all() for slot in range(3))
        for slot in (2, 0, 1):
            ring.give_back(slot)
        assert [ring.take() for _ in range(3)] == [1, 0, 2]


@pytest.mark.parametrize("shared", [False, True])
def test_batches_outlive_their_ring(shared: bool) -> None:
    memory = SharedMemory(Ring.shared_bytes(3, BYTES)) if shared else None
    ring = Ring(3, BYTES, shared=memory)
    ring.touch()
    batches = [batch_of(ring, value) for value in range(3)]
    del ring, memory
    gc.collect()
    others = [Ring(3, BYTES) for _ in range(50)]  # would take the freed memory
    for other in others:
        other.memory(0)[:] = 255
    assert [float(batch.mean()) for batch in batches] == [0, 1, 2]


def test_many_threads_drop_batches_at_once() -> None:
    ring, slots = Ring(16, 256), 16
    held: list[Any] = [None] * 64
    wrong: list[str] = []

    def work(number: int) -> None:
        chance = random.Random(number)
        for turn in range(400):
            slot = ring.take()
            if slot is None:
                held[chance.randrange(64)] = None
                continue
            memory, value = ring.memory(slot), chance.randrange(256)
            memory[:] = value
            batch = bytes_as_tensor(memory, ring.lend(slot))
            if turn % 5 == 0:
                cycle_around(batch)
            if chance.random() < 0.5:
                held[chance.randrange(64)] = (batch[:100], value)
            if not (batch == value).all():
                wrong.append(f"slot {slot} was used twice")

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))
    assert not wrong
    assert all((part == value).all() for part, value in filter(None, held))
    held.clear()
    gc.collect()
    assert sorted(ring.take() for _ in range(slots)) == list(range(slots))  # type: ignore[type-var]
    assert ring.take() is None


def test_a_batch_dropped_by_another_thread_comes_back() -> None:
    ring = Ring(1, BYTES)
    box = [batch_of(ring)]
    thread = threading.Thread(target=box.clear)
    thread.start()
    thread.join()
    assert ring.take() == 0


def exit_with_live_batches() -> None:
    shared = SharedMemory(Ring.shared_bytes(2, BYTES))
    keep: list[Any] = [Ring(2, BYTES), Ring(2, BYTES, shared=shared)]
    keep += [batch_of(keep[0]), batch_of(keep[1]), graph_that_saved(batch_of(keep[0]))]
    cycle_around(keep[2])
    globals()["kept"] = keep
    print("ends")


def test_an_interpreter_that_ends_with_live_batches() -> None:
    child = run_child(exit_with_live_batches)
    assert (child.returncode, child.stdout, child.stderr) == (0, "ends\n", "")


def double_the_slots(shared: SharedMemory, ring: Ring | None) -> None:
    ring = Ring(2, BYTES, shared=shared) if ring is None else ring
    for slot in range(2):
        ring.memory(slot)[:] *= 2


def double_the_slots_of_two(shared: SharedMemory, others: list[SharedMemory]) -> None:
    double_the_slots(shared, None)
    assert len(others) == 1
    double_the_slots(others[0], None)


@pytest.mark.parametrize("method", ["fork", "forkserver", pytest.param("spawn", marks=pytest.mark.slow)])
def test_another_process_writes_into_the_same_memory(method: str) -> None:
    context: Any = multiprocessing.get_context(method)
    shared, second = (SharedMemory(Ring.shared_bytes(2, BYTES)) for _ in range(2))
    rings = [Ring(2, BYTES, shared=memory) for memory in (shared, second)]
    for ring in rings:
        assert not ring.memory(0).any()  # begins as zeros
        for slot in range(2):
            ring.memory(slot)[:] = slot + 1
    process = context.Process(target=double_the_slots_of_two, args=(shared, [second]))
    process.start()
    process.join(120)
    assert process.exitcode == 0
    for ring in rings:
        assert [ring.memory(slot).tolist() for slot in range(2)] == [[2] * BYTES, [4] * BYTES]


def open_files() -> list[str]:
    found = []
    for entry in Path("/proc/self/fd").iterdir():
        try:
            found.append(str(entry.readlink()))
        except OSError:  # that of the listing itself
            continue
    return found


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="needs /proc")
def test_no_descriptor_and_no_map_is_left() -> None:
    def used() -> tuple[int, int]:
        return len(open_files()), Path("/proc/self/maps").read_text().count("speedkit-batches")

    before = used()
    for _ in range(50):
        shared = SharedMemory(Ring.shared_bytes(2, BYTES))
        batch = batch_of(Ring(2, BYTES, shared=shared))
        assert used()[1] > before[1]
        del shared, batch
    assert used() == before
    assert not list(Path("/dev/shm").glob("*speedkit*"))


def test_shared_memory_without_memfd(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create", raising=False)
    shared = SharedMemory(Ring.shared_bytes(2, BYTES))
    ring = Ring(2, BYTES, shared=shared)
    ring.memory(0)[:] = 1
    process = multiprocessing.get_context("fork").Process(target=double_the_slots, args=(shared, None))
    process.start()
    process.join(60)
    assert ring.memory(0).tolist() == [2] * BYTES


def test_touching_makes_all_pages() -> None:
    shared = SharedMemory(Ring.shared_bytes(4, 1 << 20))
    ring = Ring(4, 1 << 20, shared=shared)
    taken = os.fstat(shared._file).st_blocks * 512
    ring.touch()
    assert taken == 0
    assert os.fstat(shared._file).st_blocks * 512 == 4 << 20


@pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="no huge pages on this system")
def test_large_rings_ask_for_huge_pages() -> None:
    ring = Ring(2, 1 << 22)
    memory = ring.memory(1)
    memory[:] = 5
    place = memory.ctypes.data
    flags, here = [], False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if (found := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line)) is not None:
            here = int(found[1], 16) <= place < int(found[2], 16)
        elif here and line.startswith("VmFlags:"):
            flags = line.split()[1:]
    if not flags:
        pytest.skip("this system does not tell the flags of a map")
    assert "hg" in flags


@pytest.mark.parametrize(("slot_bytes", "asked"), [((1 << 22) - 1, []), (1 << 22, [2 << 22])])
def test_only_large_slots_ask(slot_bytes: int, asked: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    # not told by the map's flags: the allocator may hand out memory for which another array has asked
    sizes: list[int] = []
    monkeypatch.setattr(mmap, "MADV_HUGEPAGE", 14, raising=False)
    monkeypatch.setattr(ring_module, "_huge_pages", lambda size: sizes.append(size) or np.empty(size, dtype=np.uint8))
    Ring(2, slot_bytes)
    assert sizes == asked


@pytest.mark.gpu
def test_a_pinned_slot_waits_for_the_copy_to_the_device() -> None:
    ring = Ring(1, 1 << 26, pinned=True)
    slot = ring.take()
    assert slot is not None
    batch = bytes_as_tensor(ring.memory(slot), ring.lend(slot))
    assert batch.is_pinned()
    torch.cuda._sleep(200_000_000)
    there = batch.to("cuda", non_blocking=True)
    del batch
    assert ring.take() is None
    torch.cuda.synchronize()
    assert ring.free == 1
    assert ring.take() == 0
    assert there.shape == (1 << 26,)


class SlowEvent:
    """A device event whose stream comes to it when the test says so."""

    made: list[SlowEvent] = []

    def __init__(self) -> None:
        self.over = False
        SlowEvent.made.append(self)

    def record(self) -> None:
        pass

    def query(self) -> bool:
        return self.over


def test_slots_wait_for_their_events_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    ring = Ring(2, BYTES)
    ring._events = type(ring._free)()  # as if page-locked
    monkeypatch.setattr(torch.cuda, "Event", SlowEvent)
    monkeypatch.setattr(SlowEvent, "made", [])
    first, second = batch_of(ring), batch_of(ring)
    del first
    del second
    assert len(SlowEvent.made) == 2
    assert ring.take() is None
    SlowEvent.made[0].over = True
    assert ring.free == 1
    assert ring.take() == 0
    assert ring.take() is None
    SlowEvent.made[1].over = True
    assert ring.take() == 1
