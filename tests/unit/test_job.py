"""A job definition is read as written, survives a round trip, and all its mistakes are reported at once."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from clusterddp import __version__
from clusterddp.errors import JobDefinitionError, RunDirectoryError
from clusterddp.jobdef.configuration_files import read_configuration_files
from clusterddp.jobdef.configuration_paths import ConfigurationFile
from clusterddp.jobdef.differences import list_differences
from clusterddp.jobdef.job import (
    KEYS,
    Checkpointing,
    Done,
    Job,
    Keep,
    Limits,
    Resume,
    StopSignal,
    Timeouts,
    Watchdog,
)
from clusterddp.jobdef.load import from_values, load, load_resolved
from clusterddp.trackers.mlflow import Mlflow
from clusterddp.trackers.wandb import Wandb
from tests.wording import raises

EVERYTHING = """\
job_name: digits
script: train.py
args: [--lr, 1e-4, --name, no, 0123, "", 'two words', ~]
hydra: true
resume: {checkpoint: "{run_dir}/*.pt", args: [--resume]}
done: {log: epochs completed}
stop: {signal: USR1}
nodes: 2
spare_nodes: 1
gpus_per_node: a100:4
gpus_per_rank: 2
gpu_request: gres
device: cuda
time: 1:30:00
time_min: 45:00
partition: no
account: 0123
qos: "1e3"
constraint: a100&ib
reservation: spring
exclude: n[1-2]
nodelist: rack[1-2]node[01-02]
mem: 64G
cpus_per_task: 8
setup: [module load cuda, "source venv/bin/activate"]
node_setup: mkdir -p /tmp/cache
stage: /tmp
env: {NCCL_DEBUG: WARN, ON: off, EMPTY: ""}
python: /opt/py/bin/python
sbatch: {exclusive: true, comment: hello there, mail-type: END, licenses: "true"}
srun: {container-image: train.sqsh, container-writable: true}
steps: 20000
protect_saves: false
seed: 17
global_batch: 64
checkpoint: {every: 500 steps, keep: 5}
timeouts: {start_s: 600, step_s: 90.5, notice_s: 60}
watchdog: {step_s: 120, start_s: 900, on_hang: end}
progress_interval: 60
limits: {attempts: 20, gpu_hours: 1.5}
snapshot: 500M
hook: [python, notify.py]
policy: resubmit
continue: false
expedite_requeue: true
lift_hold: false
node_memory: false
interface: [ib0, eth0]
backend: gloo
keep_logs: 7
share: group
preflight: true
tensorboard: true
wandb: {project: digits, entity: lab, group: "7", mode: offline}
mlflow: {experiment: digits, tracking_uri: "http://mlflow:5000"}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a training script."""
    (tmp_path / "train.py").write_text("")
    return tmp_path


def read(folder: Path, text: str, **given: Any) -> Job:
    (folder / "job.yaml").write_text(text)
    return load(folder / "job.yaml", **given)


def mistakes(folder: Path, text: str, **given: Any) -> list[str]:
    """The lines of the error, without the folder."""
    with pytest.raises(JobDefinitionError) as caught:
        read(folder, text, **given)
    return str(caught.value).replace(f"{folder}/", "").splitlines()


def test_every_field_is_read(folder: Path) -> None:
    """Text fields keep the text that YAML 1.1 would have turned into numbers and booleans."""
    assert read(folder, EVERYTHING) == Job(
        name="digits",
        script=str(folder / "train.py"),
        args=("--lr", "1e-4", "--name", "no", "0123", "", "two words", "~"),
        hydra=True,
        resume=Resume(("{run_dir}/*.pt",), ("--resume",)),
        done=Done(log="epochs completed"),
        stop=StopSignal("USR1"),
        nodes=2,
        spare_nodes=1,
        gpus_per_node=4,
        gpus_per_rank=2,
        gpu_request="gres",
        gpu_type="a100",
        time_s=5400,
        time_min_s=2700,
        partition="no",
        account="0123",
        qos="1e3",
        constraint="a100&ib",
        reservation="spring",
        exclude="n[1-2]",
        nodelist="rack[1-2]node[01-02]",
        mem="64G",
        cpus_per_task=8,
        setup=("module load cuda", "source venv/bin/activate"),
        node_setup=("mkdir -p /tmp/cache",),
        stage="/tmp",
        env={"NCCL_DEBUG": "WARN", "ON": "off", "EMPTY": ""},
        python="/opt/py/bin/python",
        sbatch={"exclusive": True, "comment": "hello there", "mail-type": "END", "licenses": "true"},
        srun={"container-image": "train.sqsh", "container-writable": True},
        steps=20000,
        protect_saves=False,
        seed=17,
        global_batch=64,
        checkpoint=Checkpointing(every_steps=500, every_s=None, keep=Keep(5)),
        watchdog=Watchdog(120.0, 900.0, "end"),
        progress_interval=60.0,
        limits=Limits(attempts=20, gpu_hours=1.5),
        snapshot="500M",
        hook=("python", "notify.py"),
        policy="resubmit",
        continues=False,
        expedite_requeue=True,
        lift_hold=False,
        node_memory=False,
        interface=("ib0", "eth0"),
        timeouts=Timeouts(start_s=600.0, step_s=90.5, notice_s=60.0),
        backend="gloo",
        keep_logs=7,
        share="group",
        preflight=True,
        trackers={
            "tensorboard": True,
            "wandb": Wandb("digits", "lab", "7", "offline"),
            "mlflow": Mlflow("digits", "http://mlflow:5000"),
        },
    )


def test_only_the_script_is_required(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A script is enough; the job is named after it, and a null leaves the default."""
    monkeypatch.chdir(folder)
    expected = Job(name="train", script=str(folder / "train.py"))
    assert read(folder, "script: train.py\npartition:\nnodes: ~\ncheckpoint: {every: }\n") == expected
    assert from_values({"script": "train.py"}) == expected
    assert from_values({"module": "pkg.train", "args": ["-x"]}) == Job(name="train", module="pkg.train", args=("-x",))


