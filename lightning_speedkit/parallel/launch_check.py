"""Whether the variables that start a process of several are all there, before anything waits for the others.

What it does: torchrun, ``srun``, Kubernetes and Lightning tell a process its rank in environment variables. With half
of them set, Lightning and torch wait for processes that never come (for half an hour), or every process trains alone
and nobody notices. Here that is an error that names what is set and what lacks. The same for numbers that contradict
each other, and for a port on which somebody else listens. What it costs: nothing.

Source: what ``TorchElasticEnvironment``, ``SLURMEnvironment``, ``KubeflowEnvironment`` and ``LightningEnvironment`` of
Lightning read, and torch's ``env://`` rendezvous.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from lightning.fabric.plugins.environments import ClusterEnvironment, KubeflowEnvironment
from lightning.fabric.utilities.exceptions import MisconfigurationException

from lightning_speedkit.parallel.launch_port import listens_elsewhere

__all__ = ["Launch", "check_launch"]

_RANK_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
_SLURM_NAMES = ("SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID")
_SLURM_NODES = ("SLURM_NNODES", "SLURM_JOB_NUM_NODES")


@dataclass(frozen=True, slots=True)
class Launch:
    """How this process was started. A number that the environment does not tell is ``None``.

    Attributes:
        starter: ``"torchrun"``; ``"slurm"`` for ``srun``; ``"variables"``: somebody set ``RANK`` and the others, as in
            Kubernetes; ``"lightning"``: the Trainer starts the other processes of this machine, or is one of them.
        rank: Of this process among all.
        world_size: How many processes there are.
        devices: Processes per machine: ``Trainer(devices=...)``.
        num_nodes: Machines: ``Trainer(num_nodes=...)``.
    """

    starter: Literal["torchrun", "slurm", "variables", "lightning"]
    rank: int | None = None
    world_size: int | None = None
    devices: int | None = None
    num_nodes: int | None = None


def check_launch(
    devices: int | None = None,
    num_nodes: int | None = None,
    cluster_environment: ClusterEnvironment | None = None,
    environment: Mapping[str, str] | None = None,
) -> Launch:
    """How this process was started, if everything that it needs to find the others is there. Nothing is changed.

    To be called at the top of a script that several processes run.

    Args:
        devices: Processes per machine of the Trainer, to be compared with what the environment says.
        num_nodes: Machines of the Trainer, likewise.
        cluster_environment: That of the Trainer, if it was given one: ``KubeflowEnvironment`` needs no ``LOCAL_RANK``.
        environment: The variables; those of this process by default.

    Raises:
        MisconfigurationException: Some of the variables are set and others lack, they contradict each other or the
            Trainer, or the port is in use.

    Example:

        >>> variables = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2",
        ...              "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
        >>> check_launch(environment=variables)
        Launch(starter='variables', rank=1, world_size=4, devices=2, num_nodes=2)
        >>> check_launch(environment={"RANK": "1", "WORLD_SIZE": "4"})
        Traceback (most recent call last):
        ...
        lightning.fabric.utilities.exceptions.MisconfigurationException: RANK=1, WORLD_SIZE=4 are set, and LOCAL_RANK,...
    """
    variables = os.environ if environment is None else environment
    kubeflow = isinstance(cluster_environment, KubeflowEnvironment)
    if "TORCHELASTIC_RUN_ID" in variables and not kubeflow:
        launch = _by_variables("torchrun", variables, _RANK_NAMES)
    elif _is_slurm(variables) and not kubeflow:
        launch = _by_slurm(variables)
    elif "RANK" in variables or kubeflow:
        needed = tuple(name for name in _RANK_NAMES if name != "LOCAL_RANK" or not kubeflow)
        launch = _by_variables("variables", variables, needed)
    else:
        launch = _by_lightning(variables, num_nodes or 1)
    _check_against_trainer(launch, devices, num_nodes)
    if launch.starter == "variables" and not kubeflow:
        _check_node_rank(launch, variables, devices)
    if not torch.distributed.is_initialized():
        _check_port(launch, variables)
    return launch


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
        else "Set all of them, start the script with torchrun, or unset all and let Lightning start the processes. With "
        "one process per machine LOCAL_RANK is 0, or pass KubeflowEnvironment() to Trainer(plugins=...)."
    )
    _refuse_half(variables, needed, way_out)
    rank, size = _number(variables, "RANK"), _number(variables, "WORLD_SIZE", 1)
    local = _number(variables, "LOCAL_RANK") if "LOCAL_RANK" in needed else 0
    if not 0 <= rank < size or local > rank:
        raise MisconfigurationException(
            f"RANK={rank}, LOCAL_RANK={local} and WORLD_SIZE={size} contradict each other: RANK goes from 0 to "
            f"WORLD_SIZE - 1, and LOCAL_RANK is at most RANK."
        )
    if "LOCAL_RANK" not in needed:
        return Launch(starter, rank, size, 1, size)
    if "LOCAL_WORLD_SIZE" not in variables:
        return Launch(starter, rank, size)
    here = _number(variables, "LOCAL_WORLD_SIZE", 1)
    return Launch(starter, rank, size, here, _machines("WORLD_SIZE", size, "LOCAL_WORLD_SIZE", here))


def _by_slurm(variables: Mapping[str, str]) -> Launch:
    _refuse_half(
        variables,
        _SLURM_NAMES,
        "srun sets all of them for each task: start the script with srun, also inside an sbatch script. To run one "
        "process without it, name the job 'interactive' or unset SLURM_NTASKS.",
    )
    rank, size = _number(variables, "SLURM_PROCID"), _number(variables, "SLURM_NTASKS", 1)
    if rank >= size:
        raise MisconfigurationException(
            f"SLURM_PROCID={rank} and SLURM_NTASKS={size} contradict each other: the first goes from 0 to the second "
            f"- 1. If srun starts fewer tasks than sbatch asked for, give srun its own --ntasks."
        )
    nodes = next((_number(variables, name, 1) for name in _SLURM_NODES if name in variables), 1)
    if nodes > 1 and not {"MASTER_ADDR", "SLURM_NODELIST"} & variables.keys():
        raise MisconfigurationException(
            f"The job has {nodes} machines, and neither SLURM_NODELIST nor MASTER_ADDR is set: each machine would look "
            "for the others on itself. Set MASTER_ADDR to the first host of the job."
        )
    return Launch("slurm", rank, size, _machines("SLURM_NTASKS", size, "the number of machines", nodes), nodes)


def _by_lightning(variables: Mapping[str, str], num_nodes: int) -> Launch:
    """The Trainer starts the processes, or this is one that it has started: then there is no RANK."""
    if "LOCAL_RANK" in variables:
        local = _number(variables, "LOCAL_RANK")
        if local > 0 or num_nodes > 1 or _number(variables, "WORLD_SIZE", 1, default=1) > 1:
            _refuse_half(
                variables,
                ("LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"),
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
    elif _number(variables, "WORLD_SIZE", 1, default=1) > 1 and "NODE_RANK" not in variables:
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


def _number(variables: Mapping[str, str], name: str, least: int = 0, default: int | None = None) -> int:
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


def _check_against_trainer(launch: Launch, devices: int | None, num_nodes: int | None) -> None:
    if launch.world_size is None or devices is None:
        return
    wanted = devices * (num_nodes or 1)
    if wanted != launch.world_size:
        hint = (
            f"devices={launch.devices}, num_nodes={launch.num_nodes}"
            if launch.devices
            else f"devices and num_nodes so that their product is {launch.world_size}"
        )
        raise MisconfigurationException(
            f"The Trainer has devices={devices} x num_nodes={num_nodes or 1}, and the environment says that there are "
            f"{launch.world_size} processes. Use {hint}."
        )


def _check_node_rank(launch: Launch, variables: Mapping[str, str], devices: int | None) -> None:
    """Lightning makes the rank of NODE_RANK and LOCAL_RANK, and does not read RANK."""
    here = devices or launch.devices
    if here is None or launch.rank is None:
        return
    node = _number(variables, "NODE_RANK", default=_number(variables, "GROUP_RANK", default=0))
    local = _number(variables, "LOCAL_RANK")
    if node * here + local != launch.rank:
        raise MisconfigurationException(
            f"RANK={launch.rank}, but Lightning makes the rank of NODE_RANK={node} ({'set' if 'NODE_RANK' in variables else 'not set'}), "
            f"{here} processes per machine and LOCAL_RANK={local}, and gets {node * here + local}. Set "
            f"NODE_RANK={launch.rank // here} and LOCAL_RANK={launch.rank % here}."
        )


def _check_port(launch: Launch, variables: Mapping[str, str]) -> None:
    """On the process that is going to listen there; torchrun listens itself."""
    if launch.starter == "torchrun" and variables.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return
    name = "MASTER_PORT"
    if "MASTER_PORT" in variables:
        port = _number(variables, "MASTER_PORT", 1)
    elif launch.starter == "slurm" and variables.get("SLURM_JOB_ID", "")[-4:].isdigit():
        name, port = "15000 + the end of SLURM_JOB_ID", 15000 + int(variables["SLURM_JOB_ID"][-4:])
    else:
        return
    if port > 65535:
        raise MisconfigurationException(f"MASTER_PORT={port} must be from 1 to 65535.")
    first = launch.rank == 0
    if launch.rank is None:
        first = not any(_number(variables, name, default=0) for name in ("LOCAL_RANK", "NODE_RANK"))
    if first and listens_elsewhere(port):
        raise MisconfigurationException(
            f"The port {port} ({name}) is in use on this machine, by another program or by a run that has not ended. "
            "The other processes would wait for this one in vain. Set MASTER_PORT to a free port for all of them."
        )
