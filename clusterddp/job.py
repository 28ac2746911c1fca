"""The job definition: what to run, on what, and by which policies; read from YAML into one frozen dataclass.

A value comes from, last wins: the user's defaults, the file, the command line's own options, ``--set key.path=value``.
A null takes a field back to its built-in default. Every mistake in all of them is reported in one error.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
import re
import shlex
import unicodedata
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml

from clusterddp import yaml12
from clusterddp.errors import JobDefinitionError
from clusterddp.yaml12 import Key, Mistake, Node, Place, node_of, raise_mistakes

#: Fields as they were written, by their YAML key.
Fields = dict[Key, Node]


@dataclass(frozen=True)
class Checkpointing:
    """When checkpoints are taken, apart from the one at every stop, and how many stay."""

    every_steps: int | None = None
    """Steps from one checkpoint to the next; None: the number of steps triggers none."""
    every_s: float | None = 300.0
    """Seconds from one checkpoint to the next; None: time triggers none."""
    keep: int = 3
    """How many of the newest checkpoints are kept."""


@dataclass(frozen=True)
class Timeouts:
    """How long things may take, in seconds."""

    start_s: float = 1800.0
    """The process group's time-out until the first step is done: imports, data sets, compilation."""
    step_s: float = 1800.0
    """The process group's time-out while training."""
    notice_s: float = 120.0
    """How long before its time limit the run is told to save and stop."""


@dataclass(frozen=True)
class Limits:
    """How much a run may use before it is ended as failed; None: no bound."""

    attempts: int | None = None
    """Starts of all ranks, the first included."""
    gpu_hours: float | None = None
    """Hours times ranks (with device cpu: rank hours), from each attempt's start to its end."""