def test_every_mistake_is_reported_at_once_with_its_place(folder: Path) -> None:
    """One error, in the file's order, each line with file, line, column and the nearest name."""
    found = mistakes(
        folder,
        "script: trian.py\n"
        "partitoin: gpu\n"
        "nodes: two\n"
        "nodes: 3\n"
        "checkpoint: {evry: 5 minutes, keep: 0}\n"
        "sbatch: {output: x.log}\n"
        "device: !cpu cpu\n",
        overrides={"nodez": "4", "seed": "one"},
    )
    assert found == [
        "--set nodez=4: unknown key 'nodez'. Did you mean 'nodes'?",
        "--set seed=one: expected a whole number of at least 0, got 'one'",
        f"job.yaml:1:9: script 'trian.py' not found in {folder}. Did you mean 'train.py'?",
        "job.yaml:2:1: unknown key 'partitoin'. Did you mean 'partition'?",
        "job.yaml:3:8: nodes: expected a whole number from 1 to 65536, or a range such as 2-4, got 'two'",
        "job.yaml:4:1: duplicate key 'nodes', first given on line 3",
        "job.yaml:5:14: unknown key 'checkpoint.evry'. Did you mean 'every'?",
        "job.yaml:5:37: checkpoint.keep: expected a whole number of at least 1, or {last: 3, every: 5000, best: f1 "
        "max}, got '0'",
        "job.yaml:6:10: sbatch.output: not allowed here: the outputs are in the run directory, below logs/",
        "job.yaml:7:9: tag !cpu is not allowed here",
    ]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("nodes: 0", "1:8: nodes: expected a whole number from 1 to 65536, or a range such as 2-4, got '0'"),
        ("nodes: 4-2", "or a range such as 2-4, got '4-2'"),
        ("nodes: 2-", "got '2-'"),
        (f"job_name: {'x' * 201}", "expected at most 200 bytes"),
        ("nodes: 1-999999999", "1 to 65536, or a range such as 2-4, got '1-999999999'"),
        (f"time: {'9' * 5000}", "such as 30, 1:30:00 or 2-12"),
        ("nodes: 0-2", "got '0-2'"),
        ("nodes: 1.0", "got '1.0'"),
        ("nodes: true", "got 'true'"),
        ('nodes: "2"', "1:8: nodes: expected a whole number"),
        ("nodes: [2]", "got a list"),
        ("gpus_per_node: 0", "write device: cpu"),
        ("gpus_per_node: a100", "TYPE:NUMBER such as a100:4, got 'a100'"),
        ("gpus: 8", "1:1: unknown key 'gpus': use the key gpus_per_node"),
        ("gpu_type: a100", "write gpus_per_node: TYPE:NUMBER"),
        ("ntasks-per-node: 8", "use gpus_per_node"),
        ("cpus-per-task: 8", "Did you mean 'cpus_per_task'?"),
        ("name: x", "Did you mean 'job_name'?"),
        ("zzz: 1", "unknown key 'zzz'. Valid keys: job_name, script,"),
        ("device: CPU", "expected cuda or cpu, got 'CPU'. Did you mean 'cpu'?"),
        ("device: gpu", "expected cuda or cpu, got 'gpu'. Did you mean 'cuda'?"),
        ("walltime: 30", "unknown key 'walltime': use the key time"),
        ("env: HF_TOKEN=hunter2", "env: expected a mapping such as {NAME: value}, got text"),
        ("backend: mpi", "expected nccl or gloo, got 'mpi'. For MPI, start the script with mpirun"),
        ("backend: nlcc", "expected nccl or gloo, got 'nlcc'. Did you mean 'nccl'?"),
        ("share: [group]", "expected private or group, got a list"),
        ("time: 1h", "such as 30, 1:30:00 or 2-12, got '1h'"),
        ("time: 1:2:3:4", "got '1:2:3:4'"),
        ("time: 0", "expected a time limit above 0, got '0'"),
        ("time: UNLIMITED", "got 'UNLIMITED'"),
        ("job_name: a/b", "expected a name"),
        ("job_name: my job", "expected a name"),
        ("module: pkg.train", "expected either script or module, got both"),
        ('partition: "gpu\\n#SBATCH --uid=0"', "expected text without line breaks or control characters, got U+000A"),
        ('account: "a\\u2028b"', "got U+2028"),
        ("account: x --uid=0", "expected one word without blanks"),
        ("constraint: [a|b]", "expected text, got a list. Quote it"),
        ('qos: ""', "expected text, got an empty value"),
        ("mem: 64 GB", "expected memory such as 64G, without a space"),
        ("args: --lr 1e-3", "expected a list such as [--lr, 1e-3], got '--lr 1e-3'"),
        ("args: [a, ]\nresume:\n  checkpoint: a\n  args:\n    -\n", "5:"),
        ("hook: []", "or as a line for sh, got an empty list"),
        ("steps: {log: 'iter'}", "such as 'iter (\\d+)', but 'iter' has 0 groups"),
        ("steps: {log: '('}", "but '(' is not valid: missing )"),
        ("done: {log: }", "got a mapping without a value for log"),
        ("args: [{a: 1}]", "expected only text and numbers in the list, got a mapping"),
        ("setup: {a: b}", "expected a list of shell lines"),
        ('setup: ["a\\x1bb"]', "expected shell lines without control characters"),
        ("env: [A=1]", "expected a mapping such as {NAME: value}, got a list"),
        ("env: {A-B: 1}", "env.A-B: not a valid variable name"),
        ("env: {RANK: 1}", "env.RANK: clusterddp sets this variable for each rank"),
        ("env: {A: [1]}", "env.A: expected text"),
        ("sbatch: {Exclusive: true}", "sbatch.Exclusive: expected a long Slurm option"),
        ("sbatch: {--exclusive: true}", "write the option without dashes: exclusive"),
        ("sbatch: {'x y': 1}", "expected a long Slurm option"),
        ('sbatch: {comment: "a\\nb"}', "sbatch.comment: expected text without line breaks"),
        ("sbatch: {nodes: 2}", "use the key nodes"),
        ("sbatch: {ntasks-per-node: 2}", "use gpus_per_node"),
        ("sbatch: {signal: USR2@60}", "`timeouts.notice_s`"),
        ("sbatch: {gres: 'gpu:4'}", "Use the key gpus_per_node"),
        ("sbatch: {array: 1-4}", "submits many runs as a job array"),
        (
            "sbatch: {gpus-per-task: 1}",
            "set the option under srun:, with NVIDIA GPUs together with gres-flags: allow-task-sharing",
        ),
        ("srun: {ntasks: 2}", "srun.ntasks: not allowed here: use gpus_per_node"),
        ("srun: {kill-on-bad-exit: 0}", "clusterddp sets this option itself"),
        ("checkpoint: 5 minutes", "expected a mapping with the keys every, keep, got '5 minutes'"),
        ("checkpoint: {every: 500}", "checkpoint.every: expected an interval such as 500 steps, 5 minutes"),
        ("checkpoint: {every: 1.5 steps}", "got '1.5 steps'"),
        ("checkpoint: {every: 0 minutes}", "got '0 minutes'"),
        ("checkpoint: {every: [5 steps, 6 steps]}", "got '6 steps'"),
        ("checkpoint: {every: []}", "got an empty list"),
        ("timeouts: {step_s: -1}", "timeouts.step_s: expected a positive number of seconds, got '-1'"),
        ("timeouts: {step_s: .inf}", "got '.inf'"),
        ("timeouts: {steps: 5}", "Did you mean 'step_s'?"),
        ("watchdog: no", "watchdog: expected off, or a mapping with the keys step_s, start_s, on_hang, got 'no'"),
        ("watchdog: {on_hang: restrat}", "Did you mean 'restart'?"),
        ("device: cpu\nbackend: nccl", "2:10: backend: 'nccl' needs GPUs, but device is cpu"),
        ("device: cpu\ngpus_per_node: a100:2", "'a100:2' needs GPUs"),
        ("wandb: 3", "wandb: expected true, false, a W&B project, or a mapping such as {project: digits}, got '3'"),
        ("time: 10\ntime_min: 0:20:00", "2:11: time_min: expected at most the job's time, 0-00:10:00, got '0:20:00'"),
        ("targets: {a: {}}", "unknown key 'targets': write it into a configuration file"),
        ("runs_dir: /scratch", "unknown key 'runs_dir': write it into a configuration file"),
        ("on: a100", "`clusterddp submit --on TARGET`"),
        ("steps: 0", "at least 1"),
        ("seed: -1", "at least 0"),
    ],
)
def test_a_wrong_value_is_named_with_what_is_expected(folder: Path, line: str, message: str) -> None:
    """The one mistake in the file is the one line of the error."""
    (found,) = mistakes(folder, f"{line}\nscript: train.py\n")
    assert message in found


