"""The reference in docs/reference is up to date and complete: every public name, parameter, error and option."""

from __future__ import annotations

import argparse
import ast
import inspect
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

import clusterddp
from clusterddp import errors
from clusterddp.cli.command_line import parser, split_at_dashes
from clusterddp.jobdef.job import KEYS
from clusterddp.jobdef.load import load
from clusterddp.rundir.run_directory import RunDirectory
from clusterddp.trackers.registry import TRACKERS
from docs.reference import generate as reference
from docs.reference import python_api
from docs.reference.examples import EXAMPLES

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "reference"


def entries() -> Iterator[python_api.Name]:
    for _, _, found in python_api.names():
        for name in found:
            yield name
            yield from name.members


@pytest.mark.parametrize("name", sorted(reference.pages()))
def test_the_pages_are_what_the_code_says_now(name: str) -> None:
    assert page(name) == reference.pages()[name], "out of date: run `make reference`"


def test_dir_lists_exactly_the_public_names_and_all_are_in_the_reference() -> None:
    assert dir(clusterddp) == sorted(clusterddp.__all__)
    listed = {entry.title.split(".")[1] for entry in entries() if entry.title.startswith("clusterddp.")}
    assert {*clusterddp.__all__} - listed == {"__version__", "errors"}
    for name in clusterddp.__all__:
        assert getattr(clusterddp, name) is not None


def test_every_public_name_has_a_docstring_that_names_all_parameters_and_attributes() -> None:
    lacking = []
    for entry in entries():
        fields = [field.split(":")[0] for field, text in entry.fields if not text]
        names = [*entry.parameters, *entry.attributes, *fields]
        missing = [name for name in names if not re.search(rf"\b{name}\b", entry.doc)]
        if missing or not entry.doc:
            lacking.append(f"{entry.title}: {', '.join(missing) or 'no docstring'}")
    assert not lacking, "\n".join(lacking)


def test_every_public_name_has_an_example_that_its_signature_accepts() -> None:
    for entry in entries():
        code, *_ = [*python_api.examples(entry.doc), EXAMPLES.get(entry.key, "")]
        assert code, f"{entry.title}: the docstring has no example"
        tree = ast.parse(code)
        if entry.signature:
            check_calls(tree, entry)


def check_calls(tree: ast.AST, entry: python_api.Name) -> None:
    """There is one, and the signature takes the arguments of each."""
    name = entry.key.rpartition(".")[2]
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    calls = [call for call in calls if ast.unparse(call.func).rpartition(".")[2] == name]
    assert calls, f"{entry.title}: the example does not call it"
    signature = inspect.signature(eval(f"lambda {_arguments(entry)}: None"))
    for call in calls:
        signature.bind(*call.args, **{keyword.arg: keyword.value for keyword in call.keywords if keyword.arg})


def _arguments(entry: python_api.Name) -> str:
    """The parameters of a signature as a lambda takes them: without types."""
    (function,) = ast.parse(f"def {entry.signature}: ...").body
    assert isinstance(function, ast.FunctionDef)
    for argument in ast.walk(function.args):
        if isinstance(argument, ast.arg):
            argument.annotation = None
    function.args.defaults = [ast.Constant(None) for _ in function.args.defaults]
    function.args.kw_defaults = [default and ast.Constant(None) for default in function.args.kw_defaults]
    return ast.unparse(function.args)


def test_every_example_belongs_to_a_command_or_a_name_without_one() -> None:
    without = {entry.key for entry in entries() if not python_api.examples(entry.doc)}
    assert EXAMPLES.keys() == without | reference.commands().keys()


def test_every_error_is_listed_with_its_exit_code() -> None:
    defined = re.findall(r"^class (\w+)", inspect.getsource(errors), re.MULTILINE)
    rows = re.findall(r"^\| `(\w+)` \| `\w+` \| (\d+) \|", page("exit-codes.md"), re.MULTILINE)
    assert [name for name, _ in rows] == defined
    for name, code in rows:
        error = getattr(errors, name)
        assert getattr(error, "exit_code", 75 if issubclass(error, errors.Stopped) else 1) == int(code)


