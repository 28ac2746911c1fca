"""The keys of a job definition: for each one, a reader from its YAML node to values of ``Job``."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from clusterddp.errors import JobDefinitionError
from clusterddp.jobdef import readers as value
from clusterddp.jobdef import yaml12
from clusterddp.jobdef.job import (
    Checkpointing,
    Done,
    Keep,
    Limits,
    Mlflow,
    Resume,
    StopSignal,
    Timeouts,
    Wandb,
    Watchdog,
)
from clusterddp.jobdef.readers import ASSIGNMENT, Wrong, did_you_mean
from clusterddp.jobdef.secrets import is_secret
from clusterddp.jobdef.yaml12 import Key, Mistake, Node, raise_mistakes
from clusterddp.protocol import FOR_RANKS
from clusterddp.rundir.files import read_text
from clusterddp.rundir.records import retrying

#: Nodes by YAML key, as written.
Fields = dict[Key, Node]
#: Reads a key's node into values of the dataclass. Raises Wrong, or appends mistakes whose place is further inside.
Reader = Callable[[Node, list[Mistake]], dict[str, Any]]


def read_fields(
    fields: Fields, readers: Mapping[str, Reader], mistakes: list[Mistake], prefix: str = ""
) -> dict[str, Any]:
    """Reads all keys into dataclass values, and appends a mistake for each that is unknown or has a wrong value.

    A null leaves the built-in default. ``prefix``: the section's key and a dot, for messages.
    """
    check_keys(fields, readers, mistakes, prefix)
    values: dict[str, Any] = {}
    for key, node in fields.items():
        if key not in readers or node.value is None:
            continue
        try:
            values |= readers[key](node, mistakes)
        except Wrong as wrong:
            named = "" if node.place.source.startswith("--set ") else f"{prefix}{key}: "
            mistakes.append(Mistake(node.place, f"{named}{wrong}"))
    return values


def check_keys(fields: Fields, known: Iterable[str], mistakes: list[Mistake], prefix: str = "") -> None:
    """Appends a mistake for each unknown key, with the key for an sbatch option or the most similar one."""
    names = list(known)
    for key in fields:
        if key not in names:
            instead = INSTEAD_OF_KEY.get(key.replace("-", "_")) if "nodes" in names else None
            hint = f": {instead}" if instead else did_you_mean(key, names) or f". Valid keys: {', '.join(names)}"
            mistakes.append(Mistake(key.place, f"unknown key {prefix + key!r}{hint}"))


# --- readers (those of single values are in readers.py)


def _field(name: str, read: Callable[[Node], Any]) -> Reader:
    return lambda node, _: {name: read(node)}


def _fields(**readers: Callable[[Node], Any]) -> dict[str, Reader]:
    """Keys with the names of their fields."""
    return {name: _field(name, read) for name, read in readers.items()}


def _section(name: str, make: Callable[..., Any], readers: Mapping[str, Reader], example: str = "") -> Reader:
    """A mapping with fixed keys, read into a dataclass."""
    expected = f"a mapping such as {example}" if example else f"a mapping with the keys {', '.join(readers)}"

    def read(node: Node, mistakes: list[Mistake]) -> dict[str, Any]:
        if not isinstance(node.value, dict):
            raise Wrong(f"expected {expected}, got {node.quoted}")
        return {name: make(**read_fields(node.value, readers, mistakes, f"{name}."))}

    return read


def _table(name: str, check_key: Callable[[str, Node], None], read_value: Callable[[Node], Any]) -> Reader:
    """A mapping with keys that the user chooses, read into a dict."""

    def read(node: Node, mistakes: list[Mistake]) -> dict[str, Any]:
        if not isinstance(node.value, dict):
            given = "a list" if isinstance(node.value, list) else "text"  # which may hold a secret
            raise Wrong(f"expected a mapping such as {{NAME: value}}, got {given}")
        table = {}
        for key, item in node.value.items():
            try:
                check_key(key, item)
                table[str(key)] = read_value(item)
            except Wrong as wrong:
                mistakes.append(Mistake(key.place, f"{name}.{key}: {wrong}"))
        return {name: table}

    return read


def _nodes(node: Node, _: list[Mistake]) -> dict[str, Any]:
    """A number, or a range as sbatch takes it."""
    match = re.fullmatch(r"([1-9][0-9]{0,5})-([1-9][0-9]{0,5})", node.text, re.ASCII)
    if match and int(match[1]) <= int(match[2]) <= _MOST_NODES:
        least, most = int(match[1]), int(match[2])
        return {"nodes": most, "min_nodes": least if least < most else None}
    if isinstance(node.value, bool) or not isinstance(node.value, int) or not 1 <= node.value <= _MOST_NODES:
        raise Wrong(f"expected a whole number from 1 to {_MOST_NODES}, or a range such as 2-4, got {node.quoted}")
    return {"nodes": node.value, "min_nodes": None}


_MOST_NODES = 65536


def _gpus_per_node(node: Node, _: list[Mistake]) -> dict[str, Any]:
    match = re.fullmatch(r"(?:([A-Za-z0-9][\w.-]*):)?([1-9][0-9]{0,5})", node.text, re.ASCII)
    if not match:
        instead = ". Without GPUs, write device: cpu and the number of ranks here" if node.text == "0" else ""
        raise Wrong(
            f"expected a whole number of at least 1, or TYPE:NUMBER such as a100:4, got {node.quoted}" + instead
        )
    return {"gpu_type": match[1], "gpus_per_node": int(match[2])}


def _every(node: Node, _: list[Mistake]) -> dict[str, Any]:
    """``500 steps``, ``5 minutes``, ``[500 steps, 5 minutes]``, ``auto`` or ``never``."""
    values: dict[str, Any] = {"every_steps": None, "every_s": None}
    if node.text == "auto":
        return {**values, "auto": True}
    for item in node.value if isinstance(node.value, list) and node.value else [node]:
        if item is node and node.text == "never":
            return values
        match = re.fullmatch(r"([0-9][0-9.e+-]*) (steps?|seconds?|minutes?|hours?)", item.text, re.ASCII)
        number = yaml12.scalar(match[1]) if match else None
        name = "every_steps" if match and match[2].startswith("step") else "every_s"
        wanted = int if name == "every_steps" else (int, float)
        if not match or not isinstance(number, wanted) or not 0 < number < float("inf") or values[name] is not None:
            expected = "an interval such as 500 steps, 5 minutes or [500 steps, 5 minutes], or auto, or never"
            raise Wrong(f"expected {expected}, got {item.quoted}")
        values[name] = number if name == "every_steps" else float(number) * _UNIT_SECONDS[match[2].rstrip("s")]
    return values


def _keep(node: Node, mistakes: list[Mistake]) -> dict[str, Any]:
    """The number of newest checkpoints to keep, or a mapping."""
    if isinstance(node.value, dict):
        return {"keep": Keep(**read_fields(node.value, _KEEP, mistakes, "checkpoint.keep."))}
    if isinstance(node.value, bool) or not isinstance(node.value, int) or node.value < 1:
        raise Wrong(
            f"expected a whole number of at least 1, or {{last: 3, every: 5000, best: f1 max}}, got {node.quoted}"
        )
    return {"keep": Keep(node.value)}


def _best(node: Node, _: list[Mistake]) -> dict[str, Any]:
    match = re.fullmatch(r"([^\s-]\S*) (max|min)", node.text)  # -f1 is for run(best=...)
    if not match:
        raise Wrong(f"expected the name of a metric and max or min, such as f1 max, got {node.quoted}")
    return {"best": match[1], "best_is": match[2]}


def _watchdog(node: Node, mistakes: list[Mistake]) -> dict[str, Any]:
    """``off``, or a mapping."""
    if isinstance(node.value, dict):
        return _section("watchdog", Watchdog, _WATCHDOG)(node, mistakes)
    if node.text != "off":
        raise Wrong(f"expected off, or a mapping with the keys {', '.join(_WATCHDOG)}, got {node.quoted}")
    return {"watchdog": None}


def _steps(node: Node, mistakes: list[Mistake]) -> dict[str, Any]:
    """A number, ``off``, or ``{log: REGEX}``."""
    if isinstance(node.value, dict):
        return read_fields(node.value, {"log": _field("step_log", _step_pattern)}, mistakes, "steps.")
    if node.text == "off":
        return {"see_steps": False}
    if isinstance(node.value, bool) or not isinstance(node.value, int) or node.value < 1:
        raise Wrong(f"expected a whole number of at least 1, off, or {{log: 'iter (\\d+)'}}, got {node.quoted}")
    return {"steps": node.value}


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


def _resume(node: Node, mistakes: list[Mistake]) -> dict[str, Any]:
    """A mapping. The name of a preset was replaced before."""
    if not isinstance(node.value, dict):
        raise Wrong(f"expected a mapping with checkpoint: PATTERN, or the name of a preset, got {node.quoted}")
    return _section("resume", Resume, _RESUME)(node, mistakes)


def _progress_interval(node: Node, _: list[Mistake]) -> dict[str, Any]:
    """``off``, or seconds."""
    return {"progress_interval": None if node.text == "off" else _SECONDS(node)}


def _tracker(
    key: str, make: Callable[..., Any], readers: Mapping[str, Reader], first: Callable[[Node], str], what: str
) -> Reader:
    """``true`` or ``false``, a text for the tracker's first key, or a mapping."""

    def read(node: Node, mistakes: list[Mistake]) -> dict[str, Any]:
        if isinstance(node.value, dict):
            return _section(key, make, readers)(node, mistakes)
        if isinstance(node.value, bool):
            return {key: make() if node.value else None}
        if isinstance(node.value, (int, float)):  # in a mapping, it may be one
            mapping = f"a mapping such as {{{next(iter(readers))}: digits}}"
            raise Wrong(f"expected true, false, {what}, or {mapping}, got {node.quoted}")
        return {key: make(first(node))}

    return read