@dataclass(frozen=True)
class Job:
    """A job definition, complete and checked."""

    name: str
    """YAML key ``job_name``: Slurm's job name, and the run directory's; by default the script's or module's own."""
    script: str | None = None
    """The training script's absolute path; in YAML relative to the YAML's folder."""
    module: str | None = None
    """The training module, as for ``python -m``; exactly one of script and module is given."""
    args: tuple[str, ...] = ()
    """The script's arguments, as written."""
    args_on_resume: tuple[str, ...] = ()
    """Arguments added from the second attempt on, for scripts that resume by themselves."""
    nodes: int = 1
    gpus_per_node: int = 1
    """GPUs, and so ranks, on each node; with device cpu the ranks on each node. ``TYPE:G`` in YAML asks for a type."""
    gpu_type: str | None = None
    """Slurm's name of the GPU type; in YAML a part of ``gpus_per_node: a100:4``."""
    device: Literal["cuda", "cpu"] = "cuda"
    time_s: int | None = None
    """YAML key ``time``, in Slurm's forms (minutes, M:S, H:M:S, D-H, D-H:M, D-H:M:S): the limit of one job, in seconds;
    None leaves it to the partition."""
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    reservation: str | None = None
    exclude: str | None = None
    """Host list of the nodes to avoid."""
    nodelist: str | None = None
    """Host list of the nodes to use."""
    mem: str | None = None
    """Memory per node with its unit, such as 64G; 0 is all of it."""
    cpus_per_task: int | None = None
    """CPUs of each rank."""
    setup: tuple[str, ...] = ()
    """Shell lines run on the first node before the ranks start."""
    env: dict[str, str] = field(default_factory=dict)
    """Environment variables for the ranks."""
    python: str | None = None
    """The interpreter on the nodes; None is the one that submits."""
    sbatch: dict[str, str | bool] = field(default_factory=dict)
    """Any other long option of sbatch, without dashes; True gives the bare option, False leaves it out."""
    steps: int | None = None
    """The number of steps, for the script to read from its context."""
    seed: int = 0
    checkpoint: Checkpointing = field(default_factory=Checkpointing)
    """YAML: ``{every: 500 steps | 5 minutes | 30 seconds | never, keep: 3}``, or ``every: [500 steps, 5 minutes]``."""
    timeouts: Timeouts = field(default_factory=Timeouts)
    limits: Limits = field(default_factory=Limits)
    policy: Literal["requeue", "resubmit"] | None = None
    """How a preempted run goes on: requeue keeps the job id and its age, but Slurm holds it for a while; resubmit is a
    new job without that. None: requeue where the cluster allows it, else resubmit."""
    lift_hold: bool = True
    """Whether ``submit --wait`` and ``watch`` may lift the hold after a requeue, as the job's owner may; false in the
    users' defaults where a site does not want that."""
    backend: Literal["nccl", "gloo"] | None = None
    """The process group's backend; None is NCCL for cuda and gloo for cpu."""
    share: Literal["private", "group"] = "private"
    """Who may read the run directory."""

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return self.nodes * self.gpus_per_node

    @property
    def time_text(self) -> str | None:
        """The time limit as D-HH:MM:SS; None where there is none."""
        if self.time_s is None:
            return None
        minutes, seconds = divmod(self.time_s, 60)
        return f"{minutes // 1440}-{minutes // 60 % 24:02}:{minutes % 60:02}:{seconds:02}"

    @property
    def shape(self) -> str:
        """The plan in words: ``2 nodes x 8 GPUs per node = 16 ranks``."""
        if self.device == "cpu":
            per_node, note = _counted(self.gpus_per_node, "process", "processes"), f" ({self.backend or 'gloo'} on CPU)"
        else:
            kind = f"{self.gpu_type} GPU" if self.gpu_type else "GPU"
            per_node, note = _counted(self.gpus_per_node, kind), " (gloo)" if self.backend == "gloo" else ""
        return f"{_counted(self.nodes, 'node')} x {per_node} per node = {_counted(self.world_size, 'rank')}{note}"

    def to_yaml(self) -> str:
        """The definition as YAML that ``load_resolved`` reads back as an equal object; built-in defaults included."""
        values = {key: value for key, value in _written(self).items() if value not in (None, (), {})}
        return yaml.dump(_plain(values), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=2**20)

    def differences(self, other: Job) -> list[str]:
        """A line for each value that differs, with this one as recorded: ``nodes: 2 recorded, 4 given``."""
        recorded, given = _flat(_written(self)), _flat(_written(other))
        return [
            f"{key}: {_shown(recorded.get(key))} recorded, {_shown(given.get(key))} given"
            for key in dict.fromkeys([*recorded, *given])
            if recorded.get(key) != given.get(key)
        ]


def load(
    path: str | os.PathLike[str],
    overrides: Mapping[str, str] | None = None,
    *,
    values: Mapping[str, Any] | None = None,
    defaults: Fields | None = None,
) -> Job:
    """Reads the job definition in the file ``path``; raises one JobDefinitionError for all mistakes.

    ``defaults`` (``user_defaults``) lie below the file; ``values``, the command line's own options by YAML key, above
    it; ``overrides`` of ``--set``, by dotted key, on top, each read as a YAML scalar.
    """
    mistakes: list[Mistake] = []
    fields = _file_fields(Path(path), mistakes)
    layers = [defaults or {}, fields, _fields(node_of(values or {}, "command line"), mistakes)]
    return _job(layers, overrides or {}, Path(path).parent, Place(str(path)), mistakes)


def from_values(
    mapping: Mapping[str, Any],
    source: str = "command line",
    folder: str | os.PathLike[str] = ".",
    *,
    overrides: Mapping[str, str] | None = None,
    defaults: Fields | None = None,
) -> Job:
    """Makes a job from Python values by YAML key; ``source`` names them in messages, ``folder`` is the script's.

    Text means what it would mean in YAML: ``{"gpus_per_node": "a100:4", "nodes": "2"}``. For the rest see ``load``.
    """
    mistakes: list[Mistake] = []
    layers = [defaults or {}, _fields(node_of(mapping, source), mistakes)]
    return _job(layers, overrides or {}, Path(folder), Place(source), mistakes)


