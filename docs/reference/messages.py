"""Every message in the sources, found by parsing them, and the page about them.

A message is the text of an error, a line that ``say`` or ``show`` prints, or the sentence of an event. ``...`` stands
for a value. A part that only some of a message's variants have is shown if its text is in the sources.
"""

from __future__ import annotations

import ast
import itertools
import math
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from clusterddp import errors
from docs.reference.python_api import anchor

PACKAGE = Path(__file__).resolve().parents[2] / "clusterddp"

#: The packages in the order of the page, each with its topic and the page of the guide about it.
TOPICS: Mapping[str, tuple[str, str]] = {
    "cli": ("Commands", ""),
    "runs": ("Runs: submitting, continuing, ending", "runs"),
    "jobdef": ("Job definitions and code", "job-definition"),
    "slurm": ("Slurm", "preemption"),
    "events": ("Events of the history", ""),
    "": ("Launchers and the Python API", "python"),
    "rundir": ("Run directories", ""),
    "supervisor": ("The supervisor of a job", "preemption"),
    "failures": ("Failures and hangs", "debugging"),
    "checks": ("Checks of a cluster", "gpu-cluster"),
    "worker": ("A rank's process", "debugging"),
    "distributed": ("Process group and devices", "nodes"),
    "training": ("The training script", "converting"),
    "data": ("Data", "data"),
    "checkpoint": ("Checkpoints", "checkpoints"),
    "trackers": ("Trackers", "report"),
    "report": ("Reports", "report"),
    "integrations": ("Other libraries", "existing-repository"),
}
#: Modules beside the packages that belong to a topic of their own.
ALONE = {"events": "events", "orders": "data", "streams": "data"}
#: Where ranks run scripts: exceptions of Python itself reach the user there.
IN_SCRIPTS = {"training", "data", "checkpoint", "distributed", "integrations", "trackers"}
PRINTING = {"say", "show", "say_unlocked", "said_once"}
#: Which argument is the text: of a mistake in a job definition, and of the likely cause of a library's error.
MISTAKES: Mapping[str, int] = {"Wrong": 0, "Mistake": 1}
CAUSES: Mapping[str, int] = {"ErrorText": 2}
#: Other calls get a reason that a message or an event contains, in these keywords or in an argument without one.
REASONS = {"reason", "error", "problem", "why", "because"}
#: Packages whose other texts are not messages: a page, job definitions, a script.
OTHER_TEXTS = {"report", "bench", "digits", "cli"}
#: Modules, classes and variables whose texts describe something in the documentation, or are never printed.
DESCRIPTIONS = {"json_schema", "PLACEHOLDERS", "Timer", "Do", "Course"}
#: The most rows of one message.
MOST_VARIANTS = 4
PART = "part of a message"
VALUE = "..."
#: The fewest letters by which a message can be found.
FEWEST_LETTERS = 8


@dataclass(frozen=True, order=True)
class Message:
    """A message, and how it appears."""

    text: str
    kind: str

    @property
    def letters(self) -> str:
        """What it is sorted by."""
        return re.sub(r"\.\.\.|[^a-z0-9 ]", "", self.text.lower()).strip()


