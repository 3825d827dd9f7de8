"""Two ranks agree over the host, and hear of one that is gone."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_speedkit.measure.host_group import HostGroup
from tests.two_ranks import on_two_ranks


def _on_a_rank() -> Any:
    torch.distributed.init_process_group("gloo")
    rank = torch.distributed.get_rank()
    group = HostGroup("while this is tested")
    largest = group.largest([rank, -rank, 2**53 - 1 if rank else 0, 1e300])
    tensors = [torch.full((2, 3), float(rank)).t(), torch.tensor(rank), torch.empty(0), torch.tensor([rank == 1])]
    group.take_from_first(tensors)
    told = [tensor.tolist() for tensor in tensors]
    if rank == 0:  # the other one ends
        with pytest.raises(RuntimeError, match="Another rank ended while this is tested; its own message says why"):
            group.largest([0.0])
    return largest, told


def test_two_ranks_say_the_same_and_hear_of_one_that_is_gone() -> None:
    first, second = on_two_ranks(_on_a_rank)
    assert first == second
    assert first == ([1.0, 0.0, 2.0**53 - 1, 1e300], [[[0.0, 0.0]] * 3, 0, [], [False]])