def load_resolved(path: str | os.PathLike[str]) -> Job:
    """Reads what ``Job.to_yaml`` wrote; the script need not be there any more, so that an old run can be looked at."""
    mistakes: list[Mistake] = []
    fields = _file_fields(Path(path), mistakes)
    return _job([fields], {}, Path(path).parent, Place(str(path)), mistakes, script_must_exist=False)


def user_defaults(cluster: str | None, path: str | os.PathLike[str] | None = None) -> Fields:
    """The user's own defaults for a cluster, for ``load``; empty when there is no such file.

    The file is ``$XDG_CONFIG_HOME/clusterddp/config.yaml`` (by default in ``~/.config``), of the form
    ``{defaults: {partition: gpu}, clusters: {NAME: {account: x}}}``; a cluster's own values win. Mistakes are reported
    for the whole file, whichever cluster is asked for.
    """
    config = Path(path) if path is not None else _user_file()
    if path is None and not config.exists():
        return {}
    mistakes: list[Mistake] = []
    top = _file_fields(config, mistakes)
    _check_keys(top, ("defaults", "clusters"), mistakes)
    sections = [_fields(_get(top, "defaults"), mistakes)]
    clusters = _fields(_get(top, "clusters"), mistakes)
    by_cluster = {str(name): _fields(node, mistakes) for name, node in clusters.items()}
    for section in [*sections, *by_cluster.values()]:
        _check_keys(section, [key for key in _READERS if key not in _OF_ONE_JOB], mistakes)
        _read(section, _READERS, mistakes)
    raise_mistakes(mistakes)
    return _merged([*sections, by_cluster.get(cluster or "", {})])


# --- from text to fields


def _user_file() -> Path:
    home = os.environ.get("XDG_CONFIG_HOME") or Path("~/.config").expanduser()
    return Path(home) / "clusterddp" / "config.yaml"


def _file_fields(path: Path, mistakes: list[Mistake]) -> Fields:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise JobDefinitionError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise JobDefinitionError(f"{path}: byte {error.start} is not UTF-8 text") from error
    root = yaml12.load(text, str(path), mistakes)
    fields = _fields(root, mistakes)
    if not isinstance(root.value, (dict, type(None))):
        raise_mistakes(mistakes)  # nothing was read: what else there is to say would only follow from that
    return fields


def _fields(node: Node | None, mistakes: list[Mistake]) -> Fields:
    """A mapping's fields; none for a null, such as an empty file."""
    if node is None or node.value is None:
        return {}
    if isinstance(node.value, dict):
        return node.value
    mistakes.append(Mistake(node.place, f"expected 'key: value' lines, got {_given(node)}"))
    return {}


def _get(fields: Fields, name: str) -> Node | None:
    return next((node for key, node in fields.items() if key == name), None)


def _merged(layers: Iterable[Fields]) -> Fields:
    """The layers in one, later ones on top; mappings such as ``checkpoint`` or ``env`` are merged key by key."""
    merged: Fields = {}
    for layer in layers:
        for key, node in layer.items():
            below = merged.pop(key, None)
            if below is not None and isinstance(below.value, dict) and isinstance(node.value, dict):
                node = dataclasses.replace(node, value=_merged([below.value, node.value]))
            merged[key] = node  # under the upper layer's key, which has that layer's place
    return merged


def _override(name: str, text: str) -> Fields:
    place = Place(f"--set {name}={text}")
    outer, dot, inner = name.partition(".")
    node = Node(yaml12.scalar(text), text, place)
    if dot:
        node = Node({Key(inner, place): node}, "", place)
    return {Key(outer, place): node}


# --- from fields to a job

#: Reads a field's node into values of the dataclass; raises _Wrong, or notes mistakes with a place further inside.
Reader = Callable[[Node, list[Mistake]], dict[str, Any]]


class _Wrong(Exception):
    """A value is not what its field takes; the message goes behind the field's place and name."""


