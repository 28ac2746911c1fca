"""Presets and placeholders: what they add to a job definition, and which keys of the job win."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from clusterddp.cli.command_line import command
from clusterddp.errors import JobDefinitionError, UsageError
from clusterddp.jobdef import configuration_files, kinds, presets, program
from clusterddp.jobdef.job import Job, Resume
from clusterddp.jobdef.load import from_values, load
from clusterddp.jobdef.yaml12 import load as read_yaml
from clusterddp.keys.node import Mistake
from clusterddp.keys.table import read_fields
from tests.wording import raises

PRESET = """\
# train.py of somebody/something
args: [--output, "{run_dir}/out", --workers, 2]
env: {A: preset, B: preset}
seed: 5
resume:
  checkpoint: "{run_dir}/out/*.pth"
  args: [--resume, "{checkpoint}"]
"""
CHECKPOINT = ("{run_dir}/out/*.pth",)


@pytest.fixture(autouse=True)
def preset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The preset `some`."""
    (tmp_path / "presets").mkdir()
    (tmp_path / "presets" / "some.yaml").write_text(PRESET)
    monkeypatch.setattr(kinds, "PRESETS_FOLDER", tmp_path / "presets")


def job(values: Mapping[str, Any], **overrides: str) -> Job:
    return from_values(
        {"module": "train", **values}, overrides={key.replace("__", "."): overrides[key] for key in overrides}
    )


def mistake(values: Mapping[str, Any]) -> str:
    with pytest.raises(JobDefinitionError) as caught:
        job(values)
    return str(caught.value)


# --- presets


def test_a_file_whose_path_reads_like_a_preset_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own args cannot be dropped with `args: null`. Nor is an option what only reads like one."""
    monkeypatch.chdir(tmp_path)
    for folder in ("preset own", "--set own"):
        file = Path(folder) / "job.yaml"
        file.parent.mkdir()
        file.write_text("module: train\nseed: x\nresume: {checkpoint: a.pt, args: [-r], replace: [fit]}\n")
        with pytest.raises(JobDefinitionError) as caught:
            load(str(file))
        assert "seed: " in str(caught.value) and "drop the args" not in str(caught.value)


def test_a_preset_is_a_layer_below_the_jobs_own_keys() -> None:
    """Mappings are merged; the arguments of both stay, and an option that both have is the job's."""
    made = job({"resume": "some", "args": ["fit", "--lr", "1", "--workers=8"], "env": {"A": "own"}, "seed": 7})
    assert made.args == ("fit", "--lr", "1", "--workers=8", "--output", "{run_dir}/out")
    assert (made.env, made.seed) == ({"A": "own", "B": "preset"}, 7)
    assert made.resume == Resume(CHECKPOINT, ("--resume", "{checkpoint}"))
    assert job({"resume": "some"}).args == ("--output", "{run_dir}/out", "--workers", "2")


def test_keys_beside_a_presets_name_win() -> None:
    """Also those of a later source, such as --set; a name takes the place of what an earlier source says."""
    own = {"preset": "some", "checkpoint": "mine/*.pt"}
    assert job({"resume": own}).resume == Resume(("mine/*.pt",), ("--resume", "{checkpoint}"))
    by_option = job({"resume": "some"}, resume__args="[--load]").resume
    assert by_option == Resume(CHECKPOINT, ("--load",))
    assert job({"resume": {"checkpoint": "mine/*.pt"}}, resume="some").resume == Resume(
        CHECKPOINT, ("--resume", "{checkpoint}")
    )
    assert job({"resume": "some"}, resume="null").resume is None
    assert job({}, steps="{log: 'iter (.*)'}").step_log == "iter (.*)"
    by_option = job({}, resume__checkpoint="{run_dir}/*.pt", resume__args='[--a, "{checkpoint}"]').resume
    assert by_option == Resume(("{run_dir}/*.pt",), ("--a", "{checkpoint}"))


def test_an_own_folder_needs_an_own_pattern() -> None:
    """Otherwise the preset would look for checkpoints where there are none."""
    words = mistake({"resume": "some", "args": ["--output", "elsewhere"]})
    assert "--output is also set by the preset some (--output {run_dir}/out)" in words
    made = job({"resume": {"preset": "some", "checkpoint": "elsewhere/*.pth"}, "args": ["--output=elsewhere"]})
    assert made.args == ("--output=elsewhere", "--workers", "2")


def test_an_unknown_preset_is_a_mistake_that_names_the_others() -> None:
    assert "got 'sume'. Did you mean 'some'?" in mistake({"resume": "sume"})
    assert "Presets: some" in mistake({"resume": "other"})
    alone = mistake({"resume": {"preset": "sume"}})
    assert alone.endswith("got 'sume'. Did you mean 'some'?") and "\n" not in alone
    assert mistake({"resume": {"chekpoint": "a.pt"}}).endswith("'resume.chekpoint'. Did you mean 'checkpoint'?")
    assert "\n" not in mistake({"resume": {"chekpoint": "a.pt"}})


def test_a_run_records_what_the_preset_says(tmp_path: Path) -> None:
    """A later version of the preset does not change it."""
    made = job({"resume": "some"})
    (tmp_path / "job.yaml").write_text(made.to_yaml())
    (tmp_path / "presets" / "some.yaml").unlink()
    assert load(tmp_path / "job.yaml") == made


def test_presets_are_listed_and_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert command(["config", "presets"]) == 0
    assert capsys.readouterr().out == "some  train.py of somebody/something\n"
    assert command(["config", "presets", "some"]) == 0
    assert capsys.readouterr().out == PRESET
    with raises(UsageError):
        command(["config", "presets", "sone"])


