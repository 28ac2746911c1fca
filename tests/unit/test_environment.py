"""A rank's numbers are read from torchrun's or Slurm's variables; missing or contradictory ones are named."""

from typing import Any

import pytest

from clusterddp.environment import RankEnvironment, check_is_rank, default_port, drop_inherited, mark, read
from clusterddp.errors import LauncherEnvironmentError
from clusterddp.protocol import FOR_RANKS, RANK_PROCESS
from clusterddp.slurm.commands import for_parsing, scrub
from tests.wording import raises

TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "none",
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "GROUP_RANK": "1",
    "MASTER_ADDR": "n1",
    "MASTER_PORT": "29400",
}
#: The third of four tasks, in step 2 of a two-node job with two tasks on each node.
STEP = {
    "SLURM_JOB_ID": "41",
    "SLURM_STEP_ID": "2",
    "SLURM_STEPID": "2",
    "SLURM_PROCID": "2",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_NTASKS": "4",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_STEP_NODELIST": "n[1-2]",
    "SLURM_JOB_NODELIST": "n[1-2]",
    "SLURM_NNODES": "2",
    "SLURM_TASKS_PER_NODE": "2(x2)",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_TASK_PID": "77",
}
BATCH_SHELL = {
    "SLURM_JOB_ID": "41",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURM_NTASKS": "4",
    "SLURM_NNODES": "2",
    "SLURM_TASKS_PER_NODE": "2(x2)",
    "SLURM_JOB_NODELIST": "n[1-2]",
    "SLURM_TASK_PID": "70",
}


def step(**changes: Any) -> dict[str, str]:
    """STEP with ``NAME=value`` changed under SLURM_, and None taken away."""
    changed = {**STEP, **{f"SLURM_{name}": value for name, value in changes.items()}}
    return {name: str(value) for name, value in changed.items() if value is not None}


def place(found: RankEnvironment) -> tuple[int, int, int, int, int]:
    return found.rank, found.local_rank, found.world_size, found.local_world_size, found.node_rank


def without(environ: dict[str, str], *names: str) -> dict[str, str]:
    return {name: value for name, value in environ.items() if name not in names}


def test_nothing_set_is_a_single_process() -> None:
    """A plain ``python train.py`` is rank 0 of 1."""
    assert read({"HOME": "/"}) == RankEnvironment(0, 0, 1, 1, 0, (), None, None, "single")


def test_torchruns_names_are_read_as_they_are() -> None:
    """Every name torchrun sets has its place."""
    assert read(TORCHRUN) == RankEnvironment(5, 1, 8, 4, 1, (), "n1", 29400, "torchrun")


def test_torchrun_inside_a_slurm_task_wins() -> None:
    """With one torchrun per node under srun, Slurm's ranks are the torchruns, not the processes."""
    assert read({**STEP, **TORCHRUN}) == read(TORCHRUN)


def test_the_local_launcher_wins_inside_a_job() -> None:
    """``--local`` inside an allocation is no Slurm step."""
    found = read({**step(), **without(TORCHRUN, "TORCHELASTIC_RUN_ID"), "CLUSTERDDP_LAUNCHER": "local"})
    assert (place(found), found.launcher) == ((5, 1, 8, 4, 1), "local")