def _job(
    layers: list[Fields],
    overrides: Mapping[str, str],
    folder: Path,
    place: Place,
    mistakes: list[Mistake],
    script_must_exist: bool = True,
) -> Job:
    given = [*layers, *(_override(name, text) for name, text in overrides.items())]
    for layer in given:
        # Each by itself, so that a mistake is reported even where an upper layer hides it.
        _check_keys(layer, _READERS, mistakes)
        _read(layer, _READERS, mistakes)
    fields = _merged(given)
    values = _read(fields, _READERS, mistakes)
    _resolve_program(values, fields, folder, place, mistakes, script_must_exist)
    _check_device(values, fields, mistakes)
    raise_mistakes(mistakes)
    return Job(**values)


def _read(fields: Fields, readers: Mapping[str, Reader], mistakes: list[Mistake], prefix: str = "") -> dict[str, Any]:
    """The dataclass values of all fields that are given, known and right; a null leaves the built-in default."""
    values: dict[str, Any] = {}
    for key, node in fields.items():
        if key not in readers or node.value is None:
            continue
        try:
            values |= readers[key](node, mistakes)
        except _Wrong as wrong:
            named = "" if node.place.source.startswith("--set ") else f"{prefix}{key}: "
            mistakes.append(Mistake(node.place, f"{named}{wrong}"))
    return values


def _check_keys(fields: Fields, known: Iterable[str], mistakes: list[Mistake], prefix: str = "") -> None:
    names = list(known)
    for key in fields:
        if key not in names:
            mistakes.append(Mistake(key.place, f"unknown key {prefix + key!r}{_hint(key, names)}"))


def _hint(word: str, known: list[str]) -> str:
    """What to write for an unknown key: what an option of sbatch is called here, or the nearest name."""
    instead = _INSTEAD_OF_KEY.get(word.replace("-", "_")) if "nodes" in known else None
    if instead:
        return f"; {instead}"
    return _did_you_mean(word, known) or f"; the keys are {', '.join(known)}"


def _did_you_mean(word: str, known: Iterable[str]) -> str:
    names, spelt = list(known), word.lower().replace("-", "_")
    near = [name for name in names if name == spelt] or difflib.get_close_matches(spelt, names, 1)
    near = near or [name for name in names if len(spelt) > 2 and name.startswith(spelt)]
    return f"; did you mean {near[0]!r}?" if near else ""


def _resolve_program(
    values: dict[str, Any], fields: Fields, folder: Path, place: Place, mistakes: list[Mistake], must_exist: bool
) -> None:
    """Makes the script's path absolute and names the job after what it runs."""
    script, module = (_given_node(fields, name) for name in ("script", "module"))
    if script and module:
        mistakes.append(Mistake(module.place, "module: a job runs a script or a module, not both"))
    if not script and not module:
        mistakes.append(Mistake(place, "names neither a script nor a module: one of them is needed"))
    if script and "script" in values:
        given = values["script"]
        values["script"] = os.path.normpath((folder / given).absolute())
        if must_exist and not Path(values["script"]).is_file():
            where = "" if Path(given).is_absolute() else f" in {folder.absolute()}"
            mistakes.append(Mistake(script.place, f"script {given!r} not found{where}{_nearest_file(given, folder)}"))
    program = Path(values.get("script", "")).stem or values.get("module", "").rpartition(".")[2]
    values.setdefault("name", re.sub(r"[^\w.+=@-]+", "-", program).lstrip(".-") or "job")


def _given_node(fields: Fields, name: str) -> Node | None:
    node = _get(fields, name)
    return node if node is not None and node.value is not None else None


def _nearest_file(script: str, folder: Path) -> str:
    path = folder / script
    names = [entry.name for entry in path.parent.iterdir() if entry.is_file()] if path.parent.is_dir() else []
    near = difflib.get_close_matches(path.name, names, 1)
    return f"; did you mean {str(Path(script).with_name(near[0]))!r}?" if near else ""