def _done(node: Node, mistakes: list[Mistake]) -> dict[str, Any]:
    """A file pattern, or ``{log: REGEX}``."""
    if not isinstance(node.value, dict):
        return {"done": Done(file=value.text(node))}
    log = read_fields(node.value, {"log": _field("log", value.regex)}, mistakes, "done.").get("log")
    if log is None and not mistakes:
        raise Wrong("expected a file such as out/epoch_90.pt, or {log: REGEX}, got a mapping without a value for log")
    return {"done": Done(log=log)}


#: What W&B takes as the name of a project.
PROJECT = r"[^/\\#?%:\s][^/\\#?%:]{0,127}"
_PROJECT = value.matching(PROJECT, "a W&B project of at most 128 characters without / \\ # ? % :")
_WANDB = _fields(project=_PROJECT, entity=value.word, group=value.text, mode=value.choice("online", "offline"))
_MLFLOW = _fields(experiment=value.text, tracking_uri=value.word)
_SECONDS = value.positive("seconds")
_RESUME = _fields(checkpoint=value.patterns, args=value.arguments, replace=value.arguments)
_WATCHDOG = _fields(step_s=_SECONDS, start_s=_SECONDS, on_hang=value.choice("restart", "end"))
_KEEP: dict[str, Reader] = {**_fields(last=value.whole(1), every=value.whole(1)), "best": _best}
_UNIT_SECONDS = {"second": 1, "minute": 60, "hour": 3600}


