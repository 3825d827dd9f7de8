"""Which samples are in which batch, compared with lists that are shuffled and dealt out in plain Python."""

from __future__ import annotations

import itertools
import math
import pickle
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch.utils.data import DistributedSampler

from lightning_speedkit.data.loading.epoch_order import REMAINDERS, EpochOrder

FIRSTS = np.array([0, 7, 14, 21, 24, 31], dtype=np.int64)  # six blocks of 7, 7, 7, 3, 7 and 3 samples


def every_batch(epoch: int = 0, start: int = 0, **settings: object) -> list[list[list[int]]]:
    """The batches of every rank."""
    world_size = int(settings.get("world_size", 1))  # type: ignore[call-overload]
    orders = [EpochOrder(rank=rank, **settings) for rank in range(world_size)]  # type: ignore[arg-type]
    return [[order.batch(epoch, step, start).tolist() for step in range(order.steps(start))] for order in orders]


def whole_order(order: EpochOrder, epoch: int) -> list[int]:
    return order.at(epoch, 0, order.samples).tolist()


def dealt(left: list[int], order: list[int], batch_size: int, world_size: int, remainder: str, drop_last: bool
          ) -> list[list[list[int]]]:  # fmt: skip
    """What is left of an order, dealt out one sample after the other as one deals cards."""
    left = list(left)
    if remainder == "drop":
        del left[len(left) - len(left) % world_size :]
    if remainder == "pad":
        position = 0
        while len(left) % world_size:
            left.append(order[position % len(order)])
            position += 1
    hands: list[list[int]] = [[] for _ in range(world_size)]
    for position, sample in enumerate(left):
        hands[position % world_size].append(sample)
    cut = [[hand[i : i + batch_size] for i in range(0, len(hand), batch_size)] for hand in hands]
    return [[batch for batch in batches if len(batch) == batch_size or not drop_last] for batches in cut]


sizes = {"samples": st.integers(1, 60), "batch_size": st.integers(1, 9), "world_size": st.integers(1, 7)}


@settings(deadline=None, max_examples=150)
@given(
    **sizes,
    shuffle=st.sampled_from(["none", "full"]),
    remainder=st.sampled_from(["pad", "drop"]),
    drop_last=st.booleans(),
    share=st.floats(0, 1),
)
def test_samples_are_dealt_out_like_cards(
    samples: int, batch_size: int, world_size: int, shuffle: str, remainder: str, drop_last: bool, share: float
) -> None:
    start = int(share * (samples - 1))
    setting = {
        "samples": samples, "batch_size": batch_size, "world_size": world_size, "shuffle": shuffle,
        "remainder": remainder, "drop_last": drop_last, "seed": 3,
    }  # fmt: skip
    order = list(range(samples))
    if shuffle == "full":
        order = torch.randperm(samples, generator=torch.Generator().manual_seed(3 + 5)).tolist()
    found = every_batch(5, start, **setting)
    assert found == dealt(order[start:], order, batch_size, world_size, remainder, drop_last)
    assert len({tuple(map(len, batches)) for batches in found}) == 1  # all ranks: as many batches, of the same sizes


