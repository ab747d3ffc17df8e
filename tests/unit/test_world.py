"""Who a process is, from each launcher's own variables."""

import socket

import pytest

from ringtrain.errors import UsageError
from ringtrain.runtime.world import World, read_world

PLACE = {"RANK": "3", "SIZE": "4", "LOCAL_RANK": "1", "LOCAL_SIZE": "2"}
GLOO = {"HOROVOD_CONTROLLER": "gloo", **{f"HOROVOD_{name}": value for name, value in PLACE.items()}}
OPEN_MPI = {f"OMPI_COMM_WORLD_{name}": value for name, value in PLACE.items()}
MPICH = {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
# srun --mpi=pmix and --mpi=pmi2 alike; pmi2 sets PMI_RANK as well
SRUN = {"SLURM_JOB_ID": "77", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_TASKS_PER_NODE": "2(x2)"}
SRUN |= {"SLURM_PROCID": "3", "SLURM_LOCALID": "1", "SLURM_NODEID": "1"}
LAUNCHERS = {
    "horovodrun --gloo": GLOO,
    "mpirun (Open MPI)": OPEN_MPI,
    "mpiexec (MPICH or Intel MPI)": MPICH,
    "srun": SRUN,
}


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_each_launcher_s_variables_are_read(launcher: str) -> None:
    assert read_world(LAUNCHERS[launcher], node="a") == World(
        rank=3, size=4, local_rank=1, local_size=2, node="a", launcher=launcher
    )


NO_LAUNCHER = {
    "nothing": {"PATH": "/bin"},
    **{f"a batch script or an interactive shell, {n}": SRUN | {"SLURM_STEP_ID": f"429496729{n}"} for n in (0, 1, 2)},
    "a shell of salloc": {"SLURM_JOB_ID": "77", "SLURM_PROCID": "0", "SLURM_NTASKS": "4"},
    "Gloo of the user": {"HOROVOD_CONTROLLER": "gloo"},
    "ranks of the user": {"HOROVOD_RANK": "1", "HOROVOD_SIZE": "2"},
}


@pytest.mark.parametrize("what", NO_LAUNCHER)
def test_without_a_launcher_a_process_is_alone(what: str) -> None:
    world = read_world(NO_LAUNCHER[what], node="a")
    assert world == World(rank=0, size=1, local_rank=0, local_size=1, node="a", launcher="no launcher")
    assert world.is_rank0


def test_the_node_is_this_host_by_default() -> None:
    assert read_world({}).node == socket.gethostname()


@pytest.mark.parametrize("launcher", ["horovodrun --gloo", "mpirun (Open MPI)"])
def test_a_launcher_inside_a_slurm_job_wins_over_slurm(launcher: str) -> None:
    batch_script = SRUN | {"SLURM_STEP_ID": "4294967291", "SLURM_PROCID": "0"}
    assert read_world(batch_script | LAUNCHERS[launcher]).launcher == launcher
    assert read_world(SRUN | LAUNCHERS[launcher]).launcher == launcher


def test_srun_with_pmi2_is_srun() -> None:
    world = read_world(SRUN | {"PMI_RANK": "3", "PMI_SIZE": "4"})
    assert (world.rank, world.size, world.launcher) == (3, 4, "srun")


@pytest.mark.parametrize(
    ("tasks", "node_index", "local_size", "local_rank"),
    [("4", 0, 4, 1), ("2(x2)", 1, 2, 1), ("2(x3),1", 2, 2, 1), ("2(x3),1", 3, 1, 0), ("1,3,2", 1, 3, 2)],
)
def test_slurm_s_task_lists_are_read(tasks: str, node_index: int, local_size: int, local_rank: int) -> None:
    variables = {"SLURM_STEP_TASKS_PER_NODE": tasks, "SLURM_NODEID": str(node_index), "SLURM_LOCALID": str(local_rank)}
    world = read_world(SRUN | variables | {"SLURM_STEP_NUM_TASKS": "9"})
    assert (world.local_rank, world.local_size) == (local_rank, local_size)


@pytest.mark.parametrize("tasks", ["", "two", "2(x2", "2,,1", "2(3)"])
def test_a_task_list_that_is_none_is_named(tasks: str) -> None:
    with pytest.raises(UsageError, match="SLURM_STEP_TASKS_PER_NODE="):
        read_world(SRUN | {"SLURM_STEP_TASKS_PER_NODE": tasks})


def test_a_node_beyond_the_task_list_is_named() -> None:
    with pytest.raises(UsageError, match="SLURM_NODEID=7"):
        read_world(SRUN | {"SLURM_NODEID": "7"})


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_garbage_in_any_variable_is_named(launcher: str) -> None:
    variables = LAUNCHERS[launcher]
    for name in set(variables) - {"HOROVOD_CONTROLLER", "SLURM_JOB_ID"}:
        for garbage in ("", "-1", "x", "1.5", " 1"):
            with pytest.raises(UsageError, match=name):
                read_world(variables | {name: garbage})


@pytest.mark.parametrize("launcher", ["horovodrun --gloo", "mpirun (Open MPI)", "mpiexec (MPICH or Intel MPI)"])
def test_a_missing_variable_is_named(launcher: str) -> None:
    variables = LAUNCHERS[launcher]
    for name in list(variables)[-2:]:
        with pytest.raises(UsageError, match=f"did not set {name}"):
            read_world({key: value for key, value in variables.items() if key != name})


@pytest.mark.parametrize(("name", "value"), [("OMPI_COMM_WORLD_RANK", "4"), ("OMPI_COMM_WORLD_LOCAL_RANK", "2")])
def test_a_rank_outside_its_world_is_refused(name: str, value: str) -> None:
    with pytest.raises(UsageError, match=f"rank {value} of"):
        read_world(OPEN_MPI | {name: value})