@dataclass
class Module:
    """One source file: its messages, in no order. ``package``: the folder below clusterddp, empty for its own files."""

    package: str
    tree: ast.Module
    functions: dict[str, ast.FunctionDef] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.functions = {node.name: node for node in ast.walk(self.tree) if isinstance(node, ast.FunctionDef)}
        named = _variables(self.tree)
        self._descriptions = [value for name in DESCRIPTIONS for value in named.get(name, [])]

    def messages(self) -> Iterator[Message]:
        """All of them."""
        for node, scopes in _nodes(self.tree, (self.tree,)):
            if isinstance(node, ast.Dict) and node in self._descriptions:
                continue
            if isinstance(node, ast.Call):
                yield from self._of_call(node, scopes)
            elif isinstance(node, (ast.Return, ast.Yield)) and node.value is not None:
                kind = self._kind_of_return(scopes)
                texts = self._texts(node.value, scopes)
                yield from (Message(text, kind) for text in texts if kind and (kind != PART or is_sentence(text)))
            elif isinstance(node, ast.Assign) and isinstance(scopes[-1], ast.ClassDef):
                texts = self._texts(node.value, scopes) if _is_enum(scopes[-1]) and self._has_parts(scopes) else []
                yield from (Message(text, PART) for text in texts if is_sentence(text))
            elif isinstance(node, (ast.List, ast.Tuple, ast.Dict)) and self._has_parts(scopes):
                values = node.values if isinstance(node, ast.Dict) else node.elts
                texts = [text for each in values for text in self._texts(each, scopes)]
                yield from (Message(text, PART) for text in texts if is_sentence(text))

    def _of_call(self, node: ast.Call, scopes: tuple[ast.AST, ...]) -> Iterator[Message]:
        name = _last(node.func)
        if kind := self._kind_of_call(name):
            arguments = node.args[{**MISTAKES, **CAUSES}.get(name, 0) :][:1]
            yield from (Message(text, kind) for each in arguments for text in self._texts(each, scopes))
        elif self._has_parts(scopes) and (name == "ValueError" or not name.endswith("Error")):
            named = [keyword.value for keyword in node.keywords if keyword.arg in REASONS]
            texts = [text for each in (*node.args, *named) for text in self._texts(each, scopes)]
            yield from (Message(text, PART) for text in texts if is_sentence(text))

    def _kind_of_call(self, name: str) -> str:
        """How a message appears that a call of this name has; empty if it has none."""
        if name in error_codes():
            return f"`{name}`, exit code {error_codes()[name]}"
        if name in MISTAKES:
            return f"`JobDefinitionError`, exit code {errors.WRONG_USAGE}"
        if name in CAUSES:
            return PART
        if name in ("ValueError", "TypeError", "RuntimeError"):
            return f"`{name}` in the script" if self.package in IN_SCRIPTS else ""
        if name in PRINTING:
            where = {"cli": "printed by a command", "runs": "printed by a command", "supervisor": "the job's log"}
            is_program = any(isinstance(node, ast.If) and "__name__" in ast.dump(node.test) for node in self.tree.body)
            of_rank = self.package in IN_SCRIPTS or (self.package == "worker" and not is_program)
            ranks = "a rank's `.err`" if of_rank else "standard error"
            return where.get(self.package, ranks)
        return ""

    def _has_parts(self, scopes: tuple[ast.AST, ...]) -> bool:
        """Whether texts here that are no messages are contained in some."""
        inside = any(isinstance(scope, ast.FunctionDef) for scope in scopes)
        described = any(isinstance(scope, ast.ClassDef) and scope.name in DESCRIPTIONS for scope in scopes)
        return self.package not in OTHER_TEXTS and not described and (inside or self.package not in ("", "events"))

    def _kind_of_return(self, scopes: tuple[ast.AST, ...]) -> str:
        """How a text appears that a function returns: as the sentence of an event, or inside a message."""
        owner = next((scope.name for scope in reversed(scopes) if isinstance(scope, ast.ClassDef)), "")
        if self.package != "events" or not owner:
            return PART if self._has_parts(scopes) or self.package == "cli" else ""
        name = re.sub("(?<=.)(?=[A-Z])", "_", owner).lower().removeprefix("_")
        return "history" if owner.startswith("_") else f"history, event `{name}`"

    # --- the texts of an expression

    def _texts(self, node: ast.AST, scopes: tuple[ast.AST, ...], depth: int = 0) -> list[str]:
        """Its possible values, with VALUE for those that the sources do not contain."""
        if depth > 6:
            return [VALUE]
        if isinstance(node, ast.Constant):
            return [node.value] if isinstance(node.value, str) else []
        if isinstance(node, ast.JoinedStr):
            parts = [self._part(part, scopes, depth) for part in node.values]
            if math.prod(map(len, parts)) > MOST_VARIANTS:
                parts = [[max(variants, key=len)] for variants in parts]
            return ["".join(variant) for variant in itertools.product(*parts)]
        if isinstance(node, ast.IfExp):
            return [text for branch in (node.body, node.orelse) for text in self._texts(branch, scopes, depth + 1)]
        if isinstance(node, ast.BoolOp):
            values = node.values if isinstance(node.op, ast.Or) else node.values[-1:]
            return [text for value in values for text in self._texts(value, scopes, depth + 1)]
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            sides = [self._texts(side, scopes, depth + 1) or [VALUE] for side in (node.left, node.right)]
            return [_one_value("".join(both)) for both in itertools.product(*sides)]
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
            return self._texts(node.left, scopes, depth + 1)
        if isinstance(node, ast.Name):
            values = _assigned(node.id, scopes)
            return [text for value in values for text in self._texts(value, scopes, depth + 1)] if values else [VALUE]
        if isinstance(node, ast.Call):
            return self._texts_of_call(node, scopes, depth)
        return [VALUE]

    def _texts_of_call(self, node: ast.Call, scopes: tuple[ast.AST, ...], depth: int) -> list[str]:
        """Those that a function of this module returns, or those of a format."""
        if isinstance(node.func, ast.Attribute) and node.func.attr == "format":
            return [re.sub(r"\{[^{}]*\}", "...", text) for text in self._texts(node.func.value, scopes, depth + 1)]
        function = self.functions.get(_last(node.func))
        if function is None:
            return [VALUE]
        inside = (self.tree, function)
        returned = [item.value for item, _ in _nodes(function, inside) if isinstance(item, ast.Return) and item.value]
        return [text for value in returned for text in self._texts(value, inside, depth + 1)]

    def _part(self, part: ast.expr, scopes: tuple[ast.AST, ...], depth: int) -> list[str]:
        """The variants of a part of an f-string: its text, or those of a value that have words of their own."""
        if isinstance(part, ast.Constant):
            return [str(part.value)]
        assert isinstance(part, ast.FormattedValue)
        if isinstance(part.value, ast.Call) and _last(part.value.func) == "counted":
            return [VALUE]
        texts = dict.fromkeys(self._texts(part.value, scopes, depth + 1))
        words = [text for text in texts if re.search("[a-z]{2}", text)]
        if VALUE in texts:  # beside a value, a few words stand in its place, such as "none", unless they are a hint
            words = [text for text in words if is_sentence(text) or re.match("[.,;:]? ", text)]
        return words or [VALUE]