def test_processes_spawned_within_a_task_can_override_the_launcher() -> None:
    """CLUSTERDDP_LAUNCHER=torchrun settles which of two complete sets counts."""
    spawned = {**step(), **without(TORCHRUN, "TORCHELASTIC_RUN_ID"), "CLUSTERDDP_LAUNCHER": "torchrun"}
    assert read(spawned) == read(TORCHRUN)


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "5000"}, (1, 1, 2, 2, 0)),
        ({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost"}, (1, 1, 2, 2, 0)),
        ({"RANK": "1", "WORLD_SIZE": "2"}, (1, 1, 2, 2, 0)),
        ({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "localhost"}, (1, 1, 2, 2, 0)),
        ({"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "n1"}, (0, 0, 1, 1, 0)),
        ({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "n1"}, (1, 1, 2, 2, 0)),
        ({"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}, (5, 1, 8, 4, 1)),
        ({**BATCH_SHELL, "RANK": "1", "WORLD_SIZE": "2"}, (1, 1, 2, 2, 0)),
    ],
)
def test_a_home_made_launcher_may_leave_out_what_follows(environ: dict[str, str], expected: tuple[int, ...]) -> None:
    """mp.spawn scripts set RANK, WORLD_SIZE and a loopback master: one node, so the local rank is the rank."""
    found = read(environ)
    assert (place(found), found.launcher) == (expected, "torchrun")


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"RANK": "0"}, "WORLD_SIZE is not set (found: RANK=0)"),
        ({"WORLD_SIZE": "4"}, "RANK is not set (found: WORLD_SIZE=4)"),
        ({"LOCAL_RANK": "1"}, "RANK and WORLD_SIZE are not set (found: LOCAL_RANK=1)"),
        ({"TORCHELASTIC_RUN_ID": "x"}, "RANK and WORLD_SIZE are not set (found: none)"),
        ({"CLUSTERDDP_LAUNCHER": "local", "RANK": "1"}, "launcher local: WORLD_SIZE is not set"),
        ({"RANK": "one", "WORLD_SIZE": "2"}, "RANK='one' is not a whole number"),
        ({"RANK": "-1", "WORLD_SIZE": "2"}, "RANK='-1'"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK=2, WORLD_SIZE=2 contradict each other: 2 is not below 2"),
        ({"RANK": "0", "WORLD_SIZE": "0"}, "RANK=0, WORLD_SIZE=0 contradict"),
        ({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "n1"}, "could not infer LOCAL_RANK and LOCAL_WORLD_SIZE from"),
        (
            {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "n1"},
            "could not infer LOCAL_WORLD_SIZE from",
        ),
        ({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}, "rank and local rank must be equal"),
        (
            {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "n1"},
            "could not infer LOCAL_RANK from",
        ),
        (
            {"RANK": "3", "WORLD_SIZE": "5", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"},
            "could not infer GROUP_RANK from",
        ),
        ({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}, "more ranks on this node"),
        ({**TORCHRUN, "LOCAL_RANK": "4"}, "LOCAL_RANK=4, LOCAL_WORLD_SIZE=4 contradict"),
        ({"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "1"}, "LOCAL_RANK=1, WORLD_SIZE=1 contradict"),
        ({**TORCHRUN, "MASTER_PORT": "http"}, "MASTER_PORT=http is not a port"),
        ({**TORCHRUN, "MASTER_PORT": "65536"}, "MASTER_PORT=65536 is not a port"),
    ],
)
def test_incomplete_or_contradictory_variables_are_named(environ: dict[str, str], message: str) -> None:
    """The message says which variables are set, which are missing, and what to do."""
    with raises(LauncherEnvironmentError):
        read(environ)


#: The third of four processes, on the second of two nodes, as mpirun 4.1 sets them.
OPENMPI = {
    "OMPI_COMM_WORLD_RANK": "2",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_COMM_WORLD_NODE_RANK": "0",
    "PMIX_NAMESPACE": "1234567890",
}
OPENMPI_ON_ONE_NODE = {**OPENMPI, "OMPI_COMM_WORLD_LOCAL_RANK": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "4"}


def test_open_mpis_variables_are_read_also_in_a_slurm_step() -> None:
    """mpirun starts its daemons in a step, whose variables the ranks inherit. NODE_RANK is no node's number."""
    found = read({**step(), **OPENMPI, "MASTER_ADDR": "n1", "MASTER_PORT": "5000"})
    assert (place(found), found.launcher) == ((2, 0, 4, 2, 1), "openmpi")
    assert (found.master_addr, found.master_port) == ("n1", 5000)


def test_open_mpis_ranks_of_one_node_find_each_other_by_the_jobs_name() -> None:
    """All derive the same port, below the ephemeral ones; another job another."""
    ports = {read({**OPENMPI_ON_ONE_NODE, "PMIX_NAMESPACE": name}).master_port for name in ("a", "a", "b")}
    assert len(ports) == 2
    assert all(port is not None and 10000 <= port < 30000 for port in ports)


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        (OPENMPI, "the 4 ranks are on several nodes, but MASTER_ADDR is not set. Use mpirun -x MASTER_ADDR=HOST"),
        (without(OPENMPI_ON_ONE_NODE, "PMIX_NAMESPACE"), "mpirun -x MASTER_PORT=NUMBER"),
        ({**OPENMPI, "OMPI_COMM_WORLD_RANK": "1"}, "could not infer GROUP_RANK from"),
        (without(OPENMPI, "OMPI_COMM_WORLD_SIZE"), "launcher openmpi: WORLD_SIZE is not set"),
    ],
)
def test_what_open_mpi_does_not_set_must_be_given(environ: dict[str, str], message: str) -> None:
    """Ranks dealt out round-robin, several nodes without an address: no guess."""
    with raises(LauncherEnvironmentError):
        read(environ)


@pytest.mark.parametrize(
    ("environ", "expected", "hosts"),
    [
        (step(), (2, 0, 4, 2, 1), ("n1", "n2")),
        # -N3 -n5: Slurm puts three tasks on the first node.
        (
            step(
                PROCID=2,
                LOCALID=2,
                NODEID=0,
                STEP_NUM_TASKS=5,
                STEP_NUM_NODES=3,
                STEP_TASKS_PER_NODE="3,1(x2)",
                STEP_NODELIST="n[1-3]",
            ),
            (2, 2, 5, 3, 0),
            ("n1", "n2", "n3"),
        ),
        (
            step(
                PROCID=4,
                LOCALID=0,
                NODEID=2,
                STEP_NUM_TASKS=5,
                STEP_NUM_NODES=3,
                STEP_TASKS_PER_NODE="3,1(x2)",
                STEP_NODELIST="n[1-3]",
            ),
            (4, 0, 5, 1, 2),
            ("n1", "n2", "n3"),
        ),
        # One task on the second node of a two-node job: its own master, alone.
        (
            step(
                PROCID=0,
                NODEID=0,
                STEP_NUM_TASKS=1,
                STEP_NUM_NODES=1,
                STEP_TASKS_PER_NODE="1",
                STEP_NODELIST="n2",
            ),
            (0, 0, 1, 1, 0),
            ("n2",),
        ),
        # srun --pty bash, and python in it.
        (
            step(
                PROCID=0,
                NODEID=0,
                STEP_NUM_TASKS=1,
                STEP_NUM_NODES=1,
                STEP_TASKS_PER_NODE="1",
                STEP_NODELIST="n1",
                NTASKS=1,
                NNODES=1,
                PTY_PORT=40000,
            ),
            (0, 0, 1, 1, 0),
            ("n1",),
        ),
        (step(ARRAY_JOB_ID=40, ARRAY_TASK_ID=3), (2, 0, 4, 2, 1), ("n1", "n2")),
        # A het job: the step's variables cover both components, the job's only one.
        (
            step(
                HET_SIZE=2,
                JOB_ID_HET_GROUP_0=41,
                NTASKS=2,
                NNODES=1,
                TASKS_PER_NODE="2",
                JOB_NODELIST="n1",
                JOB_NUM_NODES=1,
            ),
            (2, 0, 4, 2, 1),
            ("n1", "n2"),
        ),
        # Without the step's variables the job's serve.
        (
            step(STEP_NUM_TASKS=None, STEP_NUM_NODES=None, STEP_TASKS_PER_NODE=None, STEP_NODELIST=None),
            (2, 0, 4, 2, 1),
            ("n1", "n2"),
        ),
    ],
)
def test_a_slurm_step_is_read_from_its_own_variables(
    environ: dict[str, str], expected: tuple[int, ...], hosts: tuple[str, ...]
) -> None:
    """Uneven layouts, sub-steps, arrays and het jobs come out right; the first host of the step holds the store."""
    found = read(environ)
    assert (place(found), found.hosts, found.master_addr) == (expected, hosts, hosts[0])
    assert found.launcher == "slurm"


def test_every_rank_computes_slurms_port_unless_the_user_sets_one() -> None:
    """All ranks of a step find the same port; MASTER_ADDR and MASTER_PORT that are set win."""
    assert read(step()).master_port == default_port(41, 2, 0)
    assert read(step(RESTART_COUNT=3)).master_port == default_port(41, 2, 3)
    found = read({**step(), "MASTER_PORT": "1234", "MASTER_ADDR": "10.0.0.1"})
    assert (found.master_addr, found.master_port) == ("10.0.0.1", 1234)


def test_default_ports_differ_where_two_stores_can_meet() -> None:
    """Steps of a job, its restarts and its neighbours never share a port, and none is ephemeral."""
    ports = [default_port(41, step_id, restart) for step_id in range(100) for restart in range(100)]
    assert len(set(ports)) == len(ports)
    assert len({default_port(job, 0, 0) for job in range(4_000_000, 4_010_000)}) == 10_000
    assert all(10000 <= port < 30000 for port in ports)


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        (step(PROCID=4), "SLURM_PROCID=4, SLURM_STEP_NUM_TASKS=4 contradict"),
        (step(NODEID=2), "SLURM_NODEID=2, SLURM_STEP_NUM_NODES=2 contradict"),
        (step(LOCALID=2), "SLURM_LOCALID=2, SLURM_NODEID=1, SLURM_STEP_TASKS_PER_NODE=2(x2) contradict"),
        (step(STEP_TASKS_PER_NODE="2,1"), "SLURM_STEP_TASKS_PER_NODE=2,1, SLURM_STEP_NUM_TASKS=4"),
        (step(STEP_TASKS_PER_NODE="4"), "the tasks per node do not match the numbers of tasks and nodes"),
        (
            step(STEP_NODELIST="n[1-3]"),
            "SLURM_STEP_NODELIST=n[1-3], SLURM_STEP_NUM_NODES=2 contradict each other: 3 hosts",
        ),
        (step(STEP_NODELIST="n[1-"), "'n[1-'"),
        (step(LOCALID=None), "SLURM_LOCALID is not set"),
        (step(NODEID=None), "SLURM_NODEID is not set"),
        (step(STEP_NUM_TASKS=None, NTASKS=None), "none of SLURM_STEP_NUM_TASKS, SLURM_NTASKS, SLURM_NPROCS is set"),
        (step(STEP_NUM_TASKS="four"), "SLURM_STEP_NUM_TASKS='four' is not a whole number"),
        ({**step(), "RANK": "0", "WORLD_SIZE": "1"}, "RANK=0, WORLD_SIZE=1 contradict SLURM_PROCID=2"),
    ],
)
def test_a_contradictory_slurm_step_is_named(environ: dict[str, str], message: str) -> None:
    """The message names Slurm, the variables and their values."""
    with raises(LauncherEnvironmentError) as caught:
        read(environ)
    assert "slurm" in str(caught.value) or "host list" in str(caught.value)


