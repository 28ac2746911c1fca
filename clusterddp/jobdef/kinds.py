"""The kinds of values and the marks that only a job definition has. Those of Slurm are in ``slurm_kinds.py``."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from clusterddp.jobdef import yaml12
from clusterddp.jobdef.masking import is_secret
from clusterddp.keys.kinds import (
    SCALAR,
    Schema,
    Table,
    Value,
    Wrong,
    count_schema,
    did_you_mean,
    either,
    list_schema,
    matching,
    or_null,
    read_argument,
    read_arguments,
    read_choice,
    read_text,
    text_schema,
)
from clusterddp.keys.node import Mistake, Node
from clusterddp.keys.table import Entry, Section, Text, read_fields
from clusterddp.process import PACKAGE_FOLDER
from clusterddp.protocol import FOR_RANKS
from clusterddp.reporter import counted

# --- marks


@dataclass(frozen=True)
class Sbatch:
    """The value is that of sbatch's option of the same name."""


@dataclass(frozen=True)
class Frozen:
    """Once a run has a checkpoint, the value cannot change."""

    if_given: bool = False
    """Leaving the key out keeps the value of the checkpoint."""


@dataclass(frozen=True)
class Placeholders:
    """The text may contain placeholders."""

    only: tuple[str, ...] = ()
    """Only these, in a path or a pattern of files. Empty: all."""


@dataclass(frozen=True)
class NotIn:
    """Files that share keys among jobs do not have this one."""

    files: tuple[str, ...]


#: Keys that say what to run, and those that belong to one script.
ONE_JOB, ONE_SCRIPT = NotIn(("presets", "configuration")), NotIn(("configuration",))

# --- the program


def _name(node: Node) -> str:
    """A job's name, also that of its run directory."""
    expected = "a name of letters, digits and the characters _.+=@- that does not begin with . or -"
    given = read_text(node)
    if not re.fullmatch(r"[\w+=@][\w.+=@-]*", given):
        raise Wrong(f"expected {expected}, got {given!r}")
    if len(given.encode()) > 200:
        raise Wrong(f"expected at most 200 bytes (the run directory has this name), got {len(given.encode())}")
    return given


NAME = Value(_name, text_schema(r"[^\s/.-][^\s/]*", maxLength=200))
MODULE = matching(
    r"[^\W\d]\w*(\.[^\W\d]\w*)*",
    "a module such as package.train",
    {"type": "string", "pattern": r"^[^\s\d./-][^\s/-]*$"},
)
STAGE = matching(r"[/$].*", "a folder such as /tmp or $SLURM_TMPDIR")
PYTHON = matching(r"[^-].*", "the path or name of a Python interpreter")


def _command(node: Node) -> tuple[str, ...]:
    """A command as a list of words, or as one line for ``sh``."""
    if isinstance(node.value, list) and node.value:
        return read_arguments(node)
    if isinstance(node.value, (dict, list)) or not node.text:
        raise Wrong(
            f"expected a command as a list, such as [python, notify.py], or as a line for sh, got {node.quoted}"
        )
    return ("/bin/sh", "-c", read_text(node))


COMMAND = Value(_command, either(list_schema(minItems=1), text_schema()))


def _snapshot(node: Node) -> bool | str:
    """Whether to take a snapshot of the code, or its maximum size."""
    if isinstance(node.value, bool):
        return node.value
    if not re.fullmatch(r"[1-9][0-9]{0,5}[MG]", node.text, re.ASCII):
        raise Wrong(f"expected true, false, or a size such as 500M or 2G, got {node.quoted}")
    return node.text


SNAPSHOT = Value(_snapshot, either({"type": "boolean"}, {"type": "string", "pattern": "^[1-9][0-9]{0,5}[MG]$"}))

#: A variable that is assigned a literal value.
ASSIGNMENT = re.compile(r"""(?:^|[\s;&|(])(\w+)=["']?[^\s"'$`;]""")


def _shell_lines(node: Node) -> tuple[str, ...]:
    """A list of lines, or one block of text, perhaps in place of those of earlier layers. An item with a line break is
    two lines."""
    if isinstance(node.value, dict):
        if list(node.value) != [yaml12.REPLACE]:
            raise Wrong(f"expected a list of shell lines, or {{replace: [...]}}, got {node.quoted}")
        (node,) = node.value.values()
    items = [read_argument(item) for item in node.value] if isinstance(node.value, list) else [_block(node)]
    lines = [line for item in items for line in item.removesuffix("\n").split("\n")]
    for line in lines:
        if any(unicodedata.category(character) == "Cc" and character != "\t" for character in line):
            raise Wrong(f"expected shell lines without control characters, got {line!r}")
        for variable_name in ASSIGNMENT.findall(line):
            if is_secret(variable_name):
                raise Wrong(
                    f"{variable_name} would be stored in the batch script, which Slurm keeps, or in job.yaml. Set it "
                    f"under env:, or read it from a file: export {variable_name}=$(cat FILE)"
                )
    return tuple(lines)


