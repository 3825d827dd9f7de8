"""Batches as a description and a buffer, and back."""

from __future__ import annotations

import itertools
import pickle
import warnings
import weakref
from collections import OrderedDict, namedtuple
from typing import Any

import numpy as np
import pytest
import torch

from lightning_speedkit.data.loading.batch_layout import Arena, Placed, pickled, restore, stow, walk
from lightning_speedkit.data.loading.ring import ALIGNMENT
from lightning_speedkit.data.store.leaf_codec import _TENSOR_TYPES
from tests.data.samples import same

Pair = namedtuple("Pair", "x y")


def buffer(size: int) -> Any:
    return np.full(size, 0xAA, dtype=np.uint8)


def there_and_back(batch: Any, size: int = 1 << 16) -> tuple[Any, Any]:
    """The tree of a batch as it travels, and what is made of it at the other end."""
    memory = buffer(size)
    tree = stow(batch, Arena(memory))
    return tree, restore(pickle.loads(pickled(tree)), memory, memory)


def random_tensor(name: str, shape: tuple[int, ...]) -> torch.Tensor:
    dtype = _TENSOR_TYPES[name]
    flat = torch.randint(0, 2 if name == "bool" else 256, (int(np.prod(shape)) * dtype.itemsize,), dtype=torch.uint8)
    return flat.view(dtype).view(shape)


@pytest.mark.parametrize("name", _TENSOR_TYPES)
def test_every_dtype_comes_back_bit_for_bit(name: str) -> None:
    shapes = [(3, 4), (1,), (), (2, 0, 3), (2, 1, 1, 5)]
    batch = [random_tensor(name, shape) for shape in shapes]
    tree, found = there_and_back(batch)
    assert same(found, batch)
    assert all(type(leaf) is Placed and leaf.start % ALIGNMENT == 0 for leaf in tree)
    spans = [
        (leaf.start, leaf.start + tensor.nbytes) for leaf, tensor in zip(tree, batch, strict=True) if tensor.numel()
    ]
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))  # apart from each other


@pytest.mark.parametrize("name", _TENSOR_TYPES)
def test_tensors_outside_the_buffer_can_be_pickled(name: str) -> None:
    batch = OrderedDict(x=random_tensor(name, (3, 4)), y=random_tensor(name, (2, 0)), z=[random_tensor(name, ())])
    found = pickle.loads(pickled(batch))
    assert same(found, batch)
    found["x"].zero_()  # writable, and no part of the other


BATCHES: list[Any] = [
    (torch.zeros(2), {"a": [torch.ones(2), (torch.arange(3),)]}),
    {"text": ["a", "b"], 3: [None, None], "bytes": [b"", b"x"], "empty": [], "none": None, "also": ()},
    Pair(torch.ones(2), Pair(["a"], torch.zeros(1))),
    [["a", "b"], torch.ones(3)],
    [(), [], {}],
    5,
    "text",
]


@pytest.mark.parametrize("batch", BATCHES, ids=map(str, range(len(BATCHES))))
def test_containers_are_kept(batch: Any) -> None:
    _, found = there_and_back(batch)
    assert same(found, batch)
    assert same(walk(batch, torch.Tensor, lambda tensor: tensor.clone()), batch)


def test_containers_of_other_classes_are_left_as_they_are() -> None:
    batch = OrderedDict(x=torch.ones(2)), torch.Size([1]), [1, torch.zeros(2)]
    tree, found = there_and_back(batch)
    assert not any(isinstance(value, Placed) for value in (tree[0]["x"], tree[2][1]))
    assert same(found, batch)


def test_the_arena_says_what_it_would_have_needed() -> None:
    batch = (torch.zeros(100, dtype=torch.uint8), torch.zeros(65, dtype=torch.uint8), torch.zeros(0))
    for memory in (None, buffer(0), buffer(128), buffer(255), buffer(4096)):
        arena = Arena(memory)
        tree = stow(batch, arena)
        assert arena.wanted_bytes == 256
        fits = 0 if memory is None else len(memory)
        assert [isinstance(leaf, Placed) for leaf in tree] == [fits >= 100, fits >= 128 + 65, memory is not None]
        assert same(restore(tree, buffer(0) if memory is None else memory, None), batch)


