"""The overrides that sweeps and runs write for Hydra apps, as Hydra itself reads them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clusterddp.cli.command_line import command
from clusterddp.jobdef import program, yaml12
from clusterddp.jobdef.job import Job, Resume
from clusterddp.jobdef.program import is_hydra_app, with_overrides
from clusterddp.runs.submission import describe
from clusterddp.runs.sweep_members import jobs_of, of_options
from tests.packages import require
from tests.wording import says

APP = "import hydra\n@hydra.main(version_base=None)\ndef main(cfg):\n    pass\nmain()\n"


def read_by_hydra(override: str) -> Any:
    """The value of ``key=value`` as Hydra's parser has it."""
    require("hydra")
    from hydra.core.override_parser.overrides_parser import OverridesParser

    return OverridesParser.create().parse_override(override).value()


def plain(value: Any) -> Any:
    """Without Hydra's marks for quoted strings."""
    if isinstance(value, list):
        return [plain(item) for item in value]
    if isinstance(value, dict):
        return {str(plain(key)): plain(item) for key, item in value.items()}
    return getattr(value, "text", value)


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("1e-3", "1e-3"), ("007", "7"), (".5", "0.5"), ("0x10", "16"), (".inf", "inf"), ("-2", "-2"),
        ("true", "true"), ("~", "null"), ("adam", "adam"), ("/data/a.b-c", "/data/a.b-c"),
        ("'null'", "'null'"), ("'1e-3'", "'1e-3'"), ('""', "''"), ("a b", "'a b'"), ("'a,b=c'", "'a,b=c'"),
        ("it's", r"'it\'s'"), ("[0.9, 0.95]", "[0.9,0.95]"), ("{a: [1, x y]}", "{a:[1,'x y']}"),
    ],
)  # fmt: skip
def test_a_value_is_quoted_as_hydra_wants_it(written: str, expected: str) -> None:
    node = yaml12.load(written, "here")
    assert program.hydra_value(node) == expected
    assert plain(read_by_hydra(f"key={expected}")) == plain_node(node)


def plain_node(node: yaml12.Node) -> Any:
    if isinstance(node.value, list):
        return [plain_node(item) for item in node.value]
    if isinstance(node.value, dict):
        return {str(key): plain_node(item) for key, item in node.value.items()}
    return node.value


@given(st.text(st.characters(codec="utf-8", exclude_characters="$"), max_size=12))
def test_any_text_reaches_the_app_as_it_is(content: str) -> None:
    assert plain(read_by_hydra(f"key={program.hydra_text(content)}")) == content


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (APP, True),
        ("from hydra import main as start\n@start()\ndef run(cfg): ...\n", True),
        ("import hydra as h\n@h.main\ndef run(cfg): ...\n", True),
        ("import hydra\nwith hydra.initialize('conf'):\n    pass\n", False),
        ("from other import main\n@main()\ndef run(cfg): ...\n", False),
        ("import hydra.main\ndef main(): ...\n", False),
        ("print 'an old script'\n", False),
    ],
)
def test_a_hydra_app_is_known_by_its_source(tmp_path: Path, source: str, expected: bool) -> None:
    """No module is imported, and no other file is read."""
    (tmp_path / "app.py").write_text(source)
    assert is_hydra_app(tmp_path / "app.py") is expected


def test_the_key_of_the_job_definition_wins_over_the_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "app.py").write_text(APP)
    (tmp_path / "plain.py").write_text("")
    assert describe("app.py", {}, {}).hydra is True
    assert describe(None, {"module": "app"}, {}).hydra is True
    assert describe("app.py", {}, {"hydra": "false"}).hydra is False
    assert describe("plain.py", {}, {}).hydra is None


def test_a_sweep_of_a_hydra_app_writes_overrides(tmp_path: Path) -> None:
    """Between the overrides that all members have and the options that follow them."""
    (tmp_path / "app.py").write_text(APP)
    job = describe(str(tmp_path / "app.py"), {"args": ["epochs=3", "--config-name", "small"]}, {})
    members = of_options(
        ["model.lr=1e-3,0.1", "args.seed=0", "+experiment=a b", "model.betas=[[0.9, 0.95]]", "db@source=x", "seed=5"]
    )
    jobs = jobs_of(job, members)
    assert [one.args for one in jobs] == [
        (
            "epochs=3", f"model.lr={lr}", "seed=0", "+experiment='a b'", "model.betas=[0.9,0.95]", "db@source=x",
            "--config-name", "small",
        )
        for lr in ("1e-3", "0.1")
    ]  # fmt: skip
    assert [one.seed for one in jobs] == [5, 5]  # a key of the job definition; args.seed is the app's


def test_a_sweep_file_of_a_hydra_app_is_valid(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "app.py").write_text(APP)
    (tmp_path / "lr.yaml").write_text("job: {script: app.py}\ngrid: {+model.betas: [[0.9, 0.95], [0.9, 0.99]]}\n")
    assert command(["config", "validate", str(tmp_path / "lr.yaml")]) == 0
    says(capsys.readouterr().out)


def test_null_and_booleans_are_values_for_hydra(tmp_path: Path) -> None:
    (tmp_path / "app.py").write_text(APP)
    job = describe(str(tmp_path / "app.py"), {}, {})
    jobs = jobs_of(job, of_options(["sched=null", "amp=true,false"]))
    assert [one.args for one in jobs] == [("sched=null", "amp=true"), ("sched=null", "amp=false")]


def test_an_attempt_resumes_with_an_override_among_the_others() -> None:
    resume = Resume(("{run_dir}/*.ckpt",), ("ckpt='{checkpoint}'",))
    job = Job("app", "app.py", hydra=True, args=("lr=1", "--config-name", "small"), resume=resume)
    assert job.arguments(True) == ("lr=1", "ckpt='{checkpoint}'", "--config-name", "small")


def test_a_rank_gets_one_output_folder() -> None:
    """The user's own folder on the command line wins."""
    run, callback = (
        Path("/runs/lr=1,a"),
        "++hydra.callbacks.clusterddp._target_=clusterddp.integrations.hydra.RunCallback",
    )
    assert program.hydra_arguments(["lr=1"], run / "hydra") == ["lr=1", callback, "hydra.run.dir='/runs/lr=1,a/hydra'"]
    assert program.hydra_arguments(["hydra.run.dir=x"], run / "hydra") == ["hydra.run.dir=x", callback]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], ["k=v"]),
        (["-cn", "small"], ["-cn", "small", "k=v"]),
        (["a=1", "-cn", "small"], ["a=1", "k=v", "-cn", "small"]),
        (["-cn", "small", "a=1", "~b"], ["-cn", "small", "a=1", "~b", "k=v"]),
        (["--config-dir=x", "a=1"], ["--config-dir=x", "a=1", "k=v"]),
    ],
)
def test_overrides_stay_together(arguments: list[str], expected: list[str]) -> None:
    assert list(with_overrides(arguments, ["k=v"])) == expected