def _check_variable(name: str, _: Node) -> None:
    if not re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII):
        raise Wrong("not a valid variable name. Use letters, digits and _, and do not begin with a digit")
    if name in SET_FOR_RANKS:
        raise Wrong("clusterddp sets this variable for each rank. Remove it")


SET_FOR_RANKS = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", *FOR_RANKS}


def _check_option(name: str, node: Node) -> None:
    if name.startswith("-"):
        raise Wrong(f"write the option without dashes: {name.lstrip('-')}")
    if not re.fullmatch(r"[a-z][a-z0-9-]*", name):
        raise Wrong("expected a long Slurm option with lower-case letters, digits and dashes")
    key = name.replace("-", "_")
    if instead := f"use the key {key}" if key in READERS else INSTEAD_OF_OPTION.get(name):
        raise Wrong(f"not allowed here: {instead}")
    if name == "export" and (
        secret := next((word for word in ASSIGNMENT.findall(node.text.replace(",", " ")) if is_secret(word)), None)
    ):
        raise Wrong(f"{secret} would be stored in the batch script, which Slurm keeps. Set it under env:")
    if name in ("gres", "tres-per-task", "tres-per-node") and "gpu" in node.text:
        raise Wrong("clusterddp requests the GPUs itself. Use the key gpus_per_node")


