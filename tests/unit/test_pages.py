"""The README's and the guide's job definitions, commands and fragments of Python are accepted by the code.

Whole scripts are run by tests/ranks/test_converting.py and test_scripts_on_pages.py.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import inspect
import json
import re
import shlex
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

import clusterddp
from clusterddp.checkpoint.restore import CheckpointFolder
from clusterddp.cli.command_line import parser, split_at_dashes
from clusterddp.cli.config import validate
from clusterddp.data.loader import Loader
from clusterddp.training.context import Context
from clusterddp.training.loop import Run

REPOSITORY = Path(__file__).resolve().parents[2]
PAGES = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs" / "guide").glob("*.md"))]
#: What a fragment calls by these names.
KNOWN = {
    "clusterddp": clusterddp,
    "ctx": Context,
    "run": Run,
    "loader": Loader,
    "folder": CheckpointFolder,
    "orders": clusterddp.orders,
    "handle": clusterddp.Handle,
}


def blocks(*languages: str) -> Sequence[object]:
    """The pages' fenced blocks of a language."""
    found = [
        pytest.param(text, id=f"{page.stem}-{number}")
        for page in PAGES
        for number, (language, text) in enumerate(re.findall(r"```(\w+)\n(.*?)```", page.read_text(), re.DOTALL))
        if language in languages
    ]
    assert found, f"no page has a block of {languages}"
    return found


