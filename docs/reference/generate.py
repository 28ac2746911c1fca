"""Writes the pages of this folder from the signatures, docstrings and options in the code: ``make reference``.

The Python sources are parsed, not imported, so neither torch nor the libraries of the integrations are needed.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import json
import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path

import clusterddp
from clusterddp import errors, events, protocol
from clusterddp.cli.command_line import parser
from clusterddp.jobdef.json_schema import job_schema
from docs.reference.examples import EXAMPLES

FOLDER = Path(__file__).resolve().parent
REPOSITORY = FOLDER.parents[1]

#: A section of api.md: title, introduction, module, its names (None: all public ones).
SECTIONS: list[tuple[str, str, str, list[str] | None]] = [
    ("Training", "", "clusterddp.training.context", ["init", "Context"]),
    ("", "", "clusterddp.errors", ["Stopped"]),
    ("The run", "`ctx.run()` returns it.", "clusterddp.training.loop", ["Run"]),
    (
        "Loaders",
        "`ctx.loader()` and `ctx.eval_loader()` return them.",
        "clusterddp.data.loader",
        ["Loader"],
    ),
    ("", "", "clusterddp.data.loader", ["EvalLoader"]),
    ("", "", "clusterddp.data.external_loader", ["StatefulLoader"]),
    ("Orders of samples", "`from clusterddp import orders`: for `ctx.loader(order=...)`.", "clusterddp.orders", None),
    (
        "Datasets over large files",
        "`from clusterddp import streams`: for `ctx.loader()`.",
        "clusterddp.streams",
        ["TarShards", "JsonLines", "Tokens"],
    ),
    ("Checkpoints", "", "clusterddp.checkpoint.checkpoint_folder", ["CheckpointFolder"]),
    ("", "", "clusterddp.jobdef.job", ["Checkpointing", "Keep"]),
    (
        "Loops without a context",
        "For scripts that save by themselves and do not call `clusterddp.init()`.",
        "clusterddp.training.script_loop",
        ["stop_requested", "requeue", "continue_epoch"],
    ),
    ("Launching", "", "clusterddp.api", ["launch", "sweep", "Handle", "Status"]),
    ("Ranks of any launcher", "", "clusterddp.environment", ["read", "RankEnvironment"]),
    ("Hugging Face Trainer", "", "clusterddp.integrations.transformers", None),
    ("Lightning", "", "clusterddp.integrations.lightning", None),
    ("accelerate", "", "clusterddp.integrations.accelerate", None),
]

#: Whose public methods a class has, too: its base classes, in other modules.
BASES = {
    "Context": [("clusterddp.data.loaders", "Loaders")],
}

#: What another class returns: nobody calls the constructor.
CONSTRUCTED = {
    "Context",
    "Sharded",
    "Run",
    "Loader",
    "EvalLoader",
    "StatefulLoader",
    "Status",
    "RankEnvironment",
    "Stopped",
}

#: Public by name, but called by clusterddp or by another library: patterns of MODULE.CLASS.MEMBER.
INTERNAL = (
    *("loop.Run.stop_point", "loader.Loader.inexact", "loader.Loader.gather", "loader.Loader.progress"),
    *(
        "loader.Loader.restore",
        "loader.Loader.start",
        "loader.Loader.batches",
        "external_loader.StatefulLoader.*",
        "job.Keep.order",
    ),
    "job.Keep.best_rule",
    *("errors.Stopped.latest", "errors.Stopped.on_raised"),
    *("lightning.RankEnvironment.*", "*.SaveAndRequeue.on_*"),
)

SECTIONS_OF_DOCSTRINGS = {
    "Args": "Arguments",
    "Attributes": "Attributes",
    "Returns": "Returns",
    "Raises": "Raises",
}


@dataclass
class Name:
    """One public name: a function, a class, or a member of a class."""

    title: str
    """As the user writes it: ``clusterddp.launch``, ``ctx.wrap``."""
    key: str
    """In EXAMPLES: ``launch``, ``training.loop.Run``, ``Context.wrap``."""
    signature: str
    """Empty for a property and for a class that is not constructed by users."""
    parameters: list[str]
    doc: str
    declaration: str = ""
    """Of a property: its name and type."""
    attributes: list[str] = field(default_factory=list)
    """That ``__init__`` sets."""
    fields: list[tuple[str, str]] = field(default_factory=list)
    """Of a dataclass: name with type, and text."""
    members: list[Name] = field(default_factory=list)


# --- reading the sources


def names() -> Iterator[tuple[str, str, list[Name]]]:
    """Title, introduction and names of every section."""
    for title, introduction, module, wanted in SECTIONS:
        tree = ast.parse((REPOSITORY / f"{module.replace('.', '/')}.py").read_text())
        found = {node.name: node for node in tree.body if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
        public = [name for name in found if not name.startswith("_")] if wanted is None else wanted
        yield title, introduction, [_name(found[name], module) for name in public]


def _name(node: ast.FunctionDef | ast.ClassDef, module: str) -> Name:
    title = f"clusterddp.{node.name}" if node.name in clusterddp.__all__ else f"{module}.{node.name}"
    key = title.removeprefix("clusterddp.")
    if isinstance(node, ast.FunctionDef):
        return Name(title, key, _signature(node, node.name), _parameters(node), _doc(node))
    constructor = next((item for item in _functions(node) if item.name == "__init__"), None)
    fields = list(_fields(node, module))
    signature, parameters = "", []
    if node.name not in CONSTRUCTED:
        signature = _signature(constructor, node.name) if constructor else _fields_signature(node, module)
        parameters = _parameters(constructor) if constructor else []
    members = [
        Name(
            f"{_variable(node.name)}.{item.name}",
            f"{node.name}.{item.name}",
            "" if _is_property(item) else _signature(item, item.name),
            _parameters(item),
            _doc(item),
            declaration=f"{item.name}: {_type(item.returns)}" if _is_property(item) else "",
        )
        for item in _functions(node)
        if not item.name.startswith("_") and not _internal(module, node.name, item.name)
    ]
    attributes = [name for name in _attributes(constructor) if not _internal(module, node.name, name)]
    return Name(title, key, signature, parameters, _doc(node), "", attributes, fields, members)


def _functions(node: ast.ClassDef) -> Iterator[ast.FunctionDef]:
    """Its methods, then those of its base classes in ``BASES``."""
    yield from (item for item in node.body if isinstance(item, ast.FunctionDef))
    for module, name in BASES.get(node.name, ()):
        yield from _functions(_classes(module)[name])


def _classes(module: str) -> dict[str, ast.ClassDef]:
    tree = ast.parse((REPOSITORY / f"{module.replace('.', '/')}.py").read_text())
    return {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}


def _internal(module: str, name: str, member: str) -> bool:
    key = f"{module.rpartition('.')[2]}.{name}.{member}"
    return any(fnmatch(key, pattern) for pattern in INTERNAL)


def _fields(node: ast.ClassDef, module: str) -> Iterator[tuple[str, str]]:
    """The fields of a dataclass, each with the string below it."""
    for item, after in zip(node.body, [*node.body[1:], None], strict=True):
        if isinstance(item, ast.AnnAssign) and not _internal(module, node.name, ast.unparse(item.target)):
            value = ast.unparse(item.value) if item.value else ""
            default = re.sub("field.default_factory=(.*).$", "\\1()", value and f" = {value}")
            text = after.value.value if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) else ""
            yield f"{ast.unparse(item.target)}: {_type(item.annotation)}{default}", " ".join(str(text).split())


def _attributes(constructor: ast.FunctionDef | None) -> list[str]:
    """The public ones that it sets."""
    if constructor is None:
        return []
    stored = (
        node for node in ast.walk(constructor) if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
    )
    return [node.attr for node in stored if ast.unparse(node.value) == "self" and not node.attr.startswith("_")]


def _fields_signature(node: ast.ClassDef, module: str) -> str:
    fields = [name for name, _ in _fields(node, module)]
    return _wrapped(node.name, fields, "") if fields else ""


def _doc(node: ast.FunctionDef | ast.ClassDef) -> str:
    return inspect.cleandoc(ast.get_docstring(node) or "")


def _is_property(node: ast.FunctionDef) -> bool:
    return any(isinstance(item, ast.Name) and item.id == "property" for item in node.decorator_list)


def _parameters(node: ast.FunctionDef) -> list[str]:
    of = node.args
    every = [
        *of.posonlyargs,
        *of.args,
        *([of.vararg] if of.vararg else []),
        *of.kwonlyargs,
        *([of.kwarg] if of.kwarg else []),
    ]
    return [argument.arg for argument in every if argument.arg not in ("self", "cls")]


def _signature(node: ast.FunctionDef, name: str) -> str:
    """``name(a: int, *, b: str = 'x') -> T``, over several lines if it is long."""
    of = node.args
    positional = [*of.posonlyargs, *of.args]
    defaults = [None] * (len(positional) - len(of.defaults)) + list(of.defaults)
    parts = [_parameter(argument, default) for argument, default in zip(positional, defaults, strict=True)]
    parts = parts[1:] if positional and positional[0].arg in ("self", "cls") else parts
    if of.vararg:
        parts.append(f"*{_parameter(of.vararg, None)}")
    elif of.kwonlyargs:
        parts.append("*")
    parts += [_parameter(*pair) for pair in zip(of.kwonlyargs, of.kw_defaults, strict=True)]
    parts += [f"**{_parameter(of.kwarg, None)}"] if of.kwarg else []
    returns = f" -> {_type(node.returns)}" if node.returns is not None and node.name != "__init__" else ""
    if any(ast.unparse(decorator) == "contextmanager" for decorator in node.decorator_list):
        returns = " -> AbstractContextManager[None]"
    return _wrapped(name, parts, returns)


def _wrapped(name: str, parts: list[str], returns: str) -> str:
    line = f"{name}({', '.join(parts)}){returns}"
    if len(line) <= 100:
        return line
    return f"{name}(\n" + "".join(f"    {part},\n" for part in parts) + f"){returns}"


def _parameter(argument: ast.arg, default: ast.expr | None) -> str:
    text = f"{argument.arg}: {_type(argument.annotation)}" if argument.annotation else argument.arg
    if default is None:
        return text
    return f"{text} = {ast.unparse(default)}" if argument.annotation else f"{text}={ast.unparse(default)}"


def _type(annotation: ast.expr | None) -> str:
    return re.sub(r"\b(status)\.(?=[A-Z])", "", ast.unparse(annotation)) if annotation else ""


def _variable(name: str) -> str:
    """What the examples call an instance."""
    return {"Context": "ctx", "CheckpointFolder": "folder"}.get(name, re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower())


# --- docstrings


@dataclass
class Block:
    """A part of a docstring."""

    kind: str
    """prose; a key of SECTIONS_OF_DOCSTRINGS; code (an example of several lines); or inline (one line of example)."""
    lines: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        return textwrap.dedent("\n".join(self.lines)).strip()


def blocks(doc: str) -> list[Block]:
    """A docstring's prose, sections (Args, Raises, ...) and examples, in its order."""
    found = [Block("prose")]
    for line in doc.splitlines():
        heading = re.fullmatch(r"(\w+)::?", line)
        if heading and heading[1] in SECTIONS_OF_DOCSTRINGS:
            found.append(Block(heading[1]))
        elif heading and heading[1] == "Example":
            found.append(Block("code"))
        elif line and not line.startswith(" ") and found[-1].kind != "prose":
            found.append(Block("prose", [line]))
        else:
            found[-1].lines.append(line)
    return [part for block in found for part in _without_inline_example(block) if part.text]