def test_a_program_is_needed(folder: Path) -> None:
    """Neither script nor module is a mistake of the whole file; a wrong one is not also a missing one."""
    assert mistakes(folder, "nodes: 2") == ["job.yaml: no program given. Add script: FILE.py or module: PACKAGE.MODULE"]
    assert len(mistakes(folder, "script: [a]")) == 1
    assert mistakes(folder, "script: .") == ["job.yaml:1:9: script '.' is a folder. Name a file"]
    (found,) = mistakes(folder, "module: train.py:main")
    assert "expected a module such as package.train" in found


@pytest.mark.parametrize(
    ("text", "message"),
    [("- a", "job.yaml:1:1: expected 'key: value' lines, got a list"), ("a: [", "job.yaml:1:5: while parsing")],
)
def test_a_file_that_is_no_definition_is_refused(folder: Path, text: str, message: str) -> None:
    """Another shape, or broken YAML."""
    assert mistakes(folder, text)[0].startswith(message)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    """Absent, a folder, or not text."""
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    for name in ("absent", ".", "binary"):
        with raises(JobDefinitionError):
            load(tmp_path / name)


@pytest.mark.parametrize(
    ("text", "seconds", "shown"),
    [
        ("30", 1800, "0-00:30:00"),
        ("90:30", 5430, "0-01:30:30"),
        ("1:30:00", 5400, "0-01:30:00"),
        ("2-12", 216000, "2-12:00:00"),
        ("2-12:30", 217800, "2-12:30:00"),
        ("2-12:30:05", 217805, "2-12:30:05"),
        ("48:00:00", 172800, "2-00:00:00"),
        ("010", 600, "0-00:10:00"),
    ],
)
def test_time_limits_have_slurms_forms(folder: Path, text: str, seconds: int, shown: str) -> None:
    """As sbatch reads them; what is written back is the longest form."""
    job = read(folder, f"script: train.py\ntime: {text}\n")
    assert (job.time_s, job.time_text) == (seconds, shown)


