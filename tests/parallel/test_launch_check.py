"""What the environment says is compared with the Trainer, and the port with what runs on this machine."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator

import pytest
import torch
from lightning.fabric.plugins.environments import KubeflowEnvironment, LightningEnvironment
from lightning.fabric.utilities.exceptions import MisconfigurationException

from lightning_speedkit.parallel.launch_check import check_launch
from lightning_speedkit.parallel.launch_variables import Launch
from tests.two_ranks import on_two_ranks

RANKS = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}


@pytest.fixture
def taken() -> Iterator[str]:
    """A port on which another process listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        ready, done = os.pipe(), os.pipe()
        child = os.fork()
        if child == 0:  # it keeps the socket, the test lets go of it
            os.close(done[1])
            os.write(ready[1], b"1")
            os.read(done[0], 1)
            os._exit(0)
        os.close(done[0])
        os.read(ready[0], 1)
        port = str(server.getsockname()[1])
    yield port
    os.close(done[1])
    os.waitpid(child, 0)
    for end in ready:
        os.close(end)


@pytest.fixture
def free() -> str:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return str(server.getsockname()[1])


def test_a_whole_environment_passes(free: str) -> None:
    assert check_launch(2, 1, environment={**RANKS, "MASTER_PORT": free}) == Launch("variables", 0, 2)


@pytest.mark.parametrize(
    ("devices", "num_nodes", "told"),
    [
        (4, 1, r"devices=4 x num_nodes=1, .* there are 2 processes. Use devices and num_nodes so that"),
        (2, 2, r"devices=2 x num_nodes=2, .* there are 2 processes"),
    ],
)
def test_another_number_of_processes_is_refused(free: str, devices: int, num_nodes: int, told: str) -> None:
    with pytest.raises(MisconfigurationException, match=told):
        check_launch(devices, num_nodes, environment={**RANKS, "MASTER_PORT": free})


def test_the_numbers_to_use_are_named(free: str) -> None:
    variables = {**RANKS, "LOCAL_WORLD_SIZE": "1", "MASTER_PORT": free}
    with pytest.raises(MisconfigurationException, match="Use devices=1, num_nodes=2"):
        check_launch(1, 1, environment=variables)


def test_a_rank_that_lightning_would_not_see_is_refused(free: str) -> None:
    second = {**RANKS, "RANK": "1", "LOCAL_WORLD_SIZE": "1", "MASTER_PORT": free}
    with pytest.raises(MisconfigurationException, match=r"NODE_RANK=0, which is not set, .* Set NODE_RANK=1 and LOCAL"):
        check_launch(environment=second)
    with pytest.raises(MisconfigurationException, match=r"RANK=1, but Lightning makes the rank of NODE_RANK=0, 1 "):
        check_launch(environment={**second, "NODE_RANK": "0"})
    assert check_launch(1, 2, environment={**second, "NODE_RANK": "1"}).rank == 1
    assert check_launch(1, 2, KubeflowEnvironment(), second).rank == 1


def test_a_port_in_use_is_refused_on_the_rank_that_would_listen(taken: str) -> None:
    variables = {**RANKS, "MASTER_PORT": taken}
    with pytest.raises(MisconfigurationException, match=rf"The port {taken} \(MASTER_PORT\) is in use"):
        check_launch(environment=variables)
    assert check_launch(environment={**variables, "RANK": "1", "LOCAL_RANK": "1"}).rank == 1


def test_the_port_of_a_start_by_lightning(taken: str) -> None:
    with pytest.raises(MisconfigurationException, match="is in use"):
        check_launch(environment={"MASTER_PORT": taken})
    child = {"LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": taken}
    assert check_launch(environment=child) == Launch("lightning")
    second_machine = {"NODE_RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": taken}
    assert check_launch(2, 2, environment=second_machine) == Launch("lightning")


def test_torchrun_listens_itself(taken: str) -> None:
    variables = {**RANKS, "MASTER_PORT": taken, "TORCHELASTIC_RUN_ID": "none"}
    assert check_launch(environment={**variables, "TORCHELASTIC_USE_AGENT_STORE": "True"}).starter == "torchrun"
    with pytest.raises(MisconfigurationException, match="is in use"):
        check_launch(environment={**variables, "TORCHELASTIC_USE_AGENT_STORE": "False"})


def test_the_port_that_lightning_makes_of_a_slurm_job(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(
        "lightning_speedkit.parallel.launch_check.listens_elsewhere", lambda port: asked.append(port) or True
    )
    job = {"SLURM_NTASKS": "1", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0", "SLURM_JOB_ID": "98765"}
    with pytest.raises(MisconfigurationException, match=r"port 23765 \(15000 \+ the end of SLURM_JOB_ID\)"):
        check_launch(environment=job)
    assert asked == [23765]


@pytest.mark.parametrize("port", ["0", "65536", "http"])
def test_a_port_that_is_none(port: str) -> None:
    with pytest.raises(MisconfigurationException, match="MASTER_PORT"):
        check_launch(environment={**RANKS, "MASTER_PORT": port})


def test_nothing_is_changed() -> None:
    before = dict(os.environ)
    check_launch()
    assert dict(os.environ) == before


def _checked() -> list[Launch]:
    found = [check_launch()]
    torch.distributed.init_process_group("gloo")
    del os.environ["WORLD_SIZE"]  # as Lightning does after a fit
    found.append(check_launch(2, 1, LightningEnvironment()))
    torch.distributed.destroy_process_group()
    return found


@pytest.mark.timeout(60)
def test_it_reads_the_process_until_all_are_joined() -> None:
    assert on_two_ranks(_checked, timeout=50) == [
        [Launch(starter, rank, 2) for starter in ("variables", "other")] for rank in (0, 1)
    ]