def _check_step_option(name: str, node: Node) -> None:
    if name == "export" and node.text.partition(",")[0] != "ALL":
        raise Wrong("the ranks need the job's environment. Write ALL,NAME=VALUE, or set variables under env:")
    if name not in ONE_GPU_PER_TASK:
        _check_option(name, node)


_GPUS = "use the key gpus_per_node"
#: Options that bind GPUs to tasks. Sites with AMD GPUs (LUMI, Frontier) document them for srun.
ONE_GPU_PER_TASK = ("gpus-per-task", "gpu-bind")
_STOPS = "clusterddp stops and requeues the run itself. Set the notice before the time limit with `timeouts.notice_s`"
_LOGS = "the outputs are in the run directory, below logs/"
_SUBMITS = "clusterddp parses the output of sbatch. Remove the option"
#: What to use instead of the options of sbatch and srun that clusterddp sets or relies on and that have no key.
INSTEAD_OF_OPTION = {
    "nodefile": "use the key nodelist",
    "array": "use `clusterddp sweep`, which submits many runs as a job array",
    **dict.fromkeys(
        ("ntasks", "ntasks-per-node", "tasks-per-node", "ntasks-per-gpu"), "use gpus_per_node and gpus_per_rank"
    ),
    **dict.fromkeys(("gpus", "gpus-per-socket"), _GPUS),
    **dict.fromkeys(
        ONE_GPU_PER_TASK,
        "use gpus_per_node and gpus_per_rank. If your site requires one visible GPU per task, as with AMD GPUs, set "
        "the option under srun:. With NVIDIA GPUs, it breaks NCCL's peer access",
    ),
    **dict.fromkeys(("requeue", "no-requeue", "signal"), _STOPS),
    **dict.fromkeys(("output", "error", "open-mode", "input"), _LOGS),
    **dict.fromkeys(("kill-on-bad-exit", "unbuffered"), "clusterddp sets this option itself. Remove it"),
    **dict.fromkeys(("parsable", "quiet", "test-only", "wait", "wrap", "help", "usage", "version"), _SUBMITS),
}
#: The same for unknown top-level keys: users try the names of sbatch options there.
INSTEAD_OF_KEY = {
    **{name.replace("-", "_"): reason for name, reason in INSTEAD_OF_OPTION.items()},
    "gpu_type": "write gpus_per_node: TYPE:NUMBER",
    **dict.fromkeys(("grid", "members"), "start a sweep with `clusterddp sweep`"),
    **dict.fromkeys(("time_limit", "walltime"), "use the key time"),
}
WORDS = ("partition", "account", "qos", "constraint", "reservation", "exclude", "nodelist")
READERS: dict[str, Reader] = {
    "job_name": _field("name", value.name),
    **_fields(
        script=value.text,
        module=value.matching(r"[^\W\d]\w*(\.[^\W\d]\w*)*", "a module such as package.train"),
        hydra=value.truth,
        args=value.arguments,
    ),
    "resume": _resume,
    "done": _done,
    "stop": _section("stop", StopSignal, _fields(signal=value.choice("TERM", "INT", "USR1", "USR2")), "{signal: USR1}"),
    "nodes": _nodes,
    "spare_nodes": _field("spare_nodes", value.whole(0)),
    "gpus_per_node": _gpus_per_node,
    **_fields(
        gpus_per_rank=value.whole(1),
        gpu_request=value.choice("gpus-per-node", "gres"),
        device=value.choice("cuda", "cpu"),
    ),
    "time": _field("time_s", value.time),
    **_fields(
        **dict.fromkeys(WORDS, value.word),
        mem=value.matching(r"[0-9]+([KMGTkmgt][Bb]?)?", "memory such as 64G, with a unit and no space"),
        cpus_per_task=value.whole(1),
        snapshot=value.snapshot,
        hook=value.command,
        setup=value.shell_lines,
    ),
    "env": _table("env", _check_variable, value.variable),
    **_fields(python=value.matching(r"[^-].*", "the path or name of a Python interpreter")),
    "sbatch": _table("sbatch", _check_option, value.option),
    "srun": _table("srun", _check_step_option, value.option),
    "steps": _steps,
    **_fields(protect_saves=value.truth, seed=value.whole(0), global_batch=value.whole(1)),
    "checkpoint": _section("checkpoint", Checkpointing, {"every": _every, "keep": _keep}),
    "timeouts": _section(
        "timeouts", Timeouts, _fields(start_s=_SECONDS, step_s=_SECONDS, connect_s=_SECONDS, notice_s=_SECONDS)
    ),
    "watchdog": _watchdog,
    "progress_interval": _progress_interval,
    "limits": _section("limits", Limits, _fields(attempts=value.whole(1), gpu_hours=value.positive("hours"))),
    **_fields(
        policy=value.choice("requeue", "resubmit"),
        expedite_requeue=value.truth,
        lift_hold=value.truth,
        node_memory=value.truth,
        backend=value.backend,
        keep_logs=value.whole(1),
        share=value.choice("private", "group"),
        preflight=value.truth,
    ),
    "tensorboard": _field("tensorboard", value.truth),
    "wandb": _tracker("wandb", Wandb, _WANDB, _PROJECT, "a W&B project"),
    "mlflow": _tracker("mlflow", Mlflow, _MLFLOW, value.text, "an MLflow experiment"),
}

