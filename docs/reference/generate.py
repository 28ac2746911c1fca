"""Writes the pages of this folder from the code (signatures, docstrings, options): ``make reference``.

The Python sources are parsed, not imported, so neither torch nor the libraries of the integrations are needed.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import json
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from clusterddp import errors, protocol
from clusterddp.cli.command_line import parser
from clusterddp.history.codec import MODULES, listed
from clusterddp.history.event import EVENTS
from clusterddp.history.words import HOOK_EVENTS
from clusterddp.jobdef.json_schema import job_schema
from clusterddp.rundir import run_directory
from clusterddp.trackers.registry import TRACKERS
from docs.reference import python_api
from docs.reference.examples import EXAMPLES, KEYS
from docs.reference.python_api import anchor, markdown

FOLDER = Path(__file__).resolve().parent


# --- exit codes


def error_classes() -> list[type[BaseException]]:
    """Every exception that clusterddp raises, in the order of the source."""
    return [
        item for name, item in vars(errors).items()
        if isinstance(item, type) and issubclass(item, BaseException) and not name.startswith("_")
    ]  # fmt: skip


def exit_code_page() -> list[str]:
    """exit-codes.md."""
    lines = ["# Exit codes", "", "| code | meaning |", "|---|---|"]
    lines += [f"| {code} | {meaning} |" for code, meaning in errors.MEANINGS.items()]
    lines += ["", "## Commands that answer with their exit code", "", "| command | exit codes |", "|---|---|"]
    lines += [f"| [`{name}`](command-line.md#clusterddp-{name}) | {text} |" for name, text in errors.ANSWERS.items()]
    lines += [
        *("", "## Exceptions", ""),
        "They are in `clusterddp.errors`. A command prints the message alone and exits with the code. With",
        f"`{protocol.DEBUG}=1` it also prints the traceback.",
        *("", "| exception | is a | exit code | meaning |", "|---|---|---|---|"),
    ]
    for error in error_classes():
        meaning = " ".join(str(inspect.getdoc(error)).split("\n\n")[0].split())
        code = errors.exit_code(error)
        lines.append(f"| `{error.__name__}` | `{error.__bases__[0].__name__}` | {code} | {markdown(meaning)} |")
    return lines


# --- events, variables, files of a run


def event_page() -> list[str]:
    """events.md."""
    variables = [value for value in vars(protocol).values() if isinstance(value, protocol.Variable)]
    lines = [
        "# Events and environment variables",
        "",
        "## events.jsonl",
        "",
        "Each line of `events.jsonl` is an object with `time` (unix seconds), `attempt`, `event`, and the fields of",
        "the event. An event that a rank reported also has `rank`. A field with `?` may be missing. Ignore events and",
        "fields that you do not know, because later versions may add some. `clusterddp status` prints most events as",
        "sentences.",
        "",
        "| event | fields | meaning |",
        "|---|---|---|",
    ]
    modules = [module.__name__ for module in MODULES]
    for name, event in sorted(EVENTS.items(), key=lambda item: modules.index(item[1].__module__)):
        meaning = _capital(" ".join((event.__doc__ or "").split()))
        lines.append(f"| `{name}` | {', '.join(listed(event).split())} | {meaning} |")
    return [
        *lines,
        *("", "## The hook", ""),
        "The command of the key `hook` gets an object with one of these as `event`, with `time`, `attempt`, `run` and",
        "`job_name`, and with the fields of the corresponding line of the history.",
        *("", "| event | meaning |", "|---|---|"),
        *(f"| `{name}` | {_capital(meaning)} |" for name, meaning in HOOK_EVENTS.items()),
        *("", "## Environment variables", "", "| variable | who sets it for whom, and what it holds |", "|---|---|"),
        *(f"| `{variable}` | {_capital(variable.meaning)} |" for variable in variables),
    ]


def run_directory_page() -> list[str]:
    """run-directory.md."""
    cls = python_api.defined(run_directory.__name__)["RunDirectory"]
    files: dict[str, str] = {}
    for item, after in zip(cls.body, [*cls.body[1:], cls.body[0]], strict=True):
        if isinstance(item, ast.Assign) and isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
            assert isinstance(item.value, ast.Call)
            files[ast.literal_eval(item.value.args[0])] = inspect.cleandoc(str(after.value.value))
    files |= {tracker.key: tracker.files for tracker in TRACKERS.values()}
    _, _, introduction = inspect.cleandoc(ast.get_docstring(cls) or "").partition("\n\n")
    lines = ["# The run directory", "", markdown(introduction), "", "| file or folder | |", "|---|---|"]
    for name, text in files.items():
        first, _, more = text.partition("\n\n")
        shown = f"[`{name}`](#{anchor(name)})" if more else f"`{name}`"
        lines.append(f"| {shown} | {markdown(' '.join(first.split()))} |")
    for name, text in files.items():
        _, _, more = text.partition("\n\n")
        if more:
            lines += ["", f"## {name}", "", *_with_examples(more)]
    return lines


def _with_examples(text: str) -> Iterator[str]:
    """Paragraphs; one that is indented and follows ``::`` is an example."""
    for paragraph in text.split("\n\n"):
        if paragraph.startswith("    "):
            code = inspect.cleandoc(paragraph)
            yield from ("```json" if code.startswith("{") else "```python", code, "```", "")
        else:
            yield from (re.sub("::$", ":", markdown(paragraph)), "")


# --- job definitions


def job_page() -> list[str]:
    """job-definition.md."""
    schema = job_schema()
    return [
        "# Job definition",
        "",
        "The keys of a job definition. The guide explains [how to write one](../guide/job-definition.md). `null`",
        "leaves the default. A key inside another is written with a dot here, as in `--set checkpoint.keep=5`.",
        "",
        "Editors check and complete the keys with the [JSON Schema](job.schema.json), which `clusterddp config schema`",
        "prints.",
        "",
        "| key | type | default | meaning |",
        "|---|---|---|---|",
        *_rows("", {key: value for key, value in schema["properties"].items() if key != "format"}, {}),
    ]


def _rows(prefix: str, properties: Mapping[str, Any], defaults: Any) -> Iterator[str]:
    for key, schema in properties.items():
        default = schema.get("default", defaults.get(key) if isinstance(defaults, dict) else None)
        inner = _properties(schema)
        shown = "" if default is None or (isinstance(default, dict) and inner) else f"`{_yaml(default)}`"
        meaning = re.sub(r"None, in YAML `off`:", "`off`:", schema.get("description", ""))
        meaning = re.sub(r"\bNone: ", "Default: ", meaning.replace("; None: ", "; default: "))
        types = " or ".join(dict.fromkeys(_types(schema)))
        example = f" Example: `{_example(prefix + key, schema, default)}`."
        yield f"| `{prefix}{key}` | {types} | {shown} | {_escaped(meaning + example)} |"
        yield from _rows(f"{prefix}{key}.", inner, default)


def _example(name: str, schema: Mapping[str, Any], default: object) -> str:
    """A value other than the default: in a file, or for a key inside another one, after --set."""
    if name in KEYS:
        value = KEYS[name]
    else:  # of a switch or a choice
        value = next(_yaml(value) for value in schema.get("enum", [True, False]) if value not in (default, None))
    return f"--set {shlex.quote(f'{name}={value}')}" if "." in name else f"{name}: {value}"


def _yaml(value: object) -> str:
    return json.dumps(value).replace('"', "") if isinstance(value, (bool, int, float)) else str(value)


def _properties(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """The keys inside a section."""
    parts = [schema, *schema.get("anyOf", [])]
    return next((part["properties"] for part in parts if "properties" in part), {})


def _types(schema: Mapping[str, Any]) -> Iterator[str]:
    """The kinds of values that a key takes, in words."""
    if "anyOf" in schema:
        for part in schema["anyOf"]:
            yield from _types(part)
    elif "enum" in schema:
        values = [value for value in schema["enum"] if value is not None]
        yield from (["name"] if len(values) > 6 else [f"`{_yaml(value)}`" for value in values])
    elif "const" in schema:
        yield f"`{schema['const']}`"
    elif isinstance(schema["type"], list) and "string" in schema["type"]:
        yield "text"
    else:
        words = {"integer": "whole number", "boolean": "true or false", "string": "text", "array": "list"}
        words |= {"object": "mapping", "number": "number"}
        kinds = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
        yield from (words[kind] for kind in kinds if kind != "null")


# --- commands and modules

#: The commands by what a user wants to know or do.
COMMANDS = {
    "Does my script survive, and what does this cluster do?": ["rehearse", "doctor"],
    "How do I start, continue or try a run?": ["submit"],
    "What do my runs do?": ["list", "status", "logs", "report", "wait"],
    "How do I stop, save or move a run?": ["stop", "save", "drain", "requeue", "cancel"],
    "Where does it hang?": ["stacks", "shell"],
    "What do I do with checkpoints?": ["export", "prune"],
    "Which settings apply?": ["config show", "config validate", "config presets", "config sites", "config schema"],
}


def commands() -> dict[str, argparse.ArgumentParser]:
    """The parser of every command; of one with actions, such as ``config show``, that of every action."""
    return {name: command for name, (_, command) in _commands(parser()).items()}


def _commands(of: argparse.ArgumentParser, prefix: str = "") -> dict[str, tuple[str, argparse.ArgumentParser]]:
    """What a parser's commands do, in a few words, and their parsers."""
    found: dict[str, tuple[str, argparse.ArgumentParser]] = {}
    for action in of._actions:
        if isinstance(action, argparse._SubParsersAction):
            summaries = {choice.dest: choice.help or "" for choice in action._choices_actions}
            for name, command in action.choices.items():
                actions = _commands(command, f"{prefix}{name} ")
                found |= actions or {f"{prefix}{name}": (summaries[name], command)}
    return found