def _check_device(values: dict[str, Any], fields: Fields, mistakes: list[Mistake]) -> None:
    if values.get("device") != "cpu":
        return
    for name, wrong in (("backend", values.get("backend") == "nccl"), ("gpus_per_node", values.get("gpu_type"))):
        node = _get(fields, name)
        if wrong and node is not None:
            mistakes.append(Mistake(node.place, f"{name}: {node.text!r} needs a GPU, but device is cpu"))


# --- readers of single values: from a node to a value, or _Wrong


def _given(node: Node) -> str:
    """A value as a message quotes it."""
    if isinstance(node.value, (dict, list)):
        return "a mapping" if isinstance(node.value, dict) else "a list"
    return repr(node.text) if node.text or node.value is not None else "nothing"


def _text(node: Node) -> str:
    """Any text but none, on one line, whatever YAML takes it for."""
    if isinstance(node.value, (dict, list)):
        raise _Wrong(f"expected text, got {_given(node)}; quote it if it is meant as text")
    if not node.text:
        raise _Wrong("expected text, got nothing")
    return _printable(node.text)


def _printable(text: str) -> str:
    """Refuses what would end a line of the batch script: the rest would be read as options or commands."""
    for character in text:
        if not character.isprintable():
            raise _Wrong(f"line breaks and control characters are not allowed here, got U+{ord(character):04X}")
    return text


def _word(node: Node) -> str:
    """Text that is one word on an #SBATCH line, where blanks and quotes would make it several."""
    text = _text(node)
    if re.search(r"[\s\"'\\]", text):
        raise _Wrong(f"expected one word without blanks, quotes and backslashes, got {text!r}")
    return text


def _matching(pattern: str, expected: str) -> Callable[[Node], str]:
    def read(node: Node) -> str:
        text = _text(node)
        if not re.fullmatch(pattern, text):
            raise _Wrong(f"expected {expected}, got {text!r}")
        return text

    return read


def _choice(*choices: str) -> Callable[[Node], str]:
    def read(node: Node) -> str:
        if node.text not in choices:
            raise _Wrong(f"expected {' or '.join(choices)}, got {_given(node)}{_did_you_mean(node.text, choices)}")
        return node.text

    return read


def _whole(least: int) -> Callable[[Node], int]:
    def read(node: Node) -> int:
        if isinstance(node.value, bool) or not isinstance(node.value, int) or node.value < least:
            raise _Wrong(f"expected a whole number, at least {least}, got {_given(node)}")
        return node.value

    return read


def _positive(unit: str) -> Callable[[Node], float]:
    def read(node: Node) -> float:
        value = node.value
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < float("inf"):
            raise _Wrong(f"expected a positive number of {unit}, got {_given(node)}")
        return float(value)

    return read


def _truth(node: Node) -> bool:
    if not isinstance(node.value, bool):
        raise _Wrong(f"expected true or false, got {_given(node)}")
    return node.value


def _argument(node: Node) -> str:
    if isinstance(node.value, (dict, list)) or (node.value is None and not node.text):
        raise _Wrong(f"expected a list of single values, got {_given(node)} in it; quote what is meant as text")
    if "\0" in node.text:
        raise _Wrong("an argument cannot contain U+0000")
    return node.text


def _arguments(node: Node) -> tuple[str, ...]:
    if not isinstance(node.value, list):
        raise _Wrong(f"expected a list such as [--lr, 1e-3], got {_given(node)}")
    return tuple(_argument(item) for item in node.value)


def _shell_lines(node: Node) -> tuple[str, ...]:
    """A list of lines, or one block of text; a line break inside an item makes two lines."""
    texts = [_argument(item) for item in node.value] if isinstance(node.value, list) else [_block(node)]
    lines = [line for text in texts for line in text.removesuffix("\n").split("\n")]
    for line in lines:
        if any(unicodedata.category(character) == "Cc" and character != "\t" for character in line):
            raise _Wrong(f"control characters are not allowed in shell lines, got {line!r}")
    return tuple(lines)