@settings(deadline=None, max_examples=150)
@given(**sizes, shuffle=st.sampled_from(["none", "full", "blocks"]), share=st.floats(0, 1))
def test_exact_gives_every_sample_once(
    samples: int, batch_size: int, world_size: int, shuffle: str, share: float
) -> None:
    start = int(share * (samples - 1))
    firsts = np.arange(0, samples, 4) if shuffle == "blocks" else None
    setting = {
        "samples": samples, "batch_size": batch_size, "world_size": world_size, "shuffle": shuffle,
        "remainder": "exact", "block_firsts": firsts,
    }  # fmt: skip
    order = whole_order(EpochOrder(samples=samples, batch_size=1, shuffle=shuffle, block_firsts=firsts), 2)
    found = every_batch(2, start, **setting)
    assert sorted(sample for rank in found for batch in rank for sample in batch) == sorted(order[start:])
    lengths = [[len(batch) for batch in batches] for batches in found]
    assert all(0 < length <= batch_size for batches in lengths for length in batches)  # none is empty
    if batch_size > 1 and samples - start >= world_size:
        assert len(set(map(len, lengths))) == 1
    for step in range(max(map(len, lengths))):
        there = [batches[step] for batches in lengths if step < len(batches)]
        assert max(there) - min(there) <= 1
    steps = max(map(len, lengths))
    assert steps == math.ceil((samples - start) / (batch_size * world_size))
    for step in range(steps):  # a step is the next part of the order, dealt out
        batches = [rank[step] if step < len(rank) else [] for rank in found]
        part = [batches[i % world_size][i // world_size] for i in range(sum(map(len, batches)))]
        assert part == order[start : start + len(part)]
        start += len(part)


@pytest.mark.parametrize(
    ("remainder", "expected"),
    [
        ("pad", [[[0, 2], [4, 6], [8]], [[1, 3], [5, 7], [0]]]),
        ("drop", [[[0, 2], [4, 6]], [[1, 3], [5, 7]]]),
        ("exact", [[[0, 2], [4, 6], [7]], [[1, 3], [5], [8]]]),
    ],
)
def test_nine_samples_on_two_ranks(remainder: str, expected: list[list[list[int]]]) -> None:
    assert every_batch(samples=9, batch_size=2, world_size=2, remainder=remainder) == expected


def test_a_rank_for_which_exact_leaves_nothing_takes_fewer_steps() -> None:
    assert every_batch(samples=4, batch_size=1, world_size=3, remainder="exact") == [[[0], [3]], [[1]], [[2]]]
    assert every_batch(samples=2, batch_size=5, world_size=3, remainder="exact") == [[[0]], [[1]], []]
    assert every_batch(samples=2, batch_size=5, world_size=3) == [[[0]], [[1]], [[0]]]
    assert every_batch(samples=2, batch_size=5, world_size=5) == [[[0]], [[1]], [[0]], [[1]], [[0]]]
    assert every_batch(samples=2, batch_size=5, world_size=3, remainder="drop") == [[], [], []]


@settings(deadline=None, max_examples=100)
@given(**sizes, shuffle=st.booleans(), drop=st.booleans(), epoch=st.integers(0, 9), seed=st.integers(0, 2**40))
def test_the_same_samples_as_torchs_distributed_sampler(
    samples: int, batch_size: int, world_size: int, shuffle: bool, drop: bool, epoch: int, seed: int
) -> None:
    remainder = "drop" if drop else "pad"
    for rank in range(world_size):
        sampler = DistributedSampler(
            range(samples), world_size, rank, shuffle=shuffle, seed=seed, drop_last=drop and samples >= world_size
        )
        assume(not drop or samples >= world_size)
        sampler.set_epoch(epoch)
        kind = "full" if shuffle else "none"
        order = EpochOrder(
            samples=samples, batch_size=batch_size, shuffle=kind, seed=seed, remainder=remainder, rank=rank,
            world_size=world_size,
        )  # fmt: skip
        found = [sample for step in range(order.steps()) for sample in order.batch(epoch, step).tolist()]
        assert found == list(sampler)


@settings(deadline=None, max_examples=150)
@given(
    samples=st.integers(1, 60),
    before=st.tuples(st.integers(1, 9), st.integers(1, 5)),
    after=st.tuples(st.integers(1, 9), st.integers(1, 5)),
    shuffle=st.sampled_from(["none", "full", "blocks"]),
    remainders=st.tuples(st.sampled_from(REMAINDERS), st.sampled_from(REMAINDERS)),
    share=st.floats(0, 1),
)
def test_a_run_goes_on_from_any_step_with_other_ranks_and_batches(
    samples: int, before: tuple[int, int], after: tuple[int, int], shuffle: str, remainders: tuple[str, str],
    share: float,
) -> None:  # fmt: skip
    common = {"samples": samples, "shuffle": shuffle, "seed": 1}
    if shuffle == "blocks":
        common |= {"block_firsts": np.arange(0, samples, 5), "window_blocks": 2}
    first = {**common, "batch_size": before[0], "world_size": before[1], "remainder": remainders[0]}
    batches = every_batch(4, **first)
    steps = len(batches[-1])
    done = int(share * max(steps - 1, 0))
    position = EpochOrder(**first).span(done)[0]
    assume(position < samples)
    given_out = Counter(sample for rank in batches for batch in rank[:done] for sample in batch)
    second = {**common, "batch_size": after[0], "world_size": after[1], "remainder": remainders[1]}
    rest = Counter(sample for rank in every_batch(4, position, **second) for batch in rank for sample in batch)
    left = Counter(range(samples)) - given_out
    assert given_out <= Counter(range(samples))  # nothing twice before the last step
    if remainders[1] == "exact":
        assert rest == left
    elif remainders[1] == "pad":
        assert left <= rest
        assert rest.total() - left.total() < after[1]
    else:
        assert rest <= left
        assert left.total() - rest.total() < after[1]


@settings(deadline=None, max_examples=80)
@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=20), window=st.integers(1, 6), epoch=st.integers(0, 5),
    cuts=st.lists(st.integers(0, 200), max_size=8),
)  # fmt: skip
def test_blocks_are_shuffled_and_their_samples_within_windows(
    lengths: list[int], window: int, epoch: int, cuts: list[int]
) -> None:
    firsts, samples = np.cumsum([0, *lengths[:-1]]), sum(lengths)
    order = EpochOrder(
        samples=samples, batch_size=3, shuffle="blocks", seed=11, block_firsts=firsts, window_blocks=window
    )
    blocks = order.blocks_of(epoch).tolist()
    assert blocks == torch.randperm(len(lengths), generator=torch.Generator().manual_seed(11 + epoch)).tolist()
    found, position = whole_order(order, epoch), 0
    assert sorted(found) == list(range(samples))
    for first in range(0, len(blocks), window):
        chosen = blocks[first : first + window]
        expected = {sample for b in chosen for sample in range(firsts[b], firsts[b] + lengths[b])}
        assert set(found[position : position + len(expected)]) == expected
        for place in (position, position + len(expected) - 1):
            assert order.window_at(epoch, place) == (first, first + len(chosen))
        position += len(expected)
    assert order.window_at(epoch, position + 99)[1] == len(blocks)
    assert order.window_at(epoch, samples) == order.window_at(epoch, samples - 1)
    for first, last in itertools.pairwise(cuts):  # any part, in any sequence: the cache changes nothing
        first, last = sorted((first % samples, last % samples))
        assert order.at(epoch, first, last).tolist() == found[first:last]
        assert order.at(epoch + 1, first, last).tolist() == whole_order(order, epoch + 1)[first:last]