@pytest.mark.parametrize("names", [{"WORLD_SIZE": "16"}, {"RANK": "0"}, {"RANK": "2", "WORLD_SIZE": "4"}])
def test_incomplete_or_equal_variables_do_not_disturb_slurms(names: dict[str, str]) -> None:
    """Batch scripts often export WORLD_SIZE; a rank exports all."""
    assert read({**step(), **names}) == read(step())


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        (BATCH_SHELL, "the batch shell of job 41"),
        ({**BATCH_SHELL, "SLURM_STEP_ID": "4294967291"}, "the batch shell of job 41"),
        ({**BATCH_SHELL, "SLURM_STEP_ID": "batch"}, "the batch shell of job 41"),
        ({**BATCH_SHELL, "SLURM_STEP_ID": "-5"}, "the batch shell of job 41"),
        ({**BATCH_SHELL, "WORLD_SIZE": "16"}, "the batch shell of job 41"),
        ({**step(), "SLURM_STEP_ID": "4294967290"}, "a shell of job 41"),
        ({**step(), "SLURM_STEP_ID": "-6"}, "a shell of job 41"),
        ({"SLURM_JOB_ID": "41", "SLURM_JOB_NODELIST": "n1"}, "a shell of job 41"),
    ],
)
def test_a_batch_shell_is_not_a_rank(environ: dict[str, str], words: str) -> None:
    """The batch shell's SLURM_PROCID=0 would otherwise make a world of one, or wait for a missing rank."""
    with raises(LauncherEnvironmentError):
        read(environ)