def _block(node: Node) -> str:
    if isinstance(node.value, dict) or not node.text:
        raise Wrong(f"expected a list of shell lines, got {node.quoted}")
    return node.text


_LINES = (list_schema(), text_schema())
SHELL_LINES = Value(
    _shell_lines,
    either(
        *_LINES,
        {
            "type": "object",
            "properties": {
                yaml12.REPLACE: {
                    **either(*_LINES),
                    "description": "Lines in place of those of the site, the configuration files and the target.",
                }
            },
            "required": [yaml12.REPLACE],
            "additionalProperties": False,
        },
    ),
)


def _variable(node: Node) -> str:
    if isinstance(node.value, (dict, list)) or "\0" in node.text:
        raise Wrong(f"expected text, got {'text with U+0000' if node.text else node.quoted}")
    return node.text


def _check_variable(name: str, _: Node) -> None:
    if not re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII):
        raise Wrong("not a valid variable name. Use letters, digits and _, and do not begin with a digit")
    if name in _SET_FOR_RANKS:
        raise Wrong("clusterddp sets this variable for each rank. Remove it")


_SET_FOR_RANKS = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", *FOR_RANKS}


def _variables_schema() -> Schema:
    return {
        "type": "object",
        "propertyNames": {"pattern": "^[A-Za-z_][A-Za-z0-9_]*$", "not": {"enum": sorted(_SET_FOR_RANKS)}},
        "additionalProperties": {"type": [*SCALAR, "null"]},
    }


VARIABLES = Table(_check_variable, _variable, _variables_schema)

# --- the network


def _interfaces(node: Node) -> tuple[str, ...]:
    """One name, or a list of names."""
    names = [read_argument(item) for item in node.value] if isinstance(node.value, list) else [read_text(node)]
    for name in names:
        if not re.fullmatch(r"[^\s,/:=^]{1,15}", name):
            raise Wrong(f"expected the name of a network interface such as ib0, or a list of names, got {name!r}")
    return tuple(names)


_INTERFACE = {"type": "string", "pattern": r"^[^\s,/:=^]{1,15}$"}
INTERFACES = Value(_interfaces, either(_INTERFACE, {"type": "array", "items": _INTERFACE}))


def _backend(node: Node) -> str:
    if node.text == "mpi":
        raise Wrong(
            "expected nccl or gloo, got 'mpi'. For MPI, start the script with mpirun and call init(backend='mpi')"
        )
    return read_choice(node, ("nccl", "gloo"))


BACKEND = Value(_backend, {"enum": ["nccl", "gloo"]})

# --- checkpoints and steps

_UNIT_SECONDS = {"second": 1, "minute": 60, "hour": 3600}


def _every(node: Node) -> tuple[int | None, float | None, bool]:
    """Steps and seconds between checkpoints, and whether clusterddp computes the interval."""
    if node.text == "auto":
        return None, None, True
    steps: int | None = None
    seconds: float | None = None
    for item in node.value if isinstance(node.value, list) and node.value else [node]:
        if item is node and node.text == "never":
            break
        match = re.fullmatch(r"([0-9][0-9.e+-]*) (steps?|seconds?|minutes?|hours?)", item.text, re.ASCII)
        number = yaml12.scalar(match[1]) if match else None
        in_steps = match is not None and match[2].startswith("step")
        if in_steps and isinstance(number, int) and number > 0 and steps is None:
            steps = number
        elif match and not in_steps and isinstance(number, (int, float)) and 0 < number < float("inf") and not seconds:
            seconds = float(number) * _UNIT_SECONDS[match[2].rstrip("s")]
        else:
            expected = "an interval such as 500 steps, 5 minutes or [500 steps, 5 minutes], or auto, or never"
            raise Wrong(f"expected {expected}, got {item.quoted}")
    return steps, seconds, False


def _every_text(steps: int | None, seconds: float | None, auto: bool) -> str | tuple[str, ...]:
    if auto:
        return "auto"
    texts = [] if steps is None else [counted(steps, "step")]
    if seconds is not None:
        texts.append(f"{repr(seconds).removesuffix('.0')} seconds")
    return tuple(texts) if len(texts) == 2 else (texts or ["never"])[0]


_INTERVAL: Schema = {"type": "string", "pattern": r"^[0-9][0-9.e+-]* (steps?|seconds?|minutes?|hours?)$"}
INTERVAL = Value(
    _every,
    either({"enum": ["auto", "never"]}, _INTERVAL, {"type": "array", "items": _INTERVAL, "maxItems": 2}),
    writer=_every_text,
)


def _best(node: Node) -> tuple[str, str]:
    """The metric, and which of its values is best."""
    match = re.fullmatch(r"([^\s-]\S*) (max|min)", node.text)  # -f1 is for run(best=...)
    if not match:
        raise Wrong(f"expected the name of a metric and max or min, such as f1 max, got {node.quoted}")
    return match[1], match[2]


BEST = Value(
    _best,
    {"type": "string", "pattern": r"^[^\s-]\S* (max|min)$"},
    writer=lambda metric, which: metric and f"{metric} {which}",
)