def _block(node: Node) -> str:
    if isinstance(node.value, dict) or not node.text:
        raise _Wrong(f"expected a list of shell lines, got {_given(node)}")
    return node.text


def _time(node: Node) -> int:
    """Slurm's time formats, in seconds."""
    match = _TIME.fullmatch(node.text)
    if not match:
        raise _Wrong(
            f"expected minutes, M:S, H:M:S, D-H, D-H:M or D-H:M:S, such as 30, 1:30:00 or 2-12, got {_given(node)}"
        )
    days, first, second, third = (None if part is None else int(part) for part in match.groups())
    if days is not None or third is not None:
        hours, minutes, seconds = first, second, third
    else:
        hours, minutes, seconds = 0, first, second
    total = (((days or 0) * 24 + (hours or 0)) * 60 + (minutes or 0)) * 60 + (seconds or 0)
    if total <= 0:
        raise _Wrong("expected a time limit above 0; leave it out for the partition's own")
    return total


_TIME = re.compile(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", re.ASCII)


# --- readers of fields: from a node to dataclass values


def _field(name: str, read: Callable[[Node], Any]) -> Reader:
    return lambda node, _: {name: read(node)}


def _section(name: str, make: Callable[..., Any], readers: Mapping[str, Reader]) -> Reader:
    """A mapping with keys of its own, read into its own dataclass."""

    def read(node: Node, mistakes: list[Mistake]) -> dict[str, Any]:
        if not isinstance(node.value, dict):
            raise _Wrong(f"expected a mapping with {', '.join(readers)}, got {_given(node)}")
        _check_keys(node.value, readers, mistakes, f"{name}.")
        return {name: make(**_read(node.value, readers, mistakes, f"{name}."))}

    return read


def _table(name: str, check_key: Callable[[str, Node], None], read_value: Callable[[Node], Any]) -> Reader:
    """A mapping with keys of the user's choice, read into a dict."""

    def read(node: Node, mistakes: list[Mistake]) -> dict[str, Any]:
        if not isinstance(node.value, dict):
            raise _Wrong(f"expected a mapping of names to values, got {_given(node)}")
        table = {}
        for key, item in node.value.items():
            try:
                check_key(key, item)
                table[str(key)] = read_value(item)
            except _Wrong as wrong:
                mistakes.append(Mistake(key.place, f"{name}.{key}: {wrong}"))
        return {name: table}

    return read


def _gpus_per_node(node: Node, _: list[Mistake]) -> dict[str, Any]:
    match = re.fullmatch(r"(?:([A-Za-z0-9][\w.-]*):)?([1-9][0-9]*)", node.text, re.ASCII)
    if not match:
        instead = "; for ranks without GPUs write device: cpu and their number here" if node.text == "0" else ""
        raise _Wrong(f"expected a number of at least 1, or TYPE:NUMBER such as a100:4, got {_given(node)}{instead}")
    return {"gpu_type": match[1], "gpus_per_node": int(match[2])}


def _every(node: Node, _: list[Mistake]) -> dict[str, Any]:
    """``500 steps``, ``5 minutes``, a list of one of each, or ``never``: what is not named triggers nothing."""
    values: dict[str, Any] = {"every_steps": None, "every_s": None}
    for item in node.value if isinstance(node.value, list) and node.value else [node]:
        if item is node and node.text == "never":
            return values
        match = re.fullmatch(r"([0-9][0-9.e+-]*) (steps?|seconds?|minutes?|hours?)", item.text, re.ASCII)
        number = yaml12.scalar(match[1]) if match else None
        name = "every_steps" if match and match[2].startswith("step") else "every_s"
        wanted = int if name == "every_steps" else (int, float)
        if not match or not isinstance(number, wanted) or not 0 < number < float("inf") or values[name] is not None:
            raise _Wrong(f"expected 500 steps, 5 minutes, a list of one of each, or never, got {_given(item)}")
        values[name] = number if name == "every_steps" else float(number) * _UNIT_SECONDS[match[2].rstrip("s")]
    return values


_UNIT_SECONDS = {"second": 1, "minute": 60, "hour": 3600}


def _check_variable(name: str, _: Node) -> None:
    if not re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII):
        raise _Wrong("this is no name of an environment variable: letters, digits and _ only")
    if name in _SET_FOR_RANKS:
        raise _Wrong("this variable is set for each rank and cannot be chosen")