def test_exit_codes_that_answer_are_listed_for_existing_commands_and_are_no_errors() -> None:
    """Those of `wait` are in the same page as all others, from the same source."""
    assert errors.ANSWERS.keys() <= reference.commands().keys()
    own = {*errors.WAITED.values(), errors.TIMED_OUT}
    assert len(own) == 6 and not own & errors.MEANINGS.keys()
    of_check = {errors.FAULT_FOUND, errors.NOT_REPEATABLE}
    of_all = {0, 1, 2, errors.INTERNAL_ERROR, errors.STOPPED, errors.INTERRUPTED, errors.BROKEN_PIPE}
    assert errors.MEANINGS.keys() - {"128 + N"} == of_all | of_check
    assert all(re.search(rf"\b{code}\b", errors.ANSWERS["wait"]) for code in own)


def page(name: str) -> str:
    return (FOLDER / name).read_text()


def test_the_types_of_the_python_api_say_nothing_of_job_definitions() -> None:
    assert "Annotated" not in reference.pages()["api.md"]


def test_every_key_of_a_job_definition_has_a_type_and_a_meaning() -> None:
    rows = re.findall(r"^\| `([\w.]+)` \| (.*) \| (.*) \| (.*) \|$", page("job-definition.md"), re.MULTILINE)
    assert {name.split(".")[0] for name, *_ in rows} == KEYS.keys()
    assert {"checkpoint.keep.best", "watchdog.step_s", "stop.signal"} <= {name for name, *_ in rows}
    assert not [name for name, kind, _, meaning in rows if not kind or not meaning]


def test_every_key_has_an_example_that_is_valid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """That of a key inside another one follows ``--set``."""
    monkeypatch.chdir(tmp_path)
    Path("train.py").touch()
    rows = re.findall(r"^\| `([\w.]+)` \|.*Example: `(.*?)`\. \|$", page("job-definition.md"), re.MULTILINE)
    assert {name.split(".")[0] for name, _ in rows} == KEYS.keys()
    for name, example in rows:
        script = "" if name in ("script", "module") else "script: train.py\n"
        Path("job.yaml").write_text(script if "." in name else f"{script}{example}\n")
        overrides = dict(word.split("=", 1) for word in shlex.split(example)[1:] if "." in name)
        needed = {"resume.checkpoint": "a.pt"} if name.startswith("resume.") else {}
        needed |= {"gpus_per_node": "8"} if name == "gpus_per_rank" else {}
        load("job.yaml", {**needed, **overrides})


def test_the_page_of_the_run_directory_names_every_file_outside_private() -> None:
    run = RunDirectory("/run")
    names = [name for name, value in vars(RunDirectory).items() if type(value).__name__ == "_Below"]
    paths = {str(getattr(run, name).relative_to("/run")) for name in names}
    listed = set(re.findall(r"^\| \[?`([^`]+)`", page("run-directory.md"), re.MULTILINE))
    assert listed == {path for path in paths if not path.startswith("private/")} | TRACKERS.keys()


def test_every_argument_of_a_command_has_a_help_text() -> None:
    missing = [
        f"{name} {action.dest}"
        for name, command in reference.commands().items()
        for action in command._actions
        if not action.help or action.help == argparse.SUPPRESS
    ]
    assert not missing, f"no help for {', '.join(missing)}"


def test_every_command_answers_a_question_of_the_page() -> None:
    shown = [name for names in reference.COMMANDS.values() for name in names]
    assert sorted(shown) == sorted(reference.commands())


def test_the_examples_of_the_commands_are_accepted() -> None:
    for command in reference.commands():
        for line in EXAMPLES[command].splitlines():
            program, *words = shlex.split(line)
            assert [program, *words[: len(command.split())]] == ["clusterddp", *command.split()]
            parser().parse_args(split_at_dashes(words)[0])
