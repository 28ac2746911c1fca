"""The public Python names with their signatures and docstrings, parsed from the sources, and the page about them.

griffe was tried: it would replace the reading of signatures (about 100 lines), but not that of our docstrings' examples
and grouped entries, takes several seconds for the package, and would be a dependency of the tests.
"""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatch
from functools import cache
from pathlib import Path

import clusterddp
from docs.reference.examples import EXAMPLES

REPOSITORY = Path(__file__).resolve().parents[2]

#: Title, introduction and public names, without ``clusterddp.``. ``*``: all public names of a module.
SECTIONS: list[tuple[str, str, list[str]]] = [
    ("Training", "", ["init", "Context", "Stopped"]),
    ("The run", "`ctx.run()` returns it.", ["Run"]),
    ("Loaders", "`ctx.loader()` and `ctx.eval_loader()` return them.", ["Loader", "EvalLoader"]),
    ("Orders of samples", "For `ctx.loader(order=...)`.", ["orders.*"]),
    ("Checkpoints", "", ["CheckpointFolder", "Checkpointing", "Keep"]),
    (
        "Other loops than run.steps()",
        "For scripts that save by themselves, with or without `clusterddp.init()`, and for an evaluation in a step.",
        ["stop_requested", "requeue", "continue_epoch"],
    ),
    ("Launching", "", ["launch", "sweep", "Handle", "Status"]),
    ("Ranks of any launcher", "", ["environment.read", "environment.RankEnvironment"]),
    ("Hugging Face Trainer", "", ["integrations.transformers.*"]),
    ("Lightning", "", ["integrations.lightning.*"]),
    ("accelerate", "", ["integrations.accelerate.*"]),
]

#: What most scripts use, in the order in which they use it.
FIRST = [
    *("init", "Context.wrap", "Context.loader", "Context.run", "Run.epochs", "Run.steps", "Run.every"),
    *("Context.eval_loader", "Run.log", "Run.end_of_epoch"),
]

#: Returned by another class or function: users do not call the constructor.
CONSTRUCTED = {"Context", "Sharded", "Run", "Loader", "EvalLoader", "Status", "RankEnvironment", "Stopped"}