@pytest.mark.parametrize("shuffle", ["none", "full", "blocks"])
def test_a_pure_function_of_seed_and_epoch(shuffle: str) -> None:
    def make(seed: int, rank: int = 0) -> EpochOrder:
        return EpochOrder(
            samples=34, batch_size=4, shuffle=shuffle, seed=seed, rank=rank, world_size=2, block_firsts=FIRSTS,
            window_blocks=2,
        )  # fmt: skip

    torch.manual_seed(17)
    before = torch.get_rng_state()
    used = make(3)
    lists = {epoch: whole_order(used, epoch) for epoch in (5, 0, 9, 5, 1)}
    for epoch, expected in lists.items():
        assert whole_order(make(3, rank=1), epoch) == expected
        assert whole_order(pickle.loads(pickle.dumps(used)), epoch) == expected
    assert torch.equal(torch.get_rng_state(), before)
    different = len({tuple(values) for values in lists.values()})
    assert different == (1 if shuffle == "none" else len(lists))
    assert (whole_order(make(4), 0) == lists[0]) == (shuffle == "none")
    assert used == make(3)  # the cache is no part of what it is


def test_windows_of_one_epoch_are_shuffled_independently() -> None:
    order = EpochOrder(
        samples=4000, batch_size=4, shuffle="blocks", block_firsts=np.arange(0, 4000, 100), window_blocks=10
    )
    found = np.array(whole_order(order, 0)).reshape(4, 1000)
    blocks = order.blocks_of(0).reshape(4, 10)
    ranks = []
    for window, chosen in zip(found, blocks, strict=True):
        entry = {block: i for i, block in enumerate(chosen.tolist())}
        ranks.append([entry[sample // 100] * 100 + sample % 100 for sample in window.tolist()])
    assert len({tuple(rank) for rank in ranks}) == 4


@pytest.mark.parametrize("shuffle", ["full", "blocks"])
def test_every_sample_comes_everywhere_equally_often(shuffle: str) -> None:
    samples, epochs = 12, 3000
    counts = np.zeros((samples, samples))
    order = EpochOrder(
        samples=samples, batch_size=4, shuffle=shuffle, seed=0, block_firsts=np.array([0, 3, 6, 9]), window_blocks=2
    )
    for epoch in range(epochs):
        counts[np.arange(samples), order.at(epoch, 0, samples)] += 1
    expected = epochs / samples
    chi_square = float(((counts - expected) ** 2 / expected).sum())
    freedom = (samples - 1) ** 2
    assert abs(chi_square - freedom) < 5 * math.sqrt(2 * freedom), chi_square


def test_block_order_needs_memory_for_two_windows() -> None:
    """A permutation of all these samples would take gigabytes."""
    firsts = np.arange(0, 10**10, 10**6, dtype=np.int64)
    order = EpochOrder(
        samples=10**10, batch_size=1000, shuffle="blocks", block_firsts=firsts, window_blocks=2, world_size=2
    )
    for step in (0, 999, 1000, 10**6, order.steps() - 1):
        assert len(set(order.batch(1, step).tolist())) == 1000
    kept = [value if isinstance(value, tuple) else (value,) for _, value in order._cache.values()]
    assert sum(part.nbytes for parts in kept for part in parts) <= 2 * 8 * 2 * 10**6 + 3 * 8 * (len(firsts) + 1)


@pytest.mark.parametrize("count", [1, 2, 7, 1000, 100_003])
def test_a_full_permutation_is_that_of_torch(count: int) -> None:
    order = EpochOrder(samples=count, batch_size=8, shuffle="full", seed=5)
    expected = torch.randperm(count, generator=torch.Generator().manual_seed(5 + 2))
    found = order.at(2, 0, count)
    assert found.dtype == np.int64
    assert found.tolist() == expected.tolist()
