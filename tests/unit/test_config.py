"""``clusterddp config``: the resolved job and its origins, checked files, and the schema."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft7Validator

from clusterddp.cli.command_line import command
from clusterddp.cli.options import PACKAGED_JOB
from clusterddp.errors import JobDefinitionError
from clusterddp.jobdef import yaml12
from clusterddp.jobdef.job import KEYS
from clusterddp.jobdef.json_schema import job_schema
from clusterddp.jobdef.load import load, load_resolved
from clusterddp.keys.node import Node
from tests.key_examples import examples

REPOSITORY = Path(__file__).resolve().parents[2]
JOB = """\
script: train.py
nodes: 2
checkpoint: {every: 500 steps}
env: {HF_TOKEN: s3cret-value, TWO: "a\\nb"}
account: null
"""
VALIDATOR = Draft7Validator(job_schema())
SHOW = ["config", "show", "job.yaml", "--gpus", "a100:4", "--set", "seed=7", "--set", "env.API_KEY=s3cret-value"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project with a configuration file and a job, which is the current folder."""
    for name, value in {
        "CLUSTERDDP_SITE_CONFIG": "",
        "XDG_CONFIG_HOME": "/nonexistent",
        "SLURM_CLUSTERS": "alps",
    }.items():
        monkeypatch.setenv(name, value)
    (tmp_path / ".clusterddp").mkdir()
    (tmp_path / ".clusterddp" / "config.yaml").write_text(
        "defaults: {account: x, watchdog: off}\nclusters:\n  alps:\n    partition: normal\n    env: {HF_HOME: /data}\n"
    )
    (tmp_path / "train.py").touch()
    (tmp_path / "job.yaml").write_text(JOB)
    monkeypatch.chdir(tmp_path)
    return tmp_path


# --- show