# --- from text to fields


def file_fields(path: Path, mistakes: list[Mistake]) -> Fields:
    """The fields of a YAML file. Raises JobDefinitionError if it cannot be read or is not a mapping."""
    try:
        text = retrying(path, lambda: read_text(path))
    except OSError as error:
        raise JobDefinitionError(f"could not read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise JobDefinitionError(
            f"{path}: expected UTF-8 text, got a different encoding (at byte {error.start})"
        ) from error
    root = yaml12.load(text, str(path), mistakes)
    fields = fields_of(root, mistakes)
    if not isinstance(root.value, (dict, type(None))):
        raise_mistakes(mistakes)  # further errors would only be consequences
    return fields


def fields_of(node: Node | None, mistakes: list[Mistake]) -> Fields:
    """The fields of a mapping. None for a null, such as an empty file."""
    if node is None or node.value is None:
        return {}
    if isinstance(node.value, dict):
        return node.value
    mistakes.append(Mistake(node.place, f"expected 'key: value' lines, got {node.quoted}"))
    return {}


def get(fields: Fields, name: str) -> Node | None:
    """The node of a key, or None."""
    return next((node for key, node in fields.items() if key == name), None)


def merged(layers: Iterable[Fields]) -> Fields:
    """All layers in one. Later ones win. Mappings such as ``checkpoint`` or ``env`` are merged key by key."""
    result: Fields = {}
    for layer in layers:
        for key, node in layer.items():
            below = result.pop(key, None)
            if below is not None and isinstance(below.value, dict) and isinstance(node.value, dict):
                node = dataclasses.replace(node, value=merged([below.value, node.value]))
            result[key] = node  # with the later layer's key, which has its place
    return result