@pytest.mark.parametrize("environ", [TORCHRUN, STEP, {}, {"RANK": "1", "WORLD_SIZE": "2"}])
def test_exported_variables_read_back_as_the_same_environment(environ: dict[str, str]) -> None:
    """A script that only knows torchrun's names sees the same ranks; what is not known is left out."""
    found = read(environ)
    again = read({**found.exports()})
    assert place(again) == place(found)
    assert (again.master_addr, again.master_port) == (found.master_addr, found.master_port)
    assert read({**environ, **found.exports()}) == found or not environ


def test_reading_and_scrubbing_change_nothing() -> None:
    """Both take what they need and leave the mapping alone."""
    environ = {**STEP, "RANK": "2", "WORLD_SIZE": "4"}
    before = dict(environ)
    read(environ), scrub(environ), for_parsing(environ)
    assert environ == before


KEPT = ["PATH", "SBATCH_ACCOUNT", "SLURM_CONF", "SLURM_CLUSTERS", "SLURM_ACCOUNT", "CLUSTERDDP_RUNS", "LOCAL_SCRATCH"]
DROPPED = [
    *("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_NTASKS", "SLURM_MEM_PER_NODE", "SLURM_CPUS_PER_TASK", "SLURM_GPUS"),
    *("SLURM_CLUSTER_NAME", "SLURMD_NODENAME", "SRUN_DEBUG", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    *("GROUP_RANK", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "CLUSTERDDP_RUN_DIR", "CLUSTERDDP_ATTEMPT"),
    *("CLUSTERDDP_SUPERVISOR", "CLUSTERDDP_TOKEN", "CLUSTERDDP_LAUNCHER", "ROLE_RANK", "OMPI_COMM_WORLD_RANK"),
    *("CLUSTERDDP_DEVICE", "CLUSTERDDP_WATCHDOG", "CLUSTERDDP_TERM_NOTICE_S", "CLUSTERDDP_USR2_NOTICE_S"),
    *("PMI_RANK", "PMI_SIZE", "PMIX_RANK", "SUBMITIT_EXECUTOR", "SUBMITIT_FOLDER", "SUBMITIT_LOCAL_NTASKS"),
]
FORMATS = ["SQUEUE_FORMAT", "SACCT_FORMAT", "SINFO_FORMAT", "SCONTROL_ALL", "SLURM_TIME_FORMAT"]


def test_a_new_submission_inherits_only_what_was_exported_on_purpose() -> None:
    """What the surrounding job set is dropped, what people export for Slurm is kept."""
    assert list(scrub(dict.fromkeys([*KEPT, *DROPPED, *FORMATS], "x"))) == [*KEPT, *FORMATS]


def test_output_to_parse_has_its_default_format() -> None:
    """The variables that change Slurm's output are dropped as well."""
    assert list(for_parsing(dict.fromkeys([*KEPT, *DROPPED, *FORMATS], "x"))) == KEPT


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "MASTER_PORT"])
def test_a_number_of_five_thousand_digits_is_an_error_that_names_the_variable(name: str) -> None:
    """Python reads none of more than 4300."""
    with raises(LauncherEnvironmentError) as refused:
        read({**TORCHRUN, name: "9" * 5000})
    assert name in str(refused.value)


def test_a_job_that_a_rank_submits_gets_none_of_the_ranks_variables() -> None:
    """But for those that a launcher in the new job has set since."""
    step = {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_LAUNCHER_PORT": "40123"}
    rank = {**TORCHRUN, "SLURM_JOB_ID": "7", **step, **{str(name): "own" for name in FOR_RANKS}}
    del rank[RANK_PROCESS]
    mark(rank, joined=True)
    batch_step = {"SLURM_JOB_ID": "8", "SLURM_PROCID": "0", "WORLD_SIZE": "64"}
    drop_inherited(submitted := {**rank, **batch_step})
    assert submitted == batch_step
    own_step = {"SLURM_JOB_ID": "8", **step, "SLURM_STEP_LAUNCHER_PORT": "40124"}
    drop_inherited(submitted := {**rank, **own_step})
    assert submitted == own_step


def test_a_rank_and_its_own_children_keep_its_variables() -> None:
    rank = {**TORCHRUN, "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0"}
    mark(rank)
    kept = dict(rank)
    drop_inherited(kept)
    check_is_rank(kept)
    assert kept == rank