def _nodes(node: ast.AST, scopes: tuple[ast.AST, ...]) -> Iterator[tuple[ast.AST, tuple[ast.AST, ...]]]:
    """All nodes below, each with the module, classes and functions around it."""
    for child in ast.iter_child_nodes(node):
        yield child, scopes
        inner = (*scopes, child) if isinstance(child, (ast.FunctionDef, ast.ClassDef)) else scopes
        yield from _nodes(child, inner)


def _assigned(name: str, scopes: tuple[ast.AST, ...]) -> list[ast.expr]:
    """What a variable is set to, in the innermost function or module that sets it."""
    inside = (_variables(scope).get(name) for scope in reversed(scopes) if not isinstance(scope, ast.ClassDef))
    return next(filter(None, inside), [])


@cache
def _variables(scope: ast.AST) -> dict[str, list[ast.expr]]:
    """The variables that a function or a module sets, each with all values."""
    found: dict[str, list[ast.expr]] = {}
    for node in ast.walk(scope) if isinstance(scope, ast.FunctionDef) else ast.iter_child_nodes(scope):
        if isinstance(node, ast.Assign):
            pairs = [pair for target in node.targets for pair in _pairs(target, node.value)]
        elif isinstance(node, (ast.AnnAssign, ast.NamedExpr)) and node.value is not None:
            pairs = list(_pairs(node.target, node.value))
        else:
            continue
        for name, value in pairs:
            found.setdefault(name, []).append(value)
    return found


def _pairs(target: ast.expr, value: ast.expr) -> Iterator[tuple[str, ast.expr]]:
    if isinstance(target, ast.Name):
        yield target.id, value
    elif isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
        for part, each in zip(target.elts, value.elts, strict=False):
            yield from _pairs(part, each)


def _one_value(text: str) -> str:
    """The text with two values beside each other as one."""
    return re.sub(r"(\.\.\.){2,}", VALUE, text)