_SET_FOR_RANKS = {
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "CLUSTERDDP_RUN_DIR"),
    *("CLUSTERDDP_ATTEMPT", "CLUSTERDDP_SUPERVISOR", "CLUSTERDDP_TOKEN", "CLUSTERDDP_LAUNCHER"),
}


def _variable(node: Node) -> str:
    if isinstance(node.value, (dict, list)) or "\0" in node.text:
        raise _Wrong(f"expected text without U+0000, got {_given(node)}")
    return node.text


def _check_option(name: str, node: Node) -> None:
    if name.startswith("-"):
        raise _Wrong("write the option without leading dashes")
    if not re.fullmatch(r"[a-z][a-z0-9-]*", name):
        raise _Wrong("expected a long option of sbatch: small letters, digits and dashes")
    if name in _INSTEAD_OF_OPTION:
        raise _Wrong(f"this option has no place here: {_INSTEAD_OF_OPTION[name]}")
    if name in ("gres", "tres-per-task", "tres-per-node") and "gpu" in node.text:
        raise _Wrong(f"clusterddp asks for GPUs itself: {_GPUS}")


def _option(node: Node) -> str | bool:
    return node.value if isinstance(node.value, bool) else _text(node)


_GPUS = "use the field gpus_per_node"
_STOPS = "stopping and requeueing are clusterddp's work; timeouts.notice_s says how early a run is told"
_LOGS = "outputs are in the run directory's logs"
_SUBMITS = "submit reads sbatch's answer"

#: Options of sbatch that clusterddp sets or relies on, and what to use instead.
_INSTEAD_OF_OPTION = {
    **{
        name: f"use the field {name.replace('-', '_')}"
        for name in (
            *("nodes", "job-name", "time", "partition", "account", "qos", "constraint", "reservation", "exclude"),
            *("nodelist", "mem", "cpus-per-task", "gpus-per-node"),
        )
    },
    "nodefile": "use the field nodelist",
    "array": "a run is one job; submit each run by itself",
    **dict.fromkeys(
        ("ntasks", "ntasks-per-node", "tasks-per-node", "ntasks-per-gpu"), "use gpus_per_node: one rank each"
    ),
    **dict.fromkeys(("gpus", "gpus-per-socket"), _GPUS),
    **dict.fromkeys(("gpus-per-task", "gpu-bind"), "one visible GPU per rank breaks NCCL; use the field gpus_per_node"),
    **dict.fromkeys(("requeue", "no-requeue", "signal"), _STOPS),
    **dict.fromkeys(("output", "error", "open-mode", "input"), _LOGS),
    **dict.fromkeys(("parsable", "quiet", "test-only", "wait", "wrap", "help", "usage", "version"), _SUBMITS),
}
#: The same for top-level keys: people try sbatch's names there.
_INSTEAD_OF_KEY = {
    **{
        name.replace("-", "_"): reason
        for name, reason in _INSTEAD_OF_OPTION.items()
        if not reason.startswith("use the field")
    },
    "gpu_type": "write gpus_per_node: TYPE:NUMBER",
    "gpus": _GPUS,
}