def command_page() -> list[str]:
    """command-line.md."""
    found = _commands(parser())
    lines = [
        "# Command line",
        "",
        "`clusterddp` and `python -m clusterddp` are the same program. [Exit codes](exit-codes.md) lists what a",
        "command returns, and [Job definition](job-definition.md) the keys for `--set`.",
        "",
        *(line for question, names in COMMANDS.items() for line in _commands_table(question, names, found)),
    ]
    for name, (summary, command) in found.items():
        usage = " ".join(command.format_usage().removeprefix("usage: ").split())
        lines += [
            "",
            f"## clusterddp {name}",
            "",
            command.description or f"{_capital(summary)}.",
            "",
            "```console",
            usage,
            "```",
            "",
        ]
        lines += _options(command)
        lines += [command.epilog or "", ""]
        lines += ["Example:", "", "```console", *(f"$ {line}" for line in EXAMPLES[name].splitlines()), "```", ""]
    return lines


def _commands_table(question: str, names: Sequence[str], of: Mapping[str, tuple[str, Any]]) -> Iterator[str]:
    yield from (f"**{question}**", "", "| command | |", "|---|---|")
    yield from (f"| [`{name}`](#{anchor(f'clusterddp {name}')}) | {of[name][0]} |" for name in names)
    yield ""