def test_what_does_not_fit_leaves_room_for_what_does() -> None:
    memory = buffer(256)
    tree, found = there_and_back((torch.arange(100.0), torch.arange(3.0)), 256)
    assert torch.is_tensor(tree[0])
    assert tree[1] == Placed(0, torch.float32, (3,))
    assert same(found, (torch.arange(100.0), torch.arange(3.0)))
    assert (memory == 0xAA).all()


def nested() -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])


def quantized() -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)


UNUSUAL = {
    "channels last": lambda: torch.arange(48.0).view(2, 2, 3, 4).to(memory_format=torch.channels_last),
    "transposed": lambda: torch.arange(6.0).view(2, 3).t(),
    "expanded": lambda: torch.ones(1).expand(4),
    "with gradient": lambda: torch.ones(3, requires_grad=True),
    "parameter": lambda: torch.nn.Parameter(torch.ones(3)),
    "sparse": lambda: torch.eye(3).to_sparse(),
    "sparse rows": lambda: torch.eye(3).to_sparse_csr(),
    "meta": lambda: torch.ones(3, device="meta"),
    "nested": nested,
    "quantized": quantized,
}


@pytest.mark.filterwarnings("ignore:Sparse CSR:UserWarning")
@pytest.mark.parametrize("name", UNUSUAL)
def test_tensors_that_are_more_than_their_bytes_travel_as_they_are(name: str) -> None:
    tensor = UNUSUAL[name]()
    arena = Arena(buffer(4096))
    tree = stow({"x": tensor, "y": torch.ones(2)}, arena)
    assert tree["x"] is tensor
    if name not in ("sparse rows", "meta", "nested"):  # torch's own matter
        found = pickle.loads(pickled(tree))["x"]
        assert type(found) is type(tensor)
        assert (found.layout, found.requires_grad) == (tensor.layout, tensor.requires_grad)
        assert tensor.layout is not torch.strided or found.stride() == tensor.stride()
    assert isinstance(tree["y"], Placed)


@pytest.mark.parametrize("make", [torch.conj, lambda z: torch.conj(z).imag], ids=["conjugated", "negated"])
def test_lazy_signs_are_resolved(make: Any) -> None:
    tensor = make(torch.tensor([1 + 2j, 3 - 4j]))
    _, found = there_and_back(tensor.contiguous())
    assert torch.equal(found, tensor)


def test_a_part_of_what_the_arena_gave_is_copied() -> None:
    memory = buffer(4096)
    arena = Arena(memory)
    whole = arena.empty((4, 4), torch.float32)
    whole[:] = torch.arange(16.0).view(4, 4)
    tree = stow([whole, whole[:2], whole.view(16), whole.t(), whole.view(torch.int32)], arena)
    assert tree[0] == Placed(0, torch.float32, (4, 4))
    assert tree[1].start > 0
    found = restore(tree, memory, None)
    assert same(found, [whole, whole[:2], whole.view(16), whole.t(), whole.view(torch.int32)])


def test_no_two_tensors_share_memory_afterwards() -> None:
    tensor = torch.ones(4)
    _, (first, second) = there_and_back((tensor, tensor))
    first.zero_()
    assert second.tolist() == [1.0] * 4


def test_channels_last_pictures() -> None:
    memory = buffer(4096)
    arena = Arena(memory)
    rows = arena.empty((2, 4, 5, 3), torch.uint8)
    rows.copy_(torch.arange(120, dtype=torch.uint8).view(2, 4, 5, 3))
    placed = arena.placed(rows)
    assert placed is not None
    found = restore(placed._replace(channels_last=True), memory, None)
    assert found.shape == (2, 3, 4, 5)
    assert found.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(found, rows.permute(0, 3, 1, 2))


def test_restored_tensors_keep_the_owner_and_have_storages_of_their_own_size() -> None:
    class Owner:
        pass

    memory, owner = buffer(4096), Owner()
    tree = stow((torch.ones(3), torch.ones(5)), Arena(memory))
    alive = weakref.ref(owner)
    found = restore(tree, memory, owner)
    del owner
    assert [tensor.untyped_storage().nbytes() for tensor in found] == [12, 20]
    last = found[1][2:]
    del found
    assert alive() is not None
    del last
    assert alive() is None