@pytest.mark.parametrize("text", blocks("yaml"))
def test_a_job_definition_sweep_or_configuration_file_is_valid(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A job definition need not name its script, and what a file names exists."""
    monkeypatch.chdir(tmp_path)
    whole = re.search("^(script|module|job|defaults|clusters):", text, re.MULTILINE)
    Path("page.yaml").write_text(text if whole else f"script: train.py\n{text}")
    for name in ["train.py", *re.findall(r"^(?:script|job): *([\w/.]+)(?: *#.*)?$", text, re.MULTILINE)]:
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text("script: train.py\n" if name.endswith(".yaml") else "")
    assert validate(["page.yaml"]) == 0, capsys.readouterr().out


@pytest.mark.parametrize("text", blocks("console", "bash"))
def test_the_commands_of_a_block_are_accepted(text: str) -> None:
    for line in commands(text):
        program, *words = shlex.split(line, comments=True)
        if program == "make":
            rules = re.findall(r"^([\w. -]+):", (REPOSITORY / "Makefile").read_text(), re.MULTILINE)
            assert words[0] in {name for rule in rules for name in rule.split()}, line
        elif [program, *words[:2]] == ["python", "-m", "clusterddp.submit"]:
            parser().parse_args(["submit", *split_at_dashes(words[2:])[0]])
        elif program == "clusterddp":
            parser().parse_args(split_at_dashes(words)[0])


def commands(text: str) -> Iterator[str]:
    """The simple commands of a block; in one with prompts, what follows them."""
    lines = text.replace("\\\n", " ").splitlines()
    prompted = [line[2:] for line in lines if line.startswith("$ ")]
    for line in prompted or lines:
        for part in re.split(r" (?:&&|\||>) ", line):
            if shlex.split(part, comments=True):
                yield part


def inline() -> Sequence[object]:
    """The commands in the pages' text, each once."""
    found: dict[str, object] = {}
    for page in PAGES:
        text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
        for command in re.findall(r"`(clusterddp [a-z][^`]*)`", text):
            found.setdefault(" ".join(command.split()), page.stem)
    return [pytest.param(command, id=f"{page}-{command}") for command, page in found.items()]


@pytest.mark.parametrize("command", inline())
def test_a_command_in_a_sentence_exists_with_its_options(command: str) -> None:
    """It may lack arguments."""
    found: argparse.ArgumentParser = parser()
    words = split_at_dashes(command.split()[1:])[0]
    while words and (actions := [a for a in found._actions if isinstance(a, argparse._SubParsersAction)]):
        assert words[0] in actions[0].choices, f"no command {words[0]}"
        found = actions[0].choices[words.pop(0)]
    for word in words:
        name = word.partition("=")[0]
        assert not re.match("--?[a-z]", name) or name in found._option_string_actions, f"no option {name}"


@pytest.mark.parametrize("text", blocks("python"))
def test_a_fragment_uses_names_and_arguments_that_exist(text: str) -> None:
    check_fragment(textwrap.dedent(text))


def test_the_readmes_diff_has_a_script_before_and_after() -> None:
    (diff,) = re.findall(r"```diff\n(.*?)```", PAGES[0].read_text(), re.DOTALL)
    lines = diff.splitlines()
    before, after = ("".join(f"{line[1:]}\n" for line in lines if line[0] != other) for other in "+-")
    ast.parse(before)
    check_fragment(after)


def test_the_readmes_costs_are_what_was_measured() -> None:
    (sentence,) = re.findall(r"Nodes were free .*? saving", PAGES[0].read_text(), re.DOTALL)
    found = json.loads((REPOSITORY / "benchmarks" / "results" / "handover.json").read_text())["rows"]
    (row,) = [row for row in found if row["row"] == "hand-over: TERM to free nodes"]
    assert re.findall(r"[\d.]+ s\b", sentence) == [f"{row[side]:.2f} s" for side in ("ours", "limit")]


def test_the_readme_is_short_and_installs_the_present_version() -> None:
    text = PAGES[0].read_text()
    assert text.count("\n") <= 110
    wheels = re.findall(r"clusterddp-([\d.]+)-py3", text)
    assert wheels and {*wheels} == {clusterddp.__version__}


def test_citation_and_changelog_have_the_version() -> None:
    assert f"\nversion: {clusterddp.__version__}\n" in (REPOSITORY / "CITATION.cff").read_text()
    newest = re.search(r"^## (?!Unreleased)(\S+)", (REPOSITORY / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest is not None and newest[1] == clusterddp.__version__


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_comments_stand_above_their_command(page: Path) -> None:
    """At the end of a long line, a reader would have to scroll for them."""
    shown = re.findall(r"```(?:console|bash)\n(.*?)```", page.read_text(), re.DOTALL)
    assert [line for text in shown for line in commands(text) if re.search(r"\S\s+# ", line)] == []


def check_fragment(text: str) -> None:
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("clusterddp"):
            check_import(node)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in KNOWN:
            assert exists(KNOWN[node.value.id], node.attr), f"{node.value.id} has no {node.attr}"
    for call in [node for node in ast.walk(tree) if isinstance(node, ast.Call)]:
        if isinstance(call.func, ast.Attribute) and isinstance(call.func.value, ast.Name):
            check_call(call, call.func.value.id, call.func.attr)


def exists(owner: object, name: str) -> bool:
    """Whether it has the attribute, or its class sets it in its methods."""
    own = inspect.getsource(owner) if inspect.isclass(owner) else ""
    return hasattr(owner, name) or re.search(rf"\bself\.{name}\b[^()]*=", own) is not None


def check_import(node: ast.ImportFrom) -> None:
    file = REPOSITORY / f"{str(node.module).replace('.', '/')}.py"
    for alias in node.names:
        if "integrations" in str(node.module):  # its framework may not be installed
            assert re.search(rf"^(?:def|class) {alias.name}\b", file.read_text(), re.MULTILINE), alias.name
        else:
            assert hasattr(importlib.import_module(str(node.module)), alias.name), alias.name


def check_call(call: ast.Call, owner: str, name: str) -> None:
    """The signature takes the arguments; ``self`` is none of them."""
    if owner not in KNOWN or any(isinstance(argument, ast.Starred) for argument in call.args):
        return
    method = getattr(KNOWN[owner], name)
    keywords = {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg}
    bound = inspect.isclass(KNOWN[owner]) and not isinstance(inspect.getattr_static(KNOWN[owner], name), staticmethod)
    inspect.signature(method).bind(*[None] * bound, *call.args, **keywords)