def _options(command: argparse.ArgumentParser) -> Iterator[str]:
    """A table for each group of options, below the group's name if it has one of its own."""
    for group in command._action_groups:
        actions = [action for action in group._group_actions if not isinstance(action, argparse._HelpAction)]
        if actions:
            own = group.title not in ("positional arguments", "options", "optional arguments")
            yield from (f"**{_capital(str(group.title))}**", "") if own else ()
            yield from ("| argument | meaning |", "|---|---|")
            yield from (f"| {_flags(action)} | {_escaped(action.help or '')} |" for action in actions)
            yield ""


def _flags(action: argparse.Action) -> str:
    value = action.metavar or (action.dest.upper() if action.option_strings else action.dest)
    if not action.option_strings:
        return _escaped(f"`{value}`" + (" ..." if action.nargs == "+" else ""))
    texts: dict[int | str | None, str] = {None: f" {value}", 0: "", "?": f" [{value}]"}
    shown = texts[action.nargs]
    return _escaped(", ".join(f"`{flag}{shown}`" for flag in action.option_strings))


def _escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("%%", "%")


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _page(lines: list[str]) -> str:
    text = re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip() + "\n"
    return f"<!-- Written by `make reference` from the code. -->\n\n{text}"


@cache
def pages() -> dict[str, str]:
    """Every page by its file name."""
    return {
        "api.md": _page(python_api.page()),
        "command-line.md": _page(command_page()),
        "job-definition.md": _page(job_page()),
        "exit-codes.md": _page(exit_code_page()),
        "events.md": _page(event_page()),
        "run-directory.md": _page(run_directory_page()),
        "job.schema.json": json.dumps(job_schema(), indent=2) + "\n",
    }


if __name__ == "__main__":
    for name, text in pages().items():
        (FOLDER / name).write_text(text)