_READERS: dict[str, Reader] = {
    "job_name": _field("name", _matching(r"[\w+=@][\w.+=@-]*", "a name of letters, digits and any of _.+=@-")),
    "script": _field("script", _text),
    "module": _field("module", _matching(r"[^\W\d]\w*(\.[^\W\d]\w*)*", "a module's dotted name")),
    "args": _field("args", _arguments),
    "args_on_resume": _field("args_on_resume", _arguments),
    "nodes": _field("nodes", _whole(1)),
    "gpus_per_node": _gpus_per_node,
    "device": _field("device", _choice("cuda", "cpu")),
    "time": _field("time_s", _time),
    **{
        name: _field(name, _word)
        for name in ("partition", "account", "qos", "constraint", "reservation", "exclude", "nodelist")
    },
    "mem": _field("mem", _matching(r"[0-9]+([KMGTkmgt][Bb]?)?", "memory with a unit, such as 64G")),
    "cpus_per_task": _field("cpus_per_task", _whole(1)),
    "setup": _field("setup", _shell_lines),
    "env": _table("env", _check_variable, _variable),
    "python": _field("python", _text),
    "sbatch": _table("sbatch", _check_option, _option),
    "steps": _field("steps", _whole(1)),
    "seed": _field("seed", _whole(0)),
    "checkpoint": _section("checkpoint", Checkpointing, {"every": _every, "keep": _field("keep", _whole(1))}),
    "timeouts": _section(
        "timeouts", Timeouts, {name: _field(name, _positive("seconds")) for name in ("start_s", "step_s", "notice_s")}
    ),
    "limits": _section(
        "limits",
        Limits,
        {"attempts": _field("attempts", _whole(1)), "gpu_hours": _field("gpu_hours", _positive("hours"))},
    ),
    "policy": _field("policy", _choice("requeue", "resubmit")),
    "lift_hold": _field("lift_hold", _truth),
    "backend": _field("backend", _choice("nccl", "gloo")),
    "share": _field("share", _choice("private", "group")),
}
#: What makes a job this job has no default for all of a user's jobs.
_OF_ONE_JOB = {"job_name", "script", "module", "args", "args_on_resume", "steps"}


# --- from a job to text


def _written(job: Job) -> dict[str, Any]:
    """A job's values by YAML key, in the order of the fields."""
    values = {item.name: getattr(job, item.name) for item in dataclasses.fields(job)}
    renamed = {"name": "job_name", "time_s": "time"}
    values["time_s"] = job.time_text
    values["gpus_per_node"] = f"{job.gpu_type}:{job.gpus_per_node}" if job.gpu_type else job.gpus_per_node
    values["checkpoint"] = {"every": _every_text(job.checkpoint), "keep": job.checkpoint.keep}
    values["timeouts"] = dataclasses.asdict(job.timeouts)
    values["limits"] = {name: value for name, value in dataclasses.asdict(job.limits).items() if value is not None}
    return {renamed.get(name, name): value for name, value in values.items() if name != "gpu_type"}


class _Dumper(yaml.SafeDumper):
    """Escapes what is not printable: PyYAML would fold U+0085 into a blank."""


_Dumper.add_representer(
    str,
    lambda dumper, text: dumper.represent_scalar(
        "tag:yaml.org,2002:str", text, style=None if text.isprintable() else '"'
    ),
)


def _every_text(checkpoint: Checkpointing) -> str | tuple[str, ...]:
    texts = []
    if checkpoint.every_steps is not None:
        texts.append(_counted(checkpoint.every_steps, "step"))
    if checkpoint.every_s is not None:
        texts.append(f"{repr(checkpoint.every_s).removesuffix('.0')} seconds")
    return tuple(texts) if len(texts) == 2 else (texts or ["never"])[0]


def _plain(value: Any) -> Any:
    """With lists for tuples, which YAML does not have."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return list(value) if isinstance(value, tuple) else value


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested values under dotted keys."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return flat


def _shown(value: Any) -> str:
    if value is None or value == ():
        return "none"
    text = shlex.join(value) if isinstance(value, tuple) else str(value)
    return text if text and text.isprintable() else repr(text)


def _counted(number: int, one: str, many: str | None = None) -> str:
    return f"{number} {one if number == 1 else many or one + 's'}"
