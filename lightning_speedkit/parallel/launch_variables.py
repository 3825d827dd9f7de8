"""How a process was started, read from the variables of torchrun, SLURM, Kubernetes and Lightning."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment
from lightning.fabric.plugins.environments.kubeflow import KubeflowEnvironment
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment
from lightning.fabric.utilities.exceptions import MisconfigurationException

__all__ = ["Launch", "read_launch", "whole_number"]

_RANK_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
_SLURM_NAMES = ("SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID")
_SLURM_NODES = ("SLURM_NNODES", "SLURM_JOB_NUM_NODES")


@dataclass(frozen=True, slots=True)
class Launch:
    """How this process was started. A number that the environment does not tell is ``None``.

    Attributes:
        starter: ``"torchrun"``; ``"slurm"`` for ``srun``; ``"variables"``: somebody set ``RANK`` and the others, as in
            Kubernetes; ``"lightning"``: the Trainer starts the other processes of this machine, or is one of them;
            ``"other"``: the processes are joined already, or the Trainer was given an environment that is none of
            these; nothing was looked at.
        rank: Of this process among all.
        world_size: How many processes there are.
        devices: Processes per machine: ``Trainer(devices=...)``.
        num_nodes: Machines: ``Trainer(num_nodes=...)``.
    """

    starter: Literal["torchrun", "slurm", "variables", "lightning", "other"]
    rank: int | None = None
    world_size: int | None = None
    devices: int | None = None
    num_nodes: int | None = None


def read_launch(
    variables: Mapping[str, str], cluster_environment: ClusterEnvironment | None = None, num_nodes: int = 1
) -> Launch:
    """What the variables say.

    Args:
        variables: Of the process.
        cluster_environment: That of the Trainer; by default the one that Lightning would choose. With
            ``KubeflowEnvironment`` there is one process per machine, without ``LOCAL_RANK``.
        num_nodes: Machines of the Trainer, for a start by Lightning, where no variable says it.

    Raises:
        MisconfigurationException: Some of the variables are set and others lack, or they contradict each other.

    >>> read_launch({"SLURM_NTASKS": "4", "SLURM_PROCID": "3", "SLURM_LOCALID": "1", "SLURM_NODEID": "1",
    ...              "SLURM_NNODES": "2", "SLURM_NODELIST": "node[1-2]"})
    Launch(starter='slurm', rank=3, world_size=4, devices=2, num_nodes=2)
    """
    given = cluster_environment
    if isinstance(given, KubeflowEnvironment):
        return _by_variables("variables", variables, tuple(name for name in _RANK_NAMES if name != "LOCAL_RANK"))
    if isinstance(given, TorchElasticEnvironment) or (given is None and "TORCHELASTIC_RUN_ID" in variables):
        return _by_variables("torchrun", variables, _RANK_NAMES)
    if isinstance(given, SLURMEnvironment) or (given is None and _is_slurm(variables)):
        return _by_slurm(variables)
    if given is not None and not isinstance(given, LightningEnvironment):
        return Launch("other")
    if "RANK" in variables:
        return _by_variables("variables", variables, _RANK_NAMES)
    return _by_lightning(variables, num_nodes)


def _is_slurm(variables: Mapping[str, str]) -> bool:
    if variables.get("SLURM_JOB_NAME") in ("bash", "interactive"):  # Lightning passes over these too
        return False
    # A batch script without --ntasks has rank 0 in its variables and no number of tasks: that is one plain process.
    return "SLURM_NTASKS" in variables or variables.get("SLURM_PROCID", "0") != "0"


def _by_variables(
    starter: Literal["torchrun", "variables"], variables: Mapping[str, str], needed: Sequence[str]
) -> Launch:
    way_out = (
        "Start the script with torchrun, which sets all of them."
        if starter == "torchrun"
        else "Set all of them, start the script with torchrun, or unset all and let Lightning start the processes. "
        "With one process per machine LOCAL_RANK is 0, or pass KubeflowEnvironment() to Trainer(plugins=...)."
    )
    _refuse_half(variables, needed, way_out)
    rank, size = whole_number(variables, "RANK"), whole_number(variables, "WORLD_SIZE", 1)
    local = whole_number(variables, "LOCAL_RANK") if "LOCAL_RANK" in needed else 0
    if not 0 <= rank < size or local > rank:
        raise MisconfigurationException(
            f"RANK={rank}, LOCAL_RANK={local} and WORLD_SIZE={size} contradict each other: RANK goes from 0 to "
            f"WORLD_SIZE - 1, and LOCAL_RANK is at most RANK."
        )
    if "LOCAL_RANK" not in needed:
        return Launch(starter, rank, size, 1, size)
    if "LOCAL_WORLD_SIZE" not in variables:
        return Launch(starter, rank, size)
    here = whole_number(variables, "LOCAL_WORLD_SIZE", 1)
    return Launch(starter, rank, size, here, _machines("WORLD_SIZE", size, "LOCAL_WORLD_SIZE", here))


def _by_slurm(variables: Mapping[str, str]) -> Launch:
    _refuse_half(
        variables,
        _SLURM_NAMES,
        "srun sets all of them for each task: start the script with srun, also inside an sbatch script. To run one "
        "process without it, name the job 'interactive' or unset SLURM_NTASKS.",
    )
    rank, size = whole_number(variables, "SLURM_PROCID"), whole_number(variables, "SLURM_NTASKS", 1)
    if rank >= size:
        raise MisconfigurationException(
            f"SLURM_PROCID={rank} and SLURM_NTASKS={size} contradict each other: the first goes from 0 to the second "
            f"- 1. If srun starts fewer tasks than sbatch asked for, give srun its own --ntasks."
        )
    nodes = next((whole_number(variables, name, 1) for name in _SLURM_NODES if name in variables), 1)
    if nodes > 1 and not {"MASTER_ADDR", "SLURM_NODELIST"} & variables.keys():
        raise MisconfigurationException(
            f"The job has {nodes} machines, and neither SLURM_NODELIST nor MASTER_ADDR is set: each machine would look "
            "for the others on itself. Set MASTER_ADDR to the first host of the job."
        )
    return Launch("slurm", rank, size, _machines("SLURM_NTASKS", size, "the number of machines", nodes), nodes)


def _by_lightning(variables: Mapping[str, str], num_nodes: int) -> Launch:
    """The Trainer starts the processes, or this is one that it has started: then there is no RANK."""
    if {"LOCAL_RANK", "WORLD_SIZE"} <= variables.keys() and "NODE_RANK" not in variables:
        _refuse_half(  # Lightning sets NODE_RANK for those that it starts
            variables,
            _RANK_NAMES,
            "Set all of them; Lightning makes RANK of NODE_RANK and LOCAL_RANK, so NODE_RANK will do too.",
        )
    if "LOCAL_RANK" in variables:
        local = whole_number(variables, "LOCAL_RANK")
        if local > 0 or num_nodes > 1 or whole_number(variables, "WORLD_SIZE", 1, default=1) > 1:
            _refuse_half(  # Lightning's MASTER_ADDR is this machine, if it is not set
                variables,
                ("LOCAL_RANK", *(["MASTER_ADDR"] if num_nodes > 1 else []), "MASTER_PORT"),
                "Each process would choose a port of its own. Set all of them, and NODE_RANK with several machines; "
                "or unset LOCAL_RANK and let Lightning start the processes.",
            )
        return Launch("lightning")
    if num_nodes > 1:
        _refuse_half(
            variables,
            ("NODE_RANK", "MASTER_ADDR", "MASTER_PORT"),
            f"num_nodes={num_nodes} needs all of them on each machine, or RANK, WORLD_SIZE and LOCAL_RANK for each "
            "process, as torchrun and srun set them.",
        )
    elif whole_number(variables, "WORLD_SIZE", 1, default=1) > 1 and "NODE_RANK" not in variables:
        _refuse_half(
            variables,
            _RANK_NAMES,
            "This process would start others of its own and not look for those that WORLD_SIZE speaks of. Set all of "
            "them, or unset WORLD_SIZE.",
        )
    return Launch("lightning")


def _refuse_half(variables: Mapping[str, str], needed: Sequence[str], way_out: str) -> None:
    lacking = [name for name in needed if not variables.get(name)]
    if lacking:
        found = [f"{name}={variables[name]}" for name in needed if variables.get(name)]
        there = f"{', '.join(found)} {'are' if len(found) > 1 else 'is'} set, and " if found else ""
        verb = "are" if len(lacking) > 1 else "is"
        raise MisconfigurationException(f"{there}{', '.join(lacking)} {verb} not. {way_out}")


def whole_number(variables: Mapping[str, str], name: str, least: int = 0, default: int | None = None) -> int:
    """A variable as a number; ``default`` if it is not set.

    Raises:
        MisconfigurationException: It is no whole number, or less than ``least``.
    """
    if name not in variables and default is not None:
        return default
    try:
        value = int(variables[name])
    except ValueError:
        value = least - 1
    if value < least:
        raise MisconfigurationException(f"{name}={variables[name]!r} must be a whole number of at least {least}.")
    return value


def _machines(whole: str, size: int, part: str, here: int) -> int:
    if size % here:
        raise MisconfigurationException(
            f"{whole}={size} does not divide by {part} ({here}): Lightning needs as many processes on each machine."
        )
    return size // here
