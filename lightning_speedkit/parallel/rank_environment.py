"""Refuses environment variables that would let ranks wait for each other forever."""

from __future__ import annotations

from collections.abc import Mapping

from lightning.fabric.utilities.exceptions import MisconfigurationException

__all__ = ["check_rank_environment", "port_in_use_message"]


def check_rank_environment(environment: Mapping[str, str], world_size: int) -> None:
    """Look at the variables of a process that says which rank it is.

    Args:
        environment: As ``os.environ``.
        world_size: How many ranks the Trainer was asked for.

    Raises:
        MisconfigurationException: ``LOCAL_RANK`` is set and a variable that goes with it is not, or they disagree.

    >>> check_rank_environment({"LOCAL_RANK": "1"}, 2)
    Traceback (most recent call last):
    ...
    lightning.fabric.utilities.exceptions.MisconfigurationException: LOCAL_RANK=1 is set, but MASTER_PORT is not...
    """
    if "LOCAL_RANK" not in environment or world_size == 1:
        return
    local = environment["LOCAL_RANK"]
    missing = [name for name in ("MASTER_PORT",) if not environment.get(name)]
    if missing:
        raise MisconfigurationException(
            f"LOCAL_RANK={local} is set, but {' and '.join(missing)} is not, so the {world_size} ranks would not find "
            "each other. Start the script with torchrun, or set LOCAL_RANK, NODE_RANK, WORLD_SIZE, MASTER_ADDR and "
            "MASTER_PORT in each process; or unset LOCAL_RANK, and the Trainer starts the processes itself."
        )
    numbers = {}
    for name in ("LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", "MASTER_PORT"):
        text = environment.get(name, "0")
        if not text.isdecimal():
            raise MisconfigurationException(f"{name}={text!r} must be a whole number of 0 or more.")
        numbers[name] = int(text)
    if "WORLD_SIZE" in environment and numbers["WORLD_SIZE"] != world_size:
        raise MisconfigurationException(
            f"WORLD_SIZE={numbers['WORLD_SIZE']} in the environment, but the Trainer asks for {world_size} ranks "
            "(devices x num_nodes): some would wait for ranks that do not exist. Make them the same."
        )
    if numbers["LOCAL_RANK"] >= world_size:
        raise MisconfigurationException(f"LOCAL_RANK={local} must be below the number of ranks, {world_size}.")


def port_in_use_message(port: int) -> str:
    """What to do about a port that another process has."""
    return (
        f"Port {port}, on which the ranks meet, is in use, perhaps by another run on this machine or by one that did "
        "not end. Set MASTER_PORT to a free port, the same in all processes; or unset it, and the Trainer finds one."
    )