def test_each_value_is_shown_with_its_origin(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """File, line and column, the option, or the default; as YAML with comments."""
    assert command([*SHOW, "--origin"]) == 0
    shown = capsys.readouterr()
    assert shown.err == f"cluster: alps\nconfiguration files: project {folder}/.clusterddp/config.yaml\n"
    lines = [" ".join(line.replace(f"{folder}/", "").split()) for line in shown.out.splitlines()]
    for expected in (
        "job_name: train # default",
        "nodes: 2 # job.yaml:2:8",
        "gpus_per_node: 'a100:4' # option --gpus",
        "partition: normal # .clusterddp/config.yaml:4:16",
        "account: null # job.yaml:5:10",
        "HF_HOME: /data # .clusterddp/config.yaml:5:20",
        "HF_TOKEN: '***' # job.yaml:4:17",
        'TWO: "a\\nb" # job.yaml:4:36',
        "API_KEY: '***' # --set env.API_KEY=***",
        "seed: 7 # --set seed=7",
        "every: 500 steps # job.yaml:3:21",
        "keep: 3 # default",
        "watchdog: 'off' # .clusterddp/config.yaml:1:34",
    ):
        assert expected in lines
    assert not [line for line in lines if line.startswith("qos")]


def test_the_shown_job_is_the_one_that_is_submitted(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With origins and without, it is a job definition with the same values."""
    texts = []
    for option in ([], ["--origin"]):
        command([*SHOW, *option, "--", "--lr", "1e-3", "--token", "s3cret-value"])
        texts.append(capsys.readouterr().out)
    assert "s3cret" not in "".join(texts)
    jobs = []
    for text in texts:
        (folder / "shown.yaml").write_text(text)
        jobs.append(load(folder / "shown.yaml"))
    assert jobs[0] == jobs[1] and jobs[0].args == ("--lr", "1e-3", "--token", "***")
    assert (jobs[0].gpu_type, jobs[0].partition, jobs[0].watchdog, jobs[0].env["TWO"]) == (
        "a100",
        "normal",
        None,
        "a\nb",
    )


def test_json_has_every_key_with_its_origin(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Also those that are not set."""
    command([*SHOW, "--json"])
    shown = json.loads(capsys.readouterr().out)
    assert (shown["schema"], shown["cluster"], shown["job"]["env"]["HF_TOKEN"]) == (1, "alps", "***")
    assert shown["configuration_files"] == [{"owner": "project", "file": str(folder / ".clusterddp" / "config.yaml")}]
    assert shown["job"].keys() == KEYS.keys()
    assert (shown["origins"]["qos"], shown["origins"]["checkpoint.every"]) == ("default", "job.yaml:3:21")


def test_without_a_job_the_bundled_one_is_shown(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With what the configuration files set, which a user on a new cluster wants to see."""
    command(["config", "show"])
    shown = capsys.readouterr()
    assert yaml.safe_load(shown.out)["partition"] == "normal" and "Showing the bundled digits example" in shown.err
    (folder / "clusterddp.yaml").write_text("module: mine\n")
    command(["config", "show"])
    assert yaml.safe_load(capsys.readouterr().out)["module"] == "mine"


# --- validate


def test_each_file_gets_a_line_and_each_mistake_its_own(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """On stdout; the configuration files that apply here do not count."""
    (folder / "wrong.yaml").write_text("nodes: x\nscript: trian.py\n")
    (folder / "config.yaml").write_text("clusters: {alps: {args: [a]}}\n")
    (folder / "sweep.yaml").write_text("job: job.yaml\ngrid: {lr: [1, 2], seed: 0..2}\n")
    (folder / "wrong_sweep.yaml").write_text("job: {script: train.py}\ngrid: {nodes: [1, x]}\n")
    names = ["job.yaml", "wrong.yaml", "config.yaml", ".clusterddp/config.yaml", "absent.yaml"]
    names += ["sweep.yaml", "wrong_sweep.yaml"]
    assert command(["config", "validate", *names]) == 2
    lines = capsys.readouterr().out.splitlines()
    assert [line[:34] for line in lines] == [
        "job.yaml: valid job definition",
        "wrong.yaml:1:8: nodes: expected a ",
        "wrong.yaml:2:9: script 'trian.py' ",
        "config.yaml:1:19: unknown key 'arg",
        ".clusterddp/config.yaml: valid con",
        "could not read absent.yaml: No suc",
        "sweep.yaml: valid sweep of 6 membe",
        "wrong_sweep.yaml:2:19: nodes: expe",
    ]


def test_the_jobs_that_come_with_clusterddp_are_valid(capsys: pytest.CaptureFixture[str]) -> None:
    names = [str(path) for path in [*REPOSITORY.glob("jobs/*.yaml"), PACKAGED_JOB]]
    assert command(["config", "validate", *names]) == 0
    for name in names:
        VALIDATOR.validate(plain(yaml12.load(Path(name).read_text(), name)))


# --- schema


def plain(node: Node) -> Any:
    """What an editor passes to a schema."""
    if isinstance(node.value, dict):
        return {str(key): plain(item) for key, item in node.value.items()}
    return [plain(item) for item in node.value] if isinstance(node.value, list) else node.value


def accepted(folder: Path, text: str) -> tuple[bool, bool]:
    """Whether the schema accepts a document, and whether the reader does."""
    path = folder / "job.yaml"
    path.write_text(text)
    by_schema = VALIDATOR.is_valid(plain(yaml12.load(text, "job.yaml")))
    try:
        load(path)
    except JobDefinitionError:
        return by_schema, False
    return by_schema, True


@pytest.mark.parametrize("key", KEYS)
def test_the_schema_agrees_with_the_reader(key: str, folder: Path) -> None:
    """The key's examples are accepted, or refused, by both; and so is a null. What is recorded is read back equal."""
    those = examples(KEYS[key])
    assert those.valid and those.wrong
    program = "" if key in ("script", "module") else "script: train.py\n"
    batch = "global_batch: 24\n" if key == "nodes" else ""  # which a range of nodes needs
    for text in [*those.valid, *([] if not program else ["null"])]:
        assert accepted(folder, f"{program}{batch}{key}: {text}\n") == (True, True), text
        job = load(folder / "job.yaml")
        (folder / "recorded.yaml").write_text(job.to_yaml())
        assert load_resolved(folder / "recorded.yaml") == job, text
    for text in those.wrong:
        assert accepted(folder, f"{program}{batch}{key}: {text}\n") == (False, False), text


@pytest.mark.parametrize(
    "text", ["nodes: 2\n", "script: train.py\nmodule: m\n", "script: train.py\npartitoin: x\n", "[]"]
)
def test_what_a_job_must_have_is_in_the_schema(text: str, folder: Path) -> None:
    """One program, and no unknown key."""
    assert accepted(folder, text) == (False, False)


def test_the_schema_explains_every_key(capsys: pytest.CaptureFixture[str]) -> None:
    """An editor shows the text, and the default."""
    assert command(["config", "schema"]) == 0
    schema = json.loads(capsys.readouterr().out)
    Draft7Validator.check_schema(schema)
    described = schema["properties"]
    assert all(described[key]["description"] for key in KEYS)
    assert (described["nodes"]["default"], described["lift_hold"]["default"], described["spare_nodes"]["default"]) == (
        1,
        True,
        0,
    )
    assert described["reservation"]["description"] == "The reservation, as in sbatch."