@pytest.mark.parametrize(
    ("every", "steps", "seconds"),
    [
        *[("500 steps", 500, None), ("1 step", 1, None), ("5 minutes", None, 300.0), ("30 seconds", None, 30.0)],
        *[("0.5 hours", None, 1800.0), ("[10 steps, 1 minute]", 10, 60.0), ("never", None, None)],
    ],
)
def test_checkpoints_come_by_steps_or_time(folder: Path, every: str, steps: int | None, seconds: float | None) -> None:
    """What is given replaces the default; the other trigger is off."""
    job = read(folder, f"script: train.py\ncheckpoint: {{every: {every}}}\n")
    assert job.checkpoint == Checkpointing(steps, seconds)


def test_keep_is_a_number_or_up_to_three_rules(folder: Path) -> None:
    """And both come back from the recorded definition."""
    whole = read(folder, "script: train.py\ncheckpoint: {every: auto, keep: {last: 2, every: 50, best: f1 max}}\n")
    assert whole.checkpoint == Checkpointing(None, None, auto=True, keep=Keep(2, 50, "f1", "max"))
    part = read(folder, "script: train.py\ncheckpoint: {keep: {best: val/loss min}}\n")
    assert part.checkpoint.keep == Keep(best="val/loss", best_is="min")
    for job in (whole, part):
        (folder / "again.yaml").write_text(job.to_yaml())
        assert load_resolved(folder / "again.yaml") == job
    with raises(JobDefinitionError):
        read(folder, "script: train.py\ncheckpoint: {keep: {best: f1}}\n")


