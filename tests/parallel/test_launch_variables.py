"""Each way to start a process is recognised, and half of its variables are an error that names both halves."""

from __future__ import annotations

import pytest
from lightning.fabric.plugins.environments import (
    KubeflowEnvironment,
    LightningEnvironment,
    MPIEnvironment,
    SLURMEnvironment,
    TorchElasticEnvironment,
)
from lightning.fabric.utilities.exceptions import MisconfigurationException

from lightning_speedkit.parallel.launch_variables import Launch, read_launch, whole_number

RANKS = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "head", "MASTER_PORT": "29500"}
TORCHRUN = {**RANKS, "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "1", "TORCHELASTIC_RUN_ID": "none"}
SLURM = {
    "SLURM_JOB_ID": "123456",
    "SLURM_NTASKS": "4",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_NNODES": "2",
    "SLURM_NODELIST": "node[1-2]",
}
LIGHTNING = {"LOCAL_RANK": "1", "WORLD_SIZE": "2", "NODE_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "3000"}


@pytest.mark.parametrize(
    ("variables", "launch"),
    [
        ({}, Launch("lightning")),
        (TORCHRUN, Launch("torchrun", 3, 4, 2, 2)),
        ({**SLURM, **TORCHRUN}, Launch("torchrun", 3, 4, 2, 2)),  # torchrun in a SLURM job, as Lightning sees it
        (SLURM, Launch("slurm", 3, 4, 2, 2)),
        ({**SLURM, "SLURM_JOB_NAME": "bash"}, Launch("lightning")),
        ({"SLURM_PROCID": "0", "SLURM_JOB_ID": "5"}, Launch("lightning")),  # a batch script without --ntasks
        (RANKS, Launch("variables", 3, 4)),
        ({**RANKS, "LOCAL_WORLD_SIZE": "2"}, Launch("variables", 3, 4, 2, 2)),
        (LIGHTNING, Launch("lightning")),
        ({key: value for key, value in LIGHTNING.items() if key != "WORLD_SIZE"}, Launch("lightning")),  # its 2nd fit
        ({**LIGHTNING, "MASTER_ADDR": "head"}, Launch("lightning")),
        ({"LOCAL_RANK": "1", "MASTER_PORT": "3000"}, Launch("lightning")),
        ({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "3000"}, Launch("lightning")),
        ({"WORLD_SIZE": "1"}, Launch("lightning")),
    ],
)
def test_a_whole_set_is_read(variables: dict[str, str], launch: Launch) -> None:
    assert read_launch(variables) == launch


@pytest.mark.parametrize("lacks", list(RANKS))
def test_four_of_five_are_refused_by_name(lacks: str) -> None:
    variables = {name: value for name, value in RANKS.items() if name != lacks}
    with pytest.raises(MisconfigurationException) as error:
        read_launch(variables)
    there = ", ".join(f"{name}={value}" for name, value in variables.items())
    assert str(error.value).startswith(f"{there} are set, and {lacks} is not. Set all of them")


@pytest.mark.parametrize("lacks", list(RANKS))
def test_torchrun_needs_all_five(lacks: str) -> None:
    with pytest.raises(MisconfigurationException, match=f" {lacks} is not. Start the script with torchrun"):
        read_launch({name: value for name, value in TORCHRUN.items() if name != lacks})


@pytest.mark.parametrize("lacks", ["SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID"])
def test_slurm_needs_all_four(lacks: str) -> None:
    with pytest.raises(MisconfigurationException, match=f"are set, and {lacks} is not. srun sets all of them"):
        read_launch({name: value for name, value in SLURM.items() if name != lacks})


@pytest.mark.parametrize(
    ("variables", "num_nodes", "told"),
    [
        ({"RANK": "0"}, 1, "RANK=0 is set, and WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT are not"),
        ({"RANK": "", "WORLD_SIZE": "2"}, 1, "WORLD_SIZE=2 is set, and RANK, LOCAL_RANK, "),
        ({"WORLD_SIZE": "2", "MASTER_PORT": "1"}, 1, "WORLD_SIZE=2, MASTER_PORT=1 are set, and RANK, LOCAL_RANK, "),
        ({"LOCAL_RANK": "1"}, 2, "LOCAL_RANK=1 is set, and MASTER_ADDR, MASTER_PORT are not"),
        ({"LOCAL_RANK": "1"}, 1, "LOCAL_RANK=1 is set, and MASTER_PORT is not"),
        (
            {"LOCAL_RANK": "0", "WORLD_SIZE": "2"},
            1,
            "WORLD_SIZE=2, LOCAL_RANK=0 are set, and RANK, MASTER_ADDR, MASTER_P",
        ),
        (
            {"LOCAL_RANK": "0", "WORLD_SIZE": "2", "NODE_RANK": "0"},
            1,
            "LOCAL_RANK=0 is set, and MASTER_PORT is not",
        ),
        ({"MASTER_ADDR": "a"}, 2, "MASTER_ADDR=a is set, and NODE_RANK, MASTER_PORT are not. num_nodes=2"),
        ({}, 2, "NODE_RANK, MASTER_ADDR, MASTER_PORT are not. num_nodes=2"),
        ({**RANKS, "RANK": "4"}, 1, "RANK=4, LOCAL_RANK=1 and WORLD_SIZE=4 contradict"),
        ({**RANKS, "RANK": "0"}, 1, "RANK=0, LOCAL_RANK=1 and WORLD_SIZE=4 contradict"),
        ({**RANKS, "RANK": "two"}, 1, "RANK='two' must be a whole number of at least 0"),
        ({**RANKS, "WORLD_SIZE": "0"}, 1, "WORLD_SIZE='0' must be a whole number of at least 1"),
        ({**TORCHRUN, "LOCAL_WORLD_SIZE": "3"}, 1, r"WORLD_SIZE=4 does not divide by LOCAL_WORLD_SIZE \(3\)"),
        ({**SLURM, "SLURM_PROCID": "4"}, 1, "SLURM_PROCID=4 and SLURM_NTASKS=4 contradict"),
        ({**SLURM, "SLURM_NNODES": "3"}, 1, r"SLURM_NTASKS=4 does not divide by the number of machines \(3\)"),
        ({**SLURM, "SLURM_NODELIST": ""} | {"SLURM_NTASKS": "x"}, 1, "SLURM_NTASKS='x' must be"),
    ],
)
def test_what_would_hang_is_refused(variables: dict[str, str], num_nodes: int, told: str) -> None:
    with pytest.raises(MisconfigurationException, match=told):
        read_launch(variables, num_nodes=num_nodes)


def test_slurm_on_several_machines_needs_the_first_one() -> None:
    variables = {name: value for name, value in SLURM.items() if name != "SLURM_NODELIST"}
    with pytest.raises(MisconfigurationException, match="neither SLURM_NODELIST nor MASTER_ADDR"):
        read_launch(variables)
    assert read_launch({**variables, "MASTER_ADDR": "head"}).rank == 3


def test_kubeflow_has_one_process_per_machine() -> None:
    variables = {name: value for name, value in RANKS.items() if name != "LOCAL_RANK"}
    assert read_launch(variables, KubeflowEnvironment()) == Launch("variables", 3, 4, 1, 4)
    with pytest.raises(MisconfigurationException, match="MASTER_PORT is not"):
        read_launch({**variables, "MASTER_PORT": ""}, KubeflowEnvironment())


def test_a_default_is_for_what_is_not_set() -> None:
    assert whole_number({}, "RANK", default=7) == 7
    assert whole_number({"RANK": "2"}, "RANK", default=7) == 2


def test_the_environment_of_the_trainer_says_what_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    both = {**SLURM, **TORCHRUN}
    assert read_launch({"SLURM_NTASKS": "2"}, LightningEnvironment()) == Launch("lightning")
    assert read_launch(both, SLURMEnvironment()).starter == "slurm"
    assert read_launch(both, TorchElasticEnvironment()).starter == "torchrun"
    with pytest.raises(
        MisconfigurationException, match="SLURM_NTASKS, SLURM_PROCID, SLURM_LOCALID, SLURM_NODEID are not"
    ):
        read_launch({}, SLURMEnvironment())
    monkeypatch.setattr(MPIEnvironment, "__init__", lambda self: None)  # it needs a package that may lack
    assert read_launch({"RANK": "1"}, MPIEnvironment()) == Launch("other")
