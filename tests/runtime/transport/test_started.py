"""A rank knows itself by the variables of torchrun, srun or mpirun; those below are of real runs."""

from __future__ import annotations

import os

import pytest

from splitc.errors import LaunchError
from splitc.runtime.transport.distributed import rank_among, started_world
from splitc.runtime.transport.sealed import TOKEN
from splitc.runtime.transport.started import is_rank, number, was_restarted

NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
OPEN_MPI = {"RANK": "1", "SIZE": "4", "LOCAL_RANK": "1", "LOCAL_SIZE": "4"}
OPEN_MPI = {f"OMPI_COMM_WORLD_{name}": value for name, value in OPEN_MPI.items()}
MPICH = {"PMI_RANK": "2", "PMI_SIZE": "4", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "2", "PMI_FD": "5"}
BATCH_SCRIPT = {
    "SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "2", "SLURM_NODEID": "0",
    "SLURM_JOB_NODELIST": "n[1-2]",
}  # fmt: skip
TASK = BATCH_SCRIPT | {
    "SLURM_PROCID": "3", "SLURM_LOCALID": "1", "SLURM_NTASKS": "4", "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_ID": "1",
    "SLURM_GTIDS": "2,3", "SLURM_STEP_NODELIST": "n[07-09,12],n20", "SLURM_STEP_NUM_NODES": "3",
}  # fmt: skip
HET = {"SLURM_HET_SIZE": "2", "SLURM_JOB_NODELIST_HET_GROUP_0": "n8", "SLURM_JOB_NODELIST_HET_GROUP_1": "n[7,9]"}
HET |= {"SLURM_JOB_NUM_NODES_HET_GROUP_0": "1", "SLURM_JOB_NUM_NODES_HET_GROUP_1": "2"}


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """An environment that no launcher has set, and that is as before afterwards."""
    monkeypatch.setattr(os, "environ", {k: v for k, v in os.environ.items() if k not in NAMES})
    return monkeypatch


def tell(values: dict[str, str]) -> list[str | None]:
    """What torchrun would have set, once variables have these values."""
    os.environ.update(values)
    assert is_rank() and is_rank()
    assert started_world() == int(os.environ["WORLD_SIZE"]) and rank_among(4) == int(os.environ["RANK"])
    return [os.environ.get(name) for name in NAMES]


def test_open_mpi_and_mpich_tell_a_rank_its_place_and_on_one_host_that_it_is_there(told: pytest.MonkeyPatch) -> None:
    assert tell(OPEN_MPI) == ["1", "4", "1", "4", "127.0.0.1", "29500"]


def test_mpirun_on_several_hosts_is_told_where_ranks_meet_unless_slurm_lists_the_hosts(
    told: pytest.MonkeyPatch,
) -> None:
    os.environ.update(MPICH)
    with pytest.raises(LaunchError, match=r"PMI_RANK is set, but not MASTER_ADDR, .* -genv MASTER_ADDR node1 of MPICH"):
        is_rank()
    assert "RANK" not in os.environ
    os.environ.update(TASK, SLURM_STEP_NUM_TASKS="2", SLURM_PROCID="1")  # mpirun's own step, a task on each host
    assert tell({})[:5] == ["2", "4", "0", "2", "n1"]


def test_mpirun_on_several_hosts_meets_where_it_is_told(told: pytest.MonkeyPatch) -> None:
    assert tell({**MPICH, "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "9"}) == ["2", "4", "0", "2", "10.0.0.1", "9"]


def test_a_task_of_srun_is_a_rank_which_meets_the_others_on_the_first_host_at_a_port_of_the_step(
    told: pytest.MonkeyPatch,
) -> None:
    assert tell(TASK) == ["3", "4", "1", "2", "n07", "29508"]
    assert os.environ[TOKEN] == "7.1"


def test_in_a_heterogeneous_job_ranks_meet_in_its_first_component_though_another_host_is_listed_first(
    told: pytest.MonkeyPatch,
) -> None:
    assert tell({**TASK, "SLURM_STEP_NODELIST": "n[7-9]", **HET})[4] == "n8"


def test_a_step_of_some_components_meets_on_its_own_hosts(told: pytest.MonkeyPatch) -> None:
    assert tell({**TASK, "SLURM_STEP_NODELIST": "n[7,9]", "SLURM_STEP_NUM_NODES": "2", **HET})[4] == "n7"


def test_a_batch_script_an_interactive_shell_and_one_rank_of_mpi_are_no_ranks(told: pytest.MonkeyPatch) -> None:
    shell = {**TASK, "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0", "SLURM_GTIDS": "0"}
    for values in (BATCH_SCRIPT, shell, {**OPEN_MPI, "OMPI_COMM_WORLD_SIZE": "1"}, {}):
        os.environ.update(values)
        assert not is_rank() and started_world() is None and rank_among(2, alone=-1) == -1
        for name in values:
            del os.environ[name]


def test_what_torchrun_has_set_stays_also_inside_a_step(told: pytest.MonkeyPatch) -> None:
    own = dict(zip(NAMES, ["0", "2", "0", "2", "node1", "1234"], strict=True))
    os.environ.update(own)
    assert is_rank() is True
    os.environ.update(TASK)
    assert is_rank() and {name: os.environ[name] for name in NAMES} == own


def test_a_requeued_job_was_started_before(told: pytest.MonkeyPatch) -> None:
    for name in ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT"):
        os.environ.pop(name, None)
    assert not was_restarted()
    os.environ.update(TORCHELASTIC_RESTART_COUNT="0", SLURM_RESTART_COUNT="0")
    assert not was_restarted()
    os.environ["SLURM_RESTART_COUNT"] = "1"
    assert was_restarted()


def test_what_is_no_number_is_told_with_the_variable(told: pytest.MonkeyPatch) -> None:
    for name, value in (
        ("SLURM_JOB_NUM_NODES_HET_GROUP_1", "2x"),
        ("SLURM_HET_SIZE", ""),
        ("SLURM_JOB_ID", "-1"),
        ("SLURM_STEP_ID", "\u0663"),
    ):
        with pytest.raises(LaunchError, match=f"{name} is .*, which is no whole number"):
            tell(TASK | HET | {name: value})
        os.environ.pop("RANK", None)
    assert number("NOT_SET") == 0
