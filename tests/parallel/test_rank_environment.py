"""Environment variables that do not go together."""

from __future__ import annotations

import re

import pytest
from lightning.fabric.utilities.exceptions import MisconfigurationException

from lightning_speedkit.parallel.rank_environment import check_rank_environment, port_in_use_message

GOOD = {"LOCAL_RANK": "1", "NODE_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    ("change", "world", "message"),
    [
        ({"MASTER_PORT": ""}, 2, "LOCAL_RANK=1 is set, but MASTER_PORT is not"),
        ({"MASTER_PORT": "any"}, 2, "MASTER_PORT='any' must be a whole number"),
        ({"LOCAL_RANK": "-1"}, 2, "LOCAL_RANK='-1' must be a whole number"),
        ({"WORLD_SIZE": "3"}, 2, "WORLD_SIZE=3 in the environment, but the Trainer asks for 2 ranks"),
        ({"WORLD_SIZE": "2", "LOCAL_RANK": "2"}, 2, "LOCAL_RANK=2 must be below the number of ranks, 2"),
    ],
)
def test_what_does_not_go_together(change: dict[str, str], world: int, message: str) -> None:
    with pytest.raises(MisconfigurationException, match=re.escape(message)):
        check_rank_environment(GOOD | change, world)


def test_what_does() -> None:
    check_rank_environment(GOOD, 2)
    check_rank_environment({}, 2)
    check_rank_environment({"LOCAL_RANK": "0"}, 1)
    check_rank_environment({name: GOOD[name] for name in ("LOCAL_RANK", "MASTER_PORT")}, 2)


def test_the_port_is_named() -> None:
    assert "Port 29500, on which the ranks meet, is in use" in port_in_use_message(29500)