def _step_pattern(node: Node) -> str:
    try:
        groups = re.compile(node.text).groups
        if groups == 1:
            return node.text
        problem = f"has {groups} groups"
    except re.error as error:
        problem = f"is not valid: {error}"
    expected = "a regular expression with one group, for the step, such as 'iter (\\d+)'"
    raise Wrong(f"expected {expected}, but {node.text!r} {problem}")


_STEP_LOG = Value(_step_pattern, {**text_schema(r".*\(.*\).*"), "type": "string"})


class Steps:
    """A number, ``off``, or ``{log: REGEX}``: the fields ``steps``, ``see_steps`` and ``step_log``."""

    def __init__(self) -> None:
        text = Text("A regular expression whose group is the step, in a line that rank 0 prints.")
        self._table = {"log": Entry("log", ("log",), _STEP_LOG, Steps, (text,))}

    def read(self, node: Node, name: str, mistakes: list[Mistake]) -> tuple[int | None, bool, str | None]:
        """As every kind."""
        if isinstance(node.value, dict):
            return None, True, read_fields(node.value, self._table, mistakes, f"{name}.").get("log")
        if node.text == "off":
            return None, False, None
        if isinstance(node.value, bool) or not isinstance(node.value, int) or node.value < 1:
            raise Wrong(f"expected a whole number of at least 1, off, or {{log: 'iter (\\d+)'}}, got {node.quoted}")
        return node.value, True, None

    def write(self, *values: Any) -> Any:
        """As every kind."""
        steps, see_steps, step_log = values
        if steps or step_log:
            return steps or {"log": step_log}
        return None if see_steps else "off"

    def schema(self) -> Schema:
        """As every kind."""
        inside = {"log": {"description": self._table["log"].text, **_STEP_LOG.schema()}}
        mapping = {"type": "object", "properties": inside, "additionalProperties": False}
        return either(count_schema(), {"const": "off"}, mapping)


# --- checkpoints of the script, and its end

PRESETS_FOLDER = PACKAGE_FOLDER / "clusterddp" / "presets"


def preset_names() -> list[str]:
    """The names of all presets."""
    return sorted(path.stem for path in PRESETS_FOLDER.glob("*.yaml"))


#: The profiles of sites that are included.
SITES_FOLDER = PACKAGE_FOLDER / "clusterddp" / "sites"


def site_names() -> list[str]:
    """The names of all profiles of sites."""
    return sorted(path.stem for path in SITES_FOLDER.glob("*.yaml"))


def _site(node: Node) -> str:
    if (name := read_text(node)) in site_names():
        return name
    hint = did_you_mean(name, site_names()) or f". Sites: {', '.join(site_names())}"
    raise Wrong(f"expected the name of a site, got {name!r}{hint}")


SITE = Value(_site, {"enum": site_names()})


def _patterns(node: Node) -> tuple[str, ...]:
    """A pattern of file names, or a list of them."""
    if isinstance(node.value, list) and node.value:
        return tuple(read_text(item) for item in node.value)
    if isinstance(node.value, (dict, list)):
        raise Wrong(f'expected a pattern such as "{{run_dir}}/out/*.pth", or a list of them, got {node.quoted}')
    return (read_text(node),)


PATTERNS = Value(_patterns, either(text_schema(), {"type": "array", "items": text_schema(), "minItems": 1}))


class OfScript(Section):
    """The key ``resume``: a mapping. The name of a preset was replaced before."""

    def __init__(self, owner: type) -> None:
        super().__init__(owner, "a mapping with checkpoint: PATTERN, or the name of a preset")

    def schema(self) -> Schema:
        """As every kind. Either ``args`` or ``replace``."""
        mapping = super().schema()
        preset = {"description": "A preset, for the keys that are not given here.", "enum": preset_names()}
        mapping["properties"] = {"preset": or_null(preset), **mapping["properties"]}
        both = {"required": ["args", "replace"], "properties": dict.fromkeys(("args", "replace"), list_schema())}
        return either({"enum": preset_names()}, {**mapping, "not": both})


class FileOrLog(Section):
    """The key ``done``: a file pattern, or ``{log: REGEX}``."""

    @property
    def table(self) -> Mapping[str, Entry]:
        """The key inside."""
        return {"log": super().table["log"]}

    def read(self, node: Node, name: str, mistakes: list[Mistake]) -> Any:
        """As every kind."""
        if not isinstance(node.value, dict):
            return self.owner(file=read_text(node))
        known = len(mistakes)
        done = super().read(node, name, mistakes)
        if done == self.owner() and len(mistakes) == known:
            raise Wrong(
                "expected a file such as out/epoch_90.pt, or {log: REGEX}, got a mapping without a value for log"
            )
        return done

    def write(self, *values: Any) -> Any:
        """As every kind."""
        (done,) = values
        return done and (done.file or {"log": done.log})

    def schema(self) -> Schema:
        """As every kind."""
        log = {"description": self.table["log"].text, **self.table["log"].kind.schema()}
        mapping = {"type": "object", "properties": {"log": log}, "additionalProperties": False}
        return either(text_schema(), {**mapping, "required": ["log"]})