#: Public by name, but called by clusterddp or by another library: patterns of MODULE.CLASS.MEMBER.
INTERNAL = (
    *("loop.Run.at_boundary", "loader.Loader.inexact", "loader.Loader.gather", "loader.Loader.progress"),
    *("loader.Loader.restore", "loader.Loader.start", "loader.Loader.batches", "job.Keep.order", "job.Keep.best_rule"),
    *("errors.Stopped.on_raised", "context.Context.in_forked_child"),
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
    """In EXAMPLES: ``launch``, ``Run``, ``Context.wrap``."""
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


@cache
def module(name: str) -> ast.Module:
    """The parsed module; a package is its ``__init__``."""
    path = REPOSITORY / name.replace(".", "/")
    return ast.parse((path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text())


def defined(name: str) -> dict[str, ast.FunctionDef | ast.ClassDef]:
    """The functions and classes of a module."""
    return {node.name: node for node in module(name).body if isinstance(node, (ast.FunctionDef, ast.ClassDef))}


def names() -> Iterator[tuple[str, str, list[Name]]]:
    """Title, introduction and names of every section."""
    for title, introduction, wanted in SECTIONS:
        found = []
        for public in wanted:
            place, _, last = f"clusterddp.{public}".rpartition(".")
            home = clusterddp._HOMES.get(public, place)
            every = [name for name in defined(home) if not name.startswith("_")] if last == "*" else [last]
            found += [_name(defined(home)[name], home, f"{place}.{name}") for name in every]
        yield title, introduction, found


def _name(node: ast.FunctionDef | ast.ClassDef, home: str, title: str) -> Name:
    key = title.removeprefix("clusterddp.")
    if isinstance(node, ast.FunctionDef):
        return Name(title, key, _signature(node, node.name), _parameters(node), _doc(node))
    constructor = next((item for item in _functions(node, home) if item.name == "__init__"), None)
    fields = list(_fields(node, home))
    signature, parameters = "", []
    if node.name not in CONSTRUCTED:
        names = [name for name, _ in fields]
        signature = _signature(constructor, node.name) if constructor else _wrapped(node.name, names, "") * bool(names)
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
        for item in _functions(node, home)
        if not item.name.startswith("_") and not _internal(home, node.name, item.name)
    ]
    attributes = [name for name in _attributes(constructor) if not _internal(home, node.name, name)]
    return Name(title, key, signature, parameters, _doc(node), "", attributes, fields, members)


def _functions(node: ast.ClassDef, home: str) -> Iterator[ast.FunctionDef]:
    """Its methods, then those of base classes in other modules of clusterddp."""
    yield from (item for item in node.body if isinstance(item, ast.FunctionDef))
    bases = [base.id for base in node.bases if isinstance(base, ast.Name)]
    for item in module(home).body:
        if isinstance(item, ast.ImportFrom) and (item.module or "").startswith("clusterddp."):
            for alias in item.names:
                if alias.name in bases:
                    base = defined(str(item.module))[alias.name]
                    assert isinstance(base, ast.ClassDef)
                    yield from _functions(base, str(item.module))


def _internal(home: str, name: str, member: str) -> bool:
    key = f"{home.rpartition('.')[2]}.{name}.{member}"
    return any(fnmatch(key, pattern) for pattern in INTERNAL)


def _fields(node: ast.ClassDef, home: str) -> Iterator[tuple[str, str]]:
    """The fields of a dataclass, each with the string below it."""
    for item, after in zip(node.body, [*node.body[1:], None], strict=True):
        if isinstance(item, ast.AnnAssign) and not _internal(home, node.name, ast.unparse(item.target)):
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


def _doc(node: ast.FunctionDef | ast.ClassDef) -> str:
    return inspect.cleandoc(ast.get_docstring(node) or "")


def _is_property(node: ast.FunctionDef) -> bool:
    return any(isinstance(item, ast.Name) and item.id == "property" for item in node.decorator_list)


def _parameters(node: ast.FunctionDef) -> list[str]:
    of = node.args
    every = [*of.posonlyargs, *of.args, of.vararg, *of.kwonlyargs, of.kwarg]
    return [argument.arg for argument in every if argument and argument.arg not in ("self", "cls")]


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
    if isinstance(annotation, ast.Subscript) and ast.unparse(annotation.value) == "Annotated":
        assert isinstance(annotation.slice, ast.Tuple)
        annotation = annotation.slice.elts[0]  # without what it says about a key of a job definition
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


# --- the page


def page() -> list[str]:
    """api.md."""
    lines = [
        "# Python API",
        "",
        "`import clusterddp` provides these names. [Exit codes](exit-codes.md) lists the exceptions.",
        "",
    ]
    sections = list(names())
    lines += ["A script needs these first:", "", "| name | |", "|---|---|"]
    by_key = {name.key: name for _, _, found in sections for one in found for name in (one, *one.members)}
    for key in FIRST:
        summary = markdown(" ".join(by_key[key].doc.split("\n\n")[0].split()))
        lines.append(
            f"| [`{by_key[key].title}`](#{anchor(by_key[key].title)}) | {summary.replace('|', chr(92) + '|')} |"
        )
    lines += ["", "All names:", ""]
    for title, _, found in sections:
        listed = ", ".join(f"[{name.key.rpartition('.')[2]}](#{anchor(name.title)})" for name in found)
        lines.append(f"- {title}: {listed}")
    for title, introduction, found in sections:
        lines += ["", f"## {title}", "", introduction, ""]
        for name in found:
            lines += _entry(name, "###")
            for member in name.members:
                lines += _entry(member, "####")
    return lines


def _entry(name: Name, heading: str) -> Iterator[str]:
    yield from (f"{heading} {name.title}", "")
    if name.signature or name.declaration:
        yield from ("```python", name.signature or name.declaration, "```", "")
    yield from _doc_lines(name.doc)
    for item, text in name.fields:
        yield f"- `{item}`" + (f": {markdown(text)}" if text else "")
    if name.fields:
        yield ""
    if name.key in EXAMPLES and not examples(name.doc):
        yield from ("Example:", "", "```python", EXAMPLES[name.key], "```", "")


def _doc_lines(doc: str) -> Iterator[str]:
    for block in blocks(doc):
        if block.kind == "prose":
            yield from (markdown(block.text), "")
        elif block.kind == "inline":
            yield from (f"Example: `{block.text}`", "")
        elif block.kind == "code":
            yield from ("```pycon" if block.text.startswith(">>>") else "```python", block.text, "```", "")
        else:
            yield from (f"{SECTIONS_OF_DOCSTRINGS[block.kind]}:", "")
            for names, text in entries(block):
                label = ", ".join(f"`{name}`" for name in names.split(", ") if name)
                yield f"- {label}: {markdown(text)}" if label else f"- {markdown(text)}"
            yield ""


def markdown(text: str) -> str:
    """A docstring's text as Markdown."""
    return text.replace("``", "`")


def anchor(title: str) -> str:
    """Of a heading."""
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")