@pytest.mark.parametrize(
    ("values", "shape"),
    [
        ({"nodes": 2, "gpus_per_node": 8}, "2 nodes x 8 GPUs per node = 16 ranks"),
        ({}, "1 node x 1 GPU per node = 1 rank"),
        ({"gpus_per_node": "a100:4"}, "1 node x 4 a100 GPUs per node = 4 ranks"),
        ({"gpus_per_node": 2, "backend": "gloo"}, "1 node x 2 GPUs per node = 2 ranks (gloo)"),
        ({"device": "cpu", "nodes": 2, "gpus_per_node": "2"}, "2 nodes x 2 processes per node = 4 ranks (gloo on CPU)"),
        ({"device": "cpu"}, "1 node x 1 process per node = 1 rank (gloo on CPU)"),
        (
            {"nodes": "2-4", "gpus_per_node": 8, "global_batch": 96},
            "2 to 4 nodes x 8 GPUs per node = 16 to 32 ranks",
        ),
        ({"gpus_per_node": 8, "gpus_per_rank": 2}, "1 node x 8 GPUs (2 per rank) per node = 4 ranks"),
        (
            {"device": "cpu", "gpus_per_node": 4, "gpus_per_rank": 2},
            "1 node x 2 processes per node = 2 ranks (gloo on CPU, each in place of 2 GPUs)",
        ),
        ({"nodes": "1-2", "global_batch": 2}, "1 to 2 nodes x 1 GPU per node = 1 to 2 ranks"),
    ],
)
def test_the_shape_is_stated_in_words(values: dict[str, Any], shape: str) -> None:
    """Nodes, devices and ranks, each in its number."""
    assert from_values({"module": "m", **values}).shape == shape