def _without_inline_example(block: Block) -> Iterator[Block]:
    """The block, and the example that its prose ends with, if there is one."""
    example = re.search(r"\s*\bExample: ``([^`]+)``\.?\s*$", block.text) if block.kind == "prose" else None
    if example is None:
        yield block
    else:
        yield Block("prose", block.text[: example.start()].splitlines())
        yield Block("inline", [" ".join(example[1].split())])


def examples(doc: str) -> list[str]:
    """The code of the examples, without what a prompt's line prints."""
    found = []
    for block in blocks(doc):
        if block.kind in ("code", "inline"):
            prompts = [line[4:] for line in block.text.splitlines() if re.match(r">>> |\.\.\. ", line)]
            found.append("\n".join(prompts) or block.text)
    return found


def entries(block: Block) -> list[tuple[str, str]]:
    """The entries of a section: names, and text. Lines without a name continue the entry above."""
    found: list[tuple[str, str]] = []
    for line in block.text.splitlines():
        entry = re.fullmatch(r"([*\w]+(?:, [*\w]+)*): (.*)", line)
        if entry and block.kind != "Returns":
            found.append((entry[1], entry[2]))
        elif line.strip():
            names, text = found.pop() if found else ("", "")
            found.append((names, f"{text} {line.strip()}".strip()))
    return found


