"""Random numbers go on where they were, on each rank with its own."""

from __future__ import annotations

import io
import random
from typing import Any

import numpy as np
import pytest
import torch

from lightning_speedkit.measure.own_random_numbers import own_random_numbers
from lightning_speedkit.parallel.rank_random import gather_random_states, random_states, restore_random_states
from tests.two_ranks import on_two_ranks


def draw() -> list[float]:
    # gauss() and standard_normal() make two numbers at a time and keep the second one
    return [random.random(), random.gauss(), np.random.rand(), np.random.standard_normal(), float(torch.rand(()))]


def test_they_go_on_after_a_checkpoint_without_pickled_objects() -> None:
    with own_random_numbers():
        random.seed(1), np.random.seed(1), torch.manual_seed(1)
        draw()
        file = io.BytesIO()
        torch.save(random_states(), file)
        expected = [draw() for _ in range(3)]
        file.seek(0)
        restore_random_states(torch.load(file, weights_only=True))
        assert [draw() for _ in range(3)] == expected


def test_one_rank_has_its_own() -> None:
    with own_random_numbers():
        (states,) = gather_random_states(1)
        expected = draw()
        restore_random_states(states)
        assert draw() == expected


def _draw_again(rank_seeds: list[int]) -> Any:
    torch.distributed.init_process_group("gloo")
    rank = torch.distributed.get_rank()
    random.seed(rank_seeds[rank]), np.random.seed(rank_seeds[rank]), torch.manual_seed(rank_seeds[rank])
    states, drawn = gather_random_states(2), draw()
    torch.distributed.destroy_process_group()
    again = []
    for state in states:
        restore_random_states(state)
        again.append(draw())
    return drawn, again


@pytest.mark.timeout(60)
def test_the_first_rank_has_those_of_all() -> None:
    (first, again), (second, nothing) = on_two_ranks(_draw_again, [4, 9], timeout=50)
    assert first != second
    assert again == [first, second]
    assert nothing == []