@pytest.mark.parametrize(
    "file", sorted(Path(configuration_files.__file__).parents[1].glob("presets/*.yaml")), ids=lambda file: file.stem
)
def test_each_preset_is_a_valid_piece_of_a_job_definition(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its first line says which script it is for. It saves below the run directory, if its script can be told to."""
    monkeypatch.undo()  # the presets of the package, not those of the test
    root, mistakes = read_yaml(file.read_text(), file.name), list[Mistake]()
    assert isinstance(root.value, dict)
    read_fields(root.value, configuration_files.keys_in("presets"), mistakes)
    assert not mistakes
    assert re.fullmatch(r"\w[^#]{10,100}", presets.preset_purpose(file.stem))
    made = job({"resume": file.stem}).resume
    current_folder = file.stem in ("mmengine", "pytorch-imagenet")
    assert made is None or all(pattern.startswith("{run_dir}/") != current_folder for pattern in made.checkpoint)


# --- placeholders


@pytest.mark.parametrize(
    ("text", "filled"),
    [
        ("--out={run_dir}/{attempt}", "--out=/r/3"),
        ('{"dir": "{run_dir}", "x": {}}', '{"dir": "/r", "x": {}}'),
        ("{a:{run_dir}}", "{a:/r}"),
        ("{{run_dir}}", "{run_dir}"),
        ("{{ run_dir }} {{x}} {epoch:02d} {epoch} {Run_Dir}", "{{ run_dir }} {{x}} {epoch:02d} {epoch} {Run_Dir}"),
        ("${run_dir} ${hydra:run_dir}", "${run_dir} ${hydra:run_dir}"),
        ("{node_rank}", "{node_rank}"),
    ],
)  # fmt: skip
def test_only_known_names_in_braces_are_replaced(text: str, filled: str) -> None:
    """JSON, OmegaConf's ${...} and other templates stay."""
    assert program.fill(text, {"run_dir": "/r", "attempt": "3"}) == filled


def test_a_value_is_not_filled_in_again_and_is_no_pattern() -> None:
    assert program.fill("{run_dir}", {"run_dir": "/{attempt}", "attempt": "3"}) == "/{attempt}"
    assert program.fill_pattern("{run_dir}/*", "/a[1]") == "/a[[]1]/*"


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (
            {"args": ["{rundir}/out"]},
            "args: unknown placeholder {rundir}. Did you mean {run_dir}? For the literal text, write {{rundir}}",
        ),
        ({"env": {"OUT": "{node}"}}, "env: unknown placeholder {node}. Did you mean {nodes}?"),
        (
            {"resume": {"checkpoint": "out/{epoch}.pt"}},
            "unknown placeholder {epoch}. Expected {run_dir}. Write * for the parts that vary",
        ),
        (
            {"resume": {"checkpoint": "{attempt}.pt"}},
            "resume.checkpoint: unknown placeholder {attempt}. Expected {run_dir}. For the literal text, write "
            "{{attempt}}. Write * for the parts that vary",
        ),
        (
            {"resume": {"checkpoint": "a.pt", "args": ["{chekpoint}"]}},
            "resume.args: unknown placeholder {chekpoint}. Did you mean {checkpoint}?",
        ),
        ({"resume": {"checkpoint": "{run_dir/out/*.pt"}}, "resume.checkpoint: '{run_dir' has no '}'"),
        ({"resume": {"checkpoint": "a.pt", "args": ["{checkpoint"]}}, "resume.args: '{checkpoint' has no '}'"),
        ({"args": ["--out={run_dir/out"]}, "args: '{run_dir' has no '}'"),
        ({"done": "{run_dir/out/a.pt"}, "done: '{run_dir' has no '}'"),
        ({"resume": {"checkpoint": "~/out/*.pt"}}, "resume.checkpoint: '~' is not expanded. Write the full path"),
        ({"done": "~/out/a.pt"}, "done: '~' is not expanded. Write the full path"),
        ({"done": "$HOME/out/a.pt"}, "done: '$HOME' is not expanded. Write the full path"),
        ({"resume": {"checkpoint": "${SCRATCH}/*.pt"}}, "'${SCRATCH}' is not expanded. Write the full path"),
        (
            {"resume": {"checkpoint": "a[0-9]/b[0-9.pt"}},
            "'a[0-9]/b[0-9.pt' has a '[' without a closing ']'. Write [[] for a literal '['",
        ),
        (
            {"resume": {"checkpoint": "a.pt", "args": ["-r"], "replace": ["fit"]}},
            "resume: expected args or replace, got both. The key replace replaces all arguments",
        ),
        (
            {"resume": {"preset": "some", "replace": ["fit"]}},
            "To drop the args of the preset some, write args: null",
        ),
        ({"stop": "USR1"}, "stop: expected a mapping such as {signal: USR1}, got 'USR1'"),
        ({"args": ["{checkpoint}"]}, "{checkpoint} needs resume.checkpoint"),
        ({"resume": {"args": ["--resume"]}}, "resume: expected checkpoint: PATTERN, or the name of a preset"),
    ],
)  # fmt: skip
def test_what_no_path_or_placeholder_can_mean_is_a_mistake(values: dict[str, Any], words: str) -> None:
    """Names that are like no known one, such as Lightning's {epoch}, are left alone in arguments."""
    assert job({"done": "a[0-9]/[]x]/[!]]/[[]b"}).done is not None
    assert words in mistake(values)
    assert job({"args": ["{epoch}-{val_loss:.2f}", "{{rundir}}"]}).args == ("{epoch}-{val_loss:.2f}", "{{rundir}}")