def _doc_lines(doc: str) -> Iterator[str]:
    for block in blocks(doc):
        if block.kind == "prose":
            yield from (_markdown(block.text), "")
        elif block.kind == "inline":
            yield from (f"Example: `{block.text}`", "")
        elif block.kind == "code":
            yield from ("```pycon" if block.text.startswith(">>>") else "```python", block.text, "```", "")
        else:
            yield from (f"{SECTIONS_OF_DOCSTRINGS[block.kind]}:", "")
            for names, text in entries(block):
                label = ", ".join(f"`{name}`" for name in names.split(", ") if name)
                yield f"- {label}: {_markdown(text)}" if label else f"- {_markdown(text)}"
            yield ""


def _markdown(text: str) -> str:
    return text.replace("``", "`")


# --- the pages


def api() -> str:
    """api.md."""
    lines = [
        "# Python API",
        "",
        "Written by `make reference` from the docstrings. [errors.md](errors.md) lists the exceptions and exit codes,",
        "[command-line.md](command-line.md) the commands.",
        "",
    ]
    sections = list(names())
    for title, _, found in sections:
        listed = ", ".join(f"[{name.key.rpartition('.')[2]}](#{_anchor(name.title)})" for name in found)
        lines += [f"- {title}: {listed}"] if title else [f"{lines.pop()}, {listed}"]
    for title, introduction, found in sections:
        lines += ["", f"## {title}", ""] if title else [""]
        lines += [introduction, ""] if introduction else []
        for name in found:
            lines += _entry(name, "###")
            for member in name.members:
                lines += _entry(member, "####")
    return _page(lines)