@pytest.mark.parametrize(
    "values",
    [
        {"gpus_per_node": 5},
        {"gpus_per_node": "a100:5"},
        {},
    ],
)
def test_gpus_that_the_ranks_of_a_node_cannot_share_are_refused(values: dict[str, Any]) -> None:
    """Otherwise some GPUs would be idle, or some rank would have fewer."""
    with raises(JobDefinitionError):
        from_values({"module": "m", "gpus_per_rank": 2, **values})


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (
            "nodes: 2-4\ngpus_per_node: 8",
            "1:8: nodes: the range 2-4 requires global_batch, which is the number of samples per step over all ranks. ",
        ),
        ("nodes: 2-4\ngpus_per_node: 8", "A multiple of 96"),
        (
            "nodes: 2-4\ngpus_per_node: 8\nglobal_batch: 256",
            "3:15: global_batch: 256 samples cannot be divided evenly among 24 (3 x 8) ranks. "
            "Choose 192 or 288 or nodes: 2 or nodes: 4",
        ),
        ("nodes: 3\ngpus_per_node: 4\ngpus_per_rank: 2\nglobal_batch: 8", "among 6 (3 x 2) ranks. Choose 6 or 12"),
        ("nodes: 2-3\nglobal_batch: 5", "among 2 (2 x 1) or 3 (3 x 1) ranks. Choose 6"),
        ("nodes: 3\nglobal_batch: 10", "among 3 (3 x 1) ranks. Choose 9 or 12"),
        ("nodes: 2-4\nglobal_batch: 0", "global_batch: expected a whole number of at least 1, got '0'"),
    ],
)
def test_a_global_batch_that_cannot_be_kept_is_refused_with_the_choices(folder: Path, lines: str, message: str) -> None:
    """Every number of nodes that Slurm may give must share it evenly; one that is left out has to be said."""
    assert message in mistakes(folder, f"{lines}\nscript: train.py\n")[0]


def test_a_range_of_nodes_is_read_as_slurm_does_and_a_single_number_is_no_range(folder: Path) -> None:
    """A number in an upper layer takes the place of the whole range."""
    job = read(folder, "script: train.py\nnodes: 2-4\nglobal_batch: 12\n")
    assert (job.nodes, job.min_nodes, list(job.node_counts), job.nodes_text) == (4, 2, [2, 3, 4], "2-4")
    one = read(folder, "script: train.py\nnodes: 2-4\nglobal_batch: 12\n", values={"nodes": "3"})
    assert (one.nodes, one.min_nodes, one.nodes_text) == (3, None, "3")
    assert read(folder, "script: train.py\nnodes: 2-2\n") == read(folder, "script: train.py\nnodes: 2\n")
    assert list_differences(job, one) == ["nodes: 2-4 recorded, 3 given"]


def test_overrides_win_and_reach_into_mappings(folder: Path) -> None:
    """``--set`` changes single values, in the file's own words; an empty one goes back to the default."""
    job = read(
        folder,
        EVERYTHING,
        overrides={
            "nodes": "4",
            "checkpoint.keep": "9",
            "env.NEW": "a: b # c",
            "env.EMPTY": "",
            "sbatch.exclusive": "false",
            "account": "no",
            "qos": "",
            "time": "90:00",
        },
    )
    assert (job.nodes, job.account, job.qos, job.time_s) == (4, "no", None, 5400)
    assert job.checkpoint == Checkpointing(500, None, keep=Keep(9))
    assert job.env == {"NCCL_DEBUG": "WARN", "ON": "off", "EMPTY": "", "NEW": "a: b # c"}
    assert job.sbatch["exclusive"] is False
    keep = {"checkpoint.keep.best": "f1 max", "checkpoint.keep.last": "2"}
    deeper = read(folder, "script: train.py\n", overrides=keep)
    assert deeper.checkpoint.keep == Keep(2, best="f1", best_is="max")