def is_sentence(text: str) -> bool:
    """Whether a text is in words: not a path, a command line or a format."""
    words = re.findall(r"(?<![\w`/.<-])[a-z]{2,}(?![\w/.=(>])", text)
    return len(words) >= 4 and len(set(words)) >= 3 and not re.search(r"[<\\?]|\w ?\| ?\w|\w:\w", text)


def _is_enum(node: ast.ClassDef) -> bool:
    return any("Enum" in ast.unparse(base) for base in node.bases)


def _last(function: ast.expr) -> str:
    return ast.unparse(function).rpartition(".")[2]


@cache
def error_codes() -> dict[str, int]:
    """The error classes of clusterddp, also those that a single module defines, with their exit codes."""
    classes = [item for item in vars(errors).values() if isinstance(item, type) and issubclass(item, BaseException)]
    found = {error.__name__: errors.exit_code(error) for error in classes}
    for _, tree in sources():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and node.name not in found:
                codes = [found[ast.unparse(base)] for base in node.bases if ast.unparse(base) in found]
                found |= {node.name: codes[0]} if codes else {}
    return found


@cache
def sources() -> list[tuple[Path, ast.Module]]:
    """Every module, parsed."""
    return [(path.relative_to(PACKAGE), ast.parse(path.read_text())) for path in sorted(PACKAGE.rglob("*.py"))]


@cache
def found() -> dict[str, list[Message]]:
    """The messages by package, each once, in the order of their fixed words."""
    packages: dict[str, set[Message]] = {}
    for path, tree in sources():
        package = path.parts[0] if len(path.parts) > 1 else ALONE.get(path.stem, "")
        if path.stem in DESCRIPTIONS:
            continue
        for message in Module(package, tree).messages():
            text = _one_value(" ".join(message.text.split()))
            text = text.removeprefix(". ") if message.kind == PART else text
            if len(re.sub("[^A-Za-z]", "", text)) >= FEWEST_LETTERS:
                packages.setdefault(package, set()).add(Message(text, message.kind))
    return {
        package: sorted(without_repetition(messages), key=lambda message: (message.letters, message))
        for package, messages in packages.items()
    }


def without_repetition(messages: Collection[Message]) -> list[Message]:
    """Without the parts that a reader finds in the row of a longer message."""
    texts = [(message.text, message.kind) for message in messages]
    return [
        message
        for message in messages
        if message.kind != PART
        or not any(message.text in text and (text, kind) != (message.text, PART) for text, kind in texts)
    ]


def page() -> list[str]:
    """messages.md."""
    messages = found()
    order = [*TOPICS, *sorted(messages.keys() - TOPICS.keys())]
    topics = [(package, *TOPICS.get(package, (package, ""))) for package in order if package in messages]
    lines = [
        "# Messages",
        "",
        "Every message of clusterddp. `...` stands for a value, such as a path, a number or a name. Search this page",
        "for a few words between two values. Most say what to do, and some only inform you.",
        "",
        "- An error of a command begins with `clusterddp: ` and ends the command with its [exit code](exit-codes.md).",
        "- A line of the history begins with `attempt N: `. `clusterddp status` prints it, and",
        "  [Events](events.md) lists its fields.",
        "- A part of a message is contained in another one, such as the reason in `failed at step ...: ...`.",
        "",
        "By topic:",
        "",
        *(f"- [{title}](#{anchor(title)})" for _, title, _ in topics),
    ]
    for package, title, guide in topics:
        lines += ["", f"## {title}", ""]
        if guide and (PACKAGE.parent / "docs" / "guide" / f"{guide}.md").exists():
            lines += [f"Guide: [{guide.replace('-', ' ')}](../guide/{guide}.md)", ""]
        lines += ["| message | how it appears |", "|---|---|"]
        lines += [f"| {as_code(message.text)} | {message.kind} |" for message in messages[package]]
    return lines


def as_code(text: str) -> str:
    """As code in a cell of a table."""
    ticks = "``" if "`" in text else "`"
    padding = " " if text.startswith("`") or text.endswith("`") else ""
    return f"{ticks}{padding}{text}{padding}{ticks}".replace("|", "\\|")
