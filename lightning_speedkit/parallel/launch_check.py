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
from collections.abc import Mapping

import torch
from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment
from lightning.fabric.plugins.environments.kubeflow import KubeflowEnvironment
from lightning.fabric.utilities.exceptions import MisconfigurationException

from lightning_speedkit.parallel.launch_port import listens_elsewhere
from lightning_speedkit.parallel.launch_variables import Launch, read_launch, whole_number

__all__ = ["Launch", "check_launch"]


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
        cluster_environment: That of the Trainer, if it was given one: it says which variables are read.
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
        lightning.fabric.utilities.exceptions.MisconfigurationException: RANK=1, WORLD_SIZE=4 are set, and LOCAL_...
    """
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        # They have found each other, and after a fit Lightning takes WORLD_SIZE away.
        return Launch("other", torch.distributed.get_rank(), torch.distributed.get_world_size())
    variables = os.environ if environment is None else environment
    launch = read_launch(variables, cluster_environment, num_nodes or 1)
    _check_against_trainer(launch, devices, num_nodes)
    if launch.starter == "variables" and not isinstance(cluster_environment, KubeflowEnvironment):
        _check_node_rank(launch, variables, devices)
    if launch.starter != "other":
        _check_port(launch, variables)
    return launch


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
    node = whole_number(variables, "NODE_RANK", default=whole_number(variables, "GROUP_RANK", default=0))
    local = whole_number(variables, "LOCAL_RANK")
    if node * here + local != launch.rank:
        is_set = "" if "NODE_RANK" in variables else ", which is not set"
        raise MisconfigurationException(
            f"RANK={launch.rank}, but Lightning makes the rank of NODE_RANK={node}{is_set}, {here} processes per "
            f"machine and LOCAL_RANK={local}, and gets {node * here + local}. Set NODE_RANK={launch.rank // here} and "
            f"LOCAL_RANK={launch.rank % here}."
        )


def _check_port(launch: Launch, variables: Mapping[str, str]) -> None:
    """On the process that is going to listen there; torchrun listens itself."""
    if launch.starter == "torchrun" and variables.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return
    name = "MASTER_PORT"
    if "MASTER_PORT" in variables:
        port = whole_number(variables, "MASTER_PORT", 1)
    elif launch.starter == "slurm" and variables.get("SLURM_JOB_ID", "")[-4:].isdigit():
        name, port = "15000 + the end of SLURM_JOB_ID", 15000 + int(variables["SLURM_JOB_ID"][-4:])
    else:
        return
    if port > 65535:
        raise MisconfigurationException(f"MASTER_PORT={port} must be from 1 to 65535.")
    first = launch.rank == 0
    if launch.rank is None:
        first = not any(whole_number(variables, name, default=0) for name in ("LOCAL_RANK", "NODE_RANK"))
    if first and listens_elsewhere(port):
        raise MisconfigurationException(
            f"The port {port} ({name}) is in use on this machine, by another program or by a run that has not ended. "
            "The other processes would wait for this one in vain. Set MASTER_PORT to a free port for all of them."
        )