def test_layers_win_in_order_and_are_all_checked(folder: Path) -> None:
    """Defaults, file, options, ``--set``; a mistake that a higher layer hides is still reported."""
    (folder / "config.yaml").write_text("defaults: {partition: a, account: a, qos: a, seed: 1, env: {A: a, B: a}}\n")
    given: dict[str, Any] = {
        "defaults": read_configuration_files([ConfigurationFile("user", folder / "config.yaml")], None),
        "values": {"qos": "c", "seed": "3"},
        "overrides": {"seed": "4"},
    }
    job = read(folder, "script: train.py\naccount: b\nqos: b\nseed: 2\nenv: {B: b}\n", **given)
    assert (job.partition, job.account, job.qos, job.seed, job.env) == ("a", "b", "c", 4, {"A": "a", "B": "b"})
    assert mistakes(folder, "script: train.py\nseed: x\n", **given) == [
        "job.yaml:2:7: seed: expected a whole number of at least 0, got 'x'"
    ]


def test_the_command_lines_mistakes_are_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Values from elsewhere have a source instead of a line."""
    monkeypatch.chdir(folder)
    with pytest.raises(JobDefinitionError) as caught:
        from_values({"script": "train.py", "nodes": "two", "partitoin": "x"})
    assert str(caught.value).splitlines() == [
        "command line: nodes: expected a whole number from 1 to 65536, or a range such as 2-4, got 'two'",
        "command line: unknown key 'partitoin'. Did you mean 'partition'?",
    ]


AWKWARD = [
    "",
    " ",
    "no",
    "~",
    "null",
    "0123",
    "1e-4",
    "1:30:00",
    "true",
    "a: b",
    "# c",
    "- d",
    "it's",
    '"q"',
    "'",
    "é",
    "…",
]
AWKWARD += [
    "two\nlines\n",
    "\n",
    "tab\t",
    "\x07",
    "\x85",
    "\u2028",
    "\ufeff",
    "😀",
    "\udc80",
    "%d",
    "@x",
    "`x`",
    "x" * 300,
    "*a",
]


@pytest.mark.parametrize(
    "job",
    [
        Job(name="x", module="m"),
        Job(name="no", script="/data/a b/train.py", args=tuple(AWKWARD), resume=Resume(("a.pt",), ("0x10",))),
        Job(name="x", module="m", env={f"V{n}": text for n, text in enumerate(AWKWARD)} | {"no": "y", "Y": "1_0"}),
        Job(name="x", module="m", sbatch={"exclusive": True, "hold": False, "comment": "true", "nice": "100"}),
        Job(name="1e3", module="m", gpus_per_node=4, gpu_type="1g.5gb", time_s=217805, partition="on", account="007"),
        Job(name="x", module="m", checkpoint=Checkpointing(None, None, True), timeouts=Timeouts(1.5, 1e20, 0.1)),
        Job(name="x", module="m", watchdog=None),
        Job(name="x", module="m", nodes=4, min_nodes=2, gpus_per_node=8, global_batch=960),
        Job(name="x", module="m", checkpoint=Checkpointing(7, 0.1), device="cpu", seed=2**60, steps=1, share="group"),
        Job(
            name="x", module="m", checkpoint=Checkpointing(None, 1e20), setup=("# a", "x='y z'", "\tif true; then", "")
        ),
    ],
)
def test_a_resolved_definition_reads_back_as_an_equal_job(tmp_path: Path, job: Job) -> None:
    """Any text survives, the script need not exist any more, and the definition can be loaded as any other."""
    path = tmp_path / "job.yaml"
    path.write_text(job.to_yaml(), encoding="utf-8")
    assert load_resolved(path) == job
    if job.module:
        assert load(path) == job


def test_a_loaded_definition_reads_back_as_an_equal_job(folder: Path, tmp_path: Path) -> None:
    """From a user's file to the run directory's."""
    job = read(folder, EVERYTHING)
    (tmp_path / "resolved.yaml").write_text(job.to_yaml())
    assert load_resolved(tmp_path / "resolved.yaml") == job


def test_differences_are_listed_one_a_line() -> None:
    """In the words of the file, the recorded value first."""
    recorded = Job(name="x", module="m", nodes=2, args=("--lr", "1 2"), env={"A": "1", "B": "2"}, time_s=600)
    given = dataclasses.replace(
        recorded, nodes=4, args=(), env={"A": "9"}, time_s=None, gpu_type="a100", checkpoint=Checkpointing(keep=Keep(5))
    )
    assert list_differences(recorded, given) == [
        "args: --lr '1 2' recorded, none given",
        "nodes: 2 recorded, 4 given",
        "gpus_per_node: 1 recorded, a100:1 given",
        "time: 0-00:10:00 recorded, none given",
        "env.A: 1 recorded, 9 given",
        "env.B: 2 recorded, none given",
        "checkpoint.keep: 3 recorded, 5 given",
    ]
    assert list_differences(recorded, dataclasses.replace(recorded)) == []


def test_of_two_long_argument_lines_only_what_differs_is_shown() -> None:
    """An option with its value, however long the rest; a secret stays masked."""
    recorded = Job(name="x", module="m", args=("--data", "/d", "--lr", "0.1", "--api-key", "s3cret", "--fast", "a.txt"))
    args = ("--data", "/d", "--lr", "-2", "--api-key", "other1", "--fast", "a.txt", "b.txt")
    (line,) = list_differences(recorded, dataclasses.replace(recorded, args=args))
    assert line == "args: --lr 0.1 --api-key '***' recorded, --lr -2 --api-key '***' b.txt given"
    (line,) = list_differences(recorded, dataclasses.replace(recorded, args=recorded.args[2:]))
    assert line == "args: --data /d recorded, none given"


def test_set_takes_lists_and_mappings_for_the_fields_that_are_such(folder: Path) -> None:
    """As YAML; elsewhere brackets are text, and what is no YAML is refused with its place."""
    given = {
        "args": "[--lr, 1e-3, '[x]']", "checkpoint": "{every: 5 steps}", "checkpoint.keep": "{last: 2, every: 9}",
        "env": "{A: 1}", "env.B": "[1, 2]", "setup": "[module load a, cd b]",
    }  # fmt: skip
    job = from_values({"module": "m", "env": {"C": "3"}}, overrides=given)
    assert job.args == ("--lr", "1e-3", "[x]")
    assert job.env == {"A": "1", "B": "[1, 2]", "C": "3"}
    assert (job.checkpoint.every_steps, job.checkpoint.keep) == (5, Keep(2, every=9))
    assert job.setup == ("module load a", "cd b")
    with raises(JobDefinitionError):
        from_values({"module": "m"}, overrides={"args": "[--lr"})


def test_every_difference_is_found(folder: Path) -> None:
    """No field can change unnoticed. A site is none: a job has the values of its profile instead."""
    everything, least = read(folder, EVERYTHING), Job(name="x", module="m", device="cpu")
    keys = {line.split(":")[0].split(".")[0] for line in list_differences(least, everything)}
    assert keys == KEYS.keys() - {"site"}


def test_an_impossible_file_name_is_a_missing_script(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system's own error for it is no reason for a traceback."""
    monkeypatch.chdir(folder)
    with raises(JobDefinitionError):
        from_values({"script": "x" * 5000})


@pytest.mark.parametrize("read", [load, load_resolved])
def test_a_run_of_a_newer_version_is_refused_in_one_sentence(read: Callable[[Path], Job], tmp_path: Path) -> None:
    """Before its keys are checked: they may mean something else in that version."""
    path = tmp_path / "job.yaml"
    path.write_text("format: 2\nscript: train.py\nranks: {model: 4}\n")
    with pytest.raises(RunDirectoryError) as caught:
        read(path)
    assert str(caught.value) == (
        f"{path} has run format 2, but clusterddp {__version__} reads format 1. A newer version recorded this run. To "
        "continue it, upgrade clusterddp"
    )
    (tmp_path / "train.py").touch()
    path.write_text("format: 1\nscript: train.py\n")
    assert read(path).script == str(tmp_path / "train.py")
