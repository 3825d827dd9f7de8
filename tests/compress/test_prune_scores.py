"""Marks and counts, against numbers worked out by hand and a plain sort."""

from __future__ import annotations

import itertools

import pytest
import torch

from lightning_speedkit.compress.prune_scores import (
    count_for,
    mark_lowest,
    mark_lowest_together,
    mark_two_of_four,
    sparsity_at,
)


def test_schedule_is_the_published_polynomial() -> None:
    steps = [sparsity_at(step, 0, 10, 0.0, 0.8) for step in range(11)]
    by_hand = [0.0, 0.2168, 0.3904, 0.5256, 0.6272, 0.7, 0.7488, 0.7784, 0.7936, 0.7992, 0.8]
    assert steps == pytest.approx(by_hand)
    assert sparsity_at(15, 10, 20, 0.4, 0.8) == pytest.approx(0.75)  # 0.8 - 0.4 * 0.5**3
    assert (sparsity_at(3, 4, 4, 0.1, 0.9), sparsity_at(4, 4, 4, 0.1, 0.9)) == (0.1, 0.9)


def test_half_a_weight_is_rounded_up() -> None:
    assert [count_for(0.5, n) for n in range(6)] == [0, 1, 1, 2, 2, 3]
    assert count_for(0.9, 10) == 9


def test_exactly_so_many_are_marked_and_they_are_the_first_lowest() -> None:
    generator = torch.Generator().manual_seed(0)
    for length, count in itertools.product((1, 7, 64), (0, 1, 5, 63, 64, 99)):
        scores = torch.randint(0, 4, (length,), generator=generator).float()  # many of them alike
        order = sorted(range(length), key=lambda i: (scores[i].item(), i))
        expected = torch.zeros(length, dtype=torch.bool)
        expected[order[:count]] = True
        assert torch.equal(mark_lowest(scores, count), expected)


def test_infinite_scores_go_first_and_last() -> None:
    scores = torch.tensor([[1.0, -torch.inf], [torch.inf, -2.0]])
    assert mark_lowest(scores, 1).tolist() == [[False, True], [False, False]]
    assert mark_lowest(scores, 3).tolist() == [[True, True], [False, True]]


def test_tensors_compete() -> None:
    first, second = mark_lowest_together([torch.tensor([[5.0, 1.0]]), torch.tensor([2.0, 0.5, 4.0])], 3)
    assert first.tolist() == [[False, True]]
    assert second.tolist() == [True, True, False]
    assert mark_lowest_together([], 0) == []


def test_two_of_four_along_the_inputs() -> None:
    scores = torch.tensor([[1.0, 2.0, 3.0, 4.0, 9.0, 8.0, 7.0, 6.0], [5.0, 5.0, 5.0, 5.0, 1.0, 0.0, 1.0, 0.0]])
    assert mark_two_of_four(scores).int().tolist() == [[1, 1, 0, 0, 0, 0, 1, 1], [1, 1, 0, 0, 0, 1, 0, 1]]
    convolution = scores.view(2, 2, 2, 2).reshape(2, 4, 2)  # dimension 1 has four channels, 2 has positions
    marked = mark_two_of_four(convolution)
    assert marked.shape == convolution.shape
    assert (marked.sum(1) == 2).all()
    assert marked[0, :, 0].tolist() == [True, True, False, False]  # 1, 3, 9, 7
    with pytest.raises(ValueError, match="has 6 entries"):
        mark_two_of_four(torch.ones(2, 6))
