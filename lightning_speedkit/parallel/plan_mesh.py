"""How the processes are arranged: which get batches of their own, which share a layer, which hold a copy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

__all__ = ["PlanMesh", "plan_sizes"]


def plan_sizes(data: int | Literal["auto"], tensor: int, replicas: int, world: int) -> tuple[int, int, int]:
    """The sizes of the data parallel and the tensor parallel dimension, and the number of copies.

    Raises:
        MisconfigurationException: They do not make up the number of processes.

    >>> plan_sizes("auto", 2, 1, 8)
    (4, 2, 1)
    """
    if world % tensor:
        raise MisconfigurationException(
            f"tensor_parallel={tensor} does not divide the {world} processes. Change devices, num_nodes or "
            "tensor_parallel."
        )
    size = world // tensor if data == "auto" else data
    if size * tensor != world:
        raise MisconfigurationException(
            f"data_parallel={size} and tensor_parallel={tensor} make {size * tensor} processes, and there are {world}. "
            "Use data_parallel='auto', or change devices or num_nodes."
        )
    if size % replicas:
        raise MisconfigurationException(
            f"replicas={replicas} does not divide the {size} data parallel ranks. Change replicas or devices."
        )
    return size, tensor, replicas


@dataclass(frozen=True, eq=False)
class PlanMesh:
    """The meshes of one run.

    Args:
        shards: What FSDP2 shards over; two dimensions if there are copies; ``None`` on one data parallel rank.
        tensor: The ranks that share layers; ``None`` if none do.
        data_group: The ranks with other batches.
    """

    shards: DeviceMesh | None
    tensor: DeviceMesh | None
    data_group: Any

    @classmethod
    def of(cls, mesh: DeviceMesh, replicas: int) -> PlanMesh:
        """From Lightning's mesh of ``data_parallel`` and ``tensor_parallel``; all ranks call it."""
        data = mesh["data_parallel"]
        tensor = mesh["tensor_parallel"]
        size, shared = data.size(), tensor.size()
        shards = data
        if replicas > 1:
            names = ("replicas", "shards", "tensor_parallel")
            hybrid = init_device_mesh(mesh.device_type, (replicas, size // replicas, shared), mesh_dim_names=names)
            shards, tensor = hybrid["replicas", "shards"], hybrid["tensor_parallel"]
        return cls(shards if size > 1 else None, tensor if shared > 1 else None, data.get_group())