def _entry(name: Name, heading: str) -> Iterator[str]:
    yield from (f"{heading} {name.title}", "")
    if name.signature or name.declaration:
        yield from ("```python", name.signature or name.declaration, "```", "")
    yield from _doc_lines(name.doc)
    for item, text in name.fields:
        yield f"- `{item}`" + (f": {_markdown(text)}" if text else "")
    if name.fields:
        yield ""
    if name.key in EXAMPLES and not examples(name.doc):
        yield from ("Example:", "", "```python", EXAMPLES[name.key], "```", "")


def _anchor(title: str) -> str:
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


def error_classes() -> list[type[BaseException]]:
    """Every exception that clusterddp raises, in the order of the source."""
    return [
        item for name, item in vars(errors).items()
        if isinstance(item, type) and issubclass(item, BaseException) and not name.startswith("_")
    ]  # fmt: skip


def exit_code(error: type[BaseException]) -> int:
    """Of a process that the error ends."""
    return int(getattr(error, "exit_code", errors.STOPPED if issubclass(error, errors.Stopped) else 1))


def error_page() -> str:
    """errors.md."""
    lines = [
        "# Errors and exit codes",
        "",
        "The exceptions of `clusterddp.errors`. A command prints the message alone and exits with the code; with",
        f"`{protocol.DEBUG}=1` it also prints the traceback.",
        "",
        "| exception | is a | exit code | meaning |",
        "|---|---|---|---|",
    ]
    for error in error_classes():
        meaning = " ".join(inspect.getdoc(error).split("\n\n")[0].split())  # type: ignore[union-attr]
        lines.append(
            f"| `{error.__name__}` | `{error.__bases__[0].__name__}` | {exit_code(error)} | {_markdown(meaning)} |"
        )
    codes: dict[object, str] = {
        0: "the command did what was asked; with `--wait`, `-f` and `--local`: the run is completed",
        1: "an error that the message explains, or a run that ended without being completed",
        2: "the command line or the job definition is wrong; nothing was submitted or written",
        errors.RESUME_DIFFERS: "of `submit --check-resume`: a resume makes a difference",
        errors.NOT_REPEATABLE: "of `submit --check-resume`: the run differs even without a resume",
        errors.INTERNAL_ERROR: "an internal error; the message names the file with the traceback",
        errors.STOPPED: "of a script without a supervisor, and of `submit --check-resume`: stopped before its end; "
        "start it again (EX_TEMPFAIL)",
        errors.INTERRUPTED: "interrupted by Ctrl-C; a local run has been saved and can be continued",
        errors.BROKEN_PIPE: "the reader of the output closed it, such as `head`",
        "128 + N": "with `--local` and `--here`: signal N killed the supervisor, and the ranks ended with it",
    }
    lines += ["", "## Exit codes", "", "| code | meaning |", "|---|---|"]
    lines += [f"| {code} | {meaning} |" for code, meaning in codes.items()]
    lines += ["", "Some commands answer with their exit code:", "", "| command | exit codes |", "|---|---|"]
    lines += [f"| [`{name}`](command-line.md#clusterddp-{name}) | {text} |" for name, text in ANSWERS.items()]
    return _page(lines)


#: What the exit codes of single commands mean, besides errors.
ANSWERS: dict[str, str] = {
    "submit": (
        "0 submitted; with `--wait`, `-f`, `--local`, `--here`: 0 completed, "
        f"{errors.UNCONFIRMED} completed but not confirmed, else the training's exit code or 1"
    ),
    "resubmit": f"0 all runs completed, 1 another end, {errors.UNCONFIRMED} all completed, one of them not confirmed",
    "wait": (
        "0 all runs completed; else that of the worst end: "
        + ", ".join(f"{code} {word}" for word, code in errors.WAITED.items())
        + f", in this order; {errors.TIMED_OUT} the time is up before all of them, with `--any` one, have ended"
    ),
    "cancel": "0 all runs are over, also if they were before; 1 one is not, or the answer was no",
    "logs": "0 printed; 1 nothing matches `--grep`",
    "prune": "0 also if nothing was to be deleted, or the answer was no; 1 a run was refused, or a file stayed",
}


def protocol_page() -> str:
    """protocol.md."""
    variables = [value for value in vars(protocol).values() if isinstance(value, protocol.Variable)]
    listed = [(name, event.fields, " ".join((event.__doc__ or "").split())) for name, event in events.EVENTS.items()]
    return _page(
        [
            "# Events and environment variables",
            "",
            "Written by `make reference` from `clusterddp/events.py` and `clusterddp/protocol.py`.",
            "",
            "## events.jsonl",
            "",
            "Every line has `time` (unix seconds), `attempt` and `event`, and what a rank has reported has `rank`.",
            "A field with `?` may be missing. Ignore events and fields that you do not know: versions may add some.",
            "",
            "| event | fields | meaning |",
            "|---|---|---|",
            *(f"| `{name}` | {', '.join(fields.split())} | {meaning} |" for name, fields, meaning in listed),
            "",
            "## The hook",
            "",
            "The command of the key `hook` gets an object with one of these as `event`, with `time`, `attempt`, `run`",
            "and `job_name`, and with the fields of the line of the history that says it.",
            "",
            "| event | meaning |",
            "|---|---|",
            *(f"| `{name}` | {meaning} |" for name, meaning in events.HOOK_EVENTS.items()),
            "",
            "## Environment variables",
            "",
            "| variable | |",
            "|---|---|",
            *(f"| `{variable}` | {variable.meaning} |" for variable in variables),
        ]
    )


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


def command_page() -> str:
    """command-line.md."""
    found = _commands(parser())
    lines = [
        "# Command line",
        "",
        "Written by `make reference` from the options in the code. `clusterddp` and `python -m clusterddp` are the",
        "same program. [errors.md](errors.md) lists the exit codes.",
        "",
        "| command | |",
        "|---|---|",
        *(f"| [`{name}`](#{_anchor(f'clusterddp {name}')}) | {summary} |" for name, (summary, _) in found.items()),
    ]
    for name, (summary, command) in found.items():
        usage = " ".join(command.format_usage().removeprefix("usage: ").split())
        lines += [
            "",
            f"## clusterddp {name}",
            "",
            f"{_sentence(summary)}",
            "",
            "```console",
            usage,
            "```",
            "",
        ]
        if name == "bench":
            lines += ["The options are those of [`submit`](#clusterddp-submit).", ""]
        else:
            lines += _options(command)
        lines += ["Example:", "", "```console", *(f"$ {line}" for line in EXAMPLES[name].splitlines()), "```", ""]
    return _page(lines)


def _options(command: argparse.ArgumentParser) -> Iterator[str]:
    actions = [action for action in command._actions if not isinstance(action, argparse._HelpAction)]
    if actions:
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


def modules_page() -> str:
    """modules.md."""
    root = FOLDER.parents[1] / "clusterddp"
    lines = [
        "# Modules",
        "",
        "Written by `make reference` from the modules' docstrings. Paths are below `clusterddp/`.",
    ]
    folders = sorted(path.parent for path in root.glob("*/**/__init__.py"))
    for folder in [root, *folders]:
        said = _first_sentence(folder / "__init__.py")
        lines += ["", "## The package", ""] if folder == root else ["", f"## {folder.relative_to(root)}/", "", said, ""]
        for path in sorted(folder.glob("*.py")):
            if path.name != "__init__.py" or folder == root:
                lines.append(f"- `{path.name}`: {_first_sentence(path)}")
    return _page(lines)


def _first_sentence(path: Path) -> str:
    """Of a module's docstring; its first paragraph may have several."""
    text = ast.get_docstring(ast.parse(path.read_text())) or ""
    return _sentence(re.split(r"(?<=\.)\s", " ".join(text.partition("\n\n")[0].split()))[0])


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:].rstrip(".") + "."


def _page(lines: list[str]) -> str:
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip() + "\n"


def pages() -> dict[str, str]:
    """Every page by its file name."""
    return {
        "api.md": api(),
        "command-line.md": command_page(),
        "errors.md": error_page(),
        "protocol.md": protocol_page(),
        "modules.md": modules_page(),
        "job.schema.json": json.dumps(job_schema(), indent=2) + "\n",
    }


if __name__ == "__main__":
    for name, text in pages().items():
        (FOLDER / name).write_text(text)
