"""What each key of a job definition takes: from the nodes of its YAML to the values of ``Job``."""

from __future__ import annotations

import difflib
import re
import unicodedata
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from clusterddp import yaml12
from clusterddp.job import Checkpointing, Keep, Limits, Timeouts, Watchdog
from clusterddp.masking import is_secret
from clusterddp.yaml12 import Key, Mistake, Node

#: Fields as they were written, by their YAML key.
Fields = dict[Key, Node]
#: Reads a field's node into values of the dataclass; raises _Wrong, or notes mistakes with a place further inside.
Reader = Callable[[Node, list[Mistake]], dict[str, Any]]


class _Wrong(Exception):
    """A value is not what its field takes; the message goes behind the field's place and name."""


def read_fields(
    fields: Fields, readers: Mapping[str, Reader], mistakes: list[Mistake], prefix: str = ""
) -> dict[str, Any]:
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


def check_keys(fields: Fields, known: Iterable[str], mistakes: list[Mistake], prefix: str = "") -> None:
    """Notes a mistake for each key that is not a known one."""
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


# --- readers of single values: from a node to a value, or _Wrong


def quoted(node: Node) -> str:
    """A value as a message quotes it."""
    if isinstance(node.value, (dict, list)):
        return "a mapping" if isinstance(node.value, dict) else "a list"
    return repr(node.text) if node.text or node.value is not None else "nothing"


def _text(node: Node) -> str:
    """Any text but none, on one line, whatever YAML takes it for."""
    if isinstance(node.value, (dict, list)):
        raise _Wrong(f"expected text, got {quoted(node)}; quote it if it is meant as text")
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


def _name(node: Node) -> str:
    """A job's name, which its run directory has, too."""
    text = _matching(r"[\w+=@][\w.+=@-]*", "a name of letters, digits and any of _.+=@-")(node)
    if len(text.encode()) > 200:
        raise _Wrong(f"expected at most 200 bytes, got {len(text.encode())}: a folder is named after it")
    return text


def _choice(*choices: str) -> Callable[[Node], str]:
    def read(node: Node) -> str:
        if node.text not in choices:
            raise _Wrong(f"expected {' or '.join(choices)}, got {quoted(node)}{_did_you_mean(node.text, choices)}")
        return node.text

    return read


def _backend(node: Node) -> str:
    if node.text == "mpi":
        raise _Wrong(
            "expected nccl or gloo, got 'mpi': MPI ranks are mpirun's: give that a script that says backend='mpi'"
        )
    return _choice("nccl", "gloo")(node)


def _whole(least: int) -> Callable[[Node], int]:
    def read(node: Node) -> int:
        if isinstance(node.value, bool) or not isinstance(node.value, int) or node.value < least:
            raise _Wrong(f"expected a whole number, at least {least}, got {quoted(node)}")
        return node.value

    return read


def _positive(unit: str) -> Callable[[Node], float]:
    def read(node: Node) -> float:
        value = node.value
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < float("inf"):
            raise _Wrong(f"expected a positive number of {unit}, got {quoted(node)}")
        return float(value)

    return read


def _truth(node: Node) -> bool:
    if not isinstance(node.value, bool):
        raise _Wrong(f"expected true or false, got {quoted(node)}")
    return node.value


def _argument(node: Node) -> str:
    if isinstance(node.value, (dict, list)) or (node.value is None and not node.text):
        raise _Wrong(f"expected a list of single values, got {quoted(node)} in it; quote what is meant as text")
    if "\0" in node.text:
        raise _Wrong("an argument cannot contain U+0000")
    return node.text


def _arguments(node: Node) -> tuple[str, ...]:
    if not isinstance(node.value, list):
        raise _Wrong(f"expected a list such as [--lr, 1e-3], got {quoted(node)}")
    return tuple(_argument(item) for item in node.value)


def _shell_lines(node: Node) -> tuple[str, ...]:
    """A list of lines, or one block of text; a line break inside an item makes two lines."""
    texts = [_argument(item) for item in node.value] if isinstance(node.value, list) else [_block(node)]
    lines = [line for text in texts for line in text.removesuffix("\n").split("\n")]
    for line in lines:
        if any(unicodedata.category(character) == "Cc" and character != "\t" for character in line):
            raise _Wrong(f"control characters are not allowed in shell lines, got {line!r}")
        for name in _ASSIGNMENT.findall(line):
            if is_secret(name):
                raise _Wrong(
                    f"{name} would be in the batch script, which Slurm keeps; write it under env:, or read it from a "
                    f"file of yours: export {name}=$(cat FILE)"
                )
    return tuple(lines)


#: A variable that is given a value which stands there.
_ASSIGNMENT = re.compile(r"""(?:^|[\s;&|(])(\w+)=["']?[^\s"'$`;]""")


def _block(node: Node) -> str:
    if isinstance(node.value, dict) or not node.text:
        raise _Wrong(f"expected a list of shell lines, got {quoted(node)}")
    return node.text


def _time(node: Node) -> int:
    """Slurm's time formats, in seconds."""
    match = _TIME.fullmatch(node.text)
    if not match:
        raise _Wrong(
            f"expected minutes, M:S, H:M:S, D-H, D-H:M or D-H:M:S, such as 30, 1:30:00 or 2-12, got {quoted(node)}"
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


_TIME = re.compile(r"(?:(\d{1,9})-)?(\d{1,9})(?::(\d{1,9}))?(?::(\d{1,9}))?", re.ASCII)


# --- readers of fields: from a node to dataclass values


def _field(name: str, read: Callable[[Node], Any]) -> Reader:
    return lambda node, _: {name: read(node)}


def _section(name: str, make: Callable[..., Any], readers: Mapping[str, Reader]) -> Reader:
    """A mapping with keys of its own, read into its own dataclass."""

    def read(node: Node, mistakes: list[Mistake]) -> dict[str, Any]:
        if not isinstance(node.value, dict):
            raise _Wrong(f"expected a mapping with {', '.join(readers)}, got {quoted(node)}")
        check_keys(node.value, readers, mistakes, f"{name}.")
        return {name: make(**read_fields(node.value, readers, mistakes, f"{name}."))}

    return read


def _table(name: str, check_key: Callable[[str, Node], None], read_value: Callable[[Node], Any]) -> Reader:
    """A mapping with keys of the user's choice, read into a dict."""

    def read(node: Node, mistakes: list[Mistake]) -> dict[str, Any]:
        if not isinstance(node.value, dict):
            raise _Wrong(f"expected a mapping of names to values, got {quoted(node)}")
        table = {}
        for key, item in node.value.items():
            try:
                check_key(key, item)
                table[str(key)] = read_value(item)
            except _Wrong as wrong:
                mistakes.append(Mistake(key.place, f"{name}.{key}: {wrong}"))
        return {name: table}

    return read


def _nodes(node: Node, _: list[Mistake]) -> dict[str, Any]:
    """A number, or Slurm's notation for a range."""
    match = re.fullmatch(r"([1-9][0-9]{0,5})-([1-9][0-9]{0,5})", node.text, re.ASCII)
    if match and int(match[1]) <= int(match[2]) <= _MOST_NODES:
        least, most = int(match[1]), int(match[2])
        return {"nodes": most, "min_nodes": least if least < most else None}
    if isinstance(node.value, bool) or not isinstance(node.value, int) or not 1 <= node.value <= _MOST_NODES:
        raise _Wrong(f"expected a whole number, 1 to {_MOST_NODES}, or a range such as 2-4, got {quoted(node)}")
    return {"nodes": node.value, "min_nodes": None}


_MOST_NODES = 65536


def _gpus_per_node(node: Node, _: list[Mistake]) -> dict[str, Any]:
    match = re.fullmatch(r"(?:([A-Za-z0-9][\w.-]*):)?([1-9][0-9]{0,5})", node.text, re.ASCII)
    if not match:
        instead = "; for ranks without GPUs write device: cpu and their number here" if node.text == "0" else ""
        raise _Wrong(f"expected a number of at least 1, or TYPE:NUMBER such as a100:4, got {quoted(node)}{instead}")
    return {"gpu_type": match[1], "gpus_per_node": int(match[2])}


def _every(node: Node, _: list[Mistake]) -> dict[str, Any]:
    """``500 steps``, ``5 minutes``, a list of one of each, ``auto``, ``never``; what is not named triggers nothing."""
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
            raise _Wrong(f"expected 500 steps, 5 minutes, a list of one of each, auto or never, got {quoted(item)}")
        values[name] = number if name == "every_steps" else float(number) * _UNIT_SECONDS[match[2].rstrip("s")]
    return values


def _keep(node: Node, mistakes: list[Mistake]) -> dict[str, Any]:
    """The number of the newest ones, or a mapping."""
    if isinstance(node.value, dict):
        check_keys(node.value, _KEEP, mistakes, "checkpoint.keep.")
        return {"keep": Keep(**read_fields(node.value, _KEEP, mistakes, "checkpoint.keep."))}
    if isinstance(node.value, bool) or not isinstance(node.value, int) or node.value < 1:
        raise _Wrong(
            f"expected a whole number, at least 1, or {{last: 3, every: 5000, best: f1 max}}, got {quoted(node)}"
        )
    return {"keep": Keep(node.value)}


def _best(node: Node, _: list[Mistake]) -> dict[str, Any]:
    match = re.fullmatch(r"(\S+) (max|min)", node.text)
    if not match:
        raise _Wrong(f"expected a metric's name and max or min, such as f1 max, got {quoted(node)}")
    return {"best": match[1], "best_is": match[2]}


def _watchdog(node: Node, mistakes: list[Mistake]) -> dict[str, Any]:
    """A mapping, or off."""
    if isinstance(node.value, dict):
        return _section("watchdog", Watchdog, _WATCHDOG)(node, mistakes)
    if node.text != "off":
        raise _Wrong(f"expected off or a mapping with {', '.join(_WATCHDOG)}, got {quoted(node)}")
    return {"watchdog": None}


_WATCHDOG: dict[str, Reader] = {
    **{name: _field(name, _positive("seconds")) for name in ("step_s", "start_s")},
    "on_hang": _field("on_hang", _choice("restart", "end")),
}

_KEEP: dict[str, Reader] = {
    "last": _field("last", _whole(1)),
    "every": _field("every", _whole(1)),
    "best": _best,
}

_UNIT_SECONDS = {"second": 1, "minute": 60, "hour": 3600}


def _check_variable(name: str, _: Node) -> None:
    if not re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII):
        raise _Wrong("this is no name of an environment variable: letters, digits and _ only")
    if name in _SET_FOR_RANKS:
        raise _Wrong("this variable is set for each rank and cannot be chosen")


_SET_FOR_RANKS = {
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "CLUSTERDDP_RUN_DIR"),
    *("CLUSTERDDP_ATTEMPT", "CLUSTERDDP_SUPERVISOR", "CLUSTERDDP_TOKEN", "CLUSTERDDP_LAUNCHER"),
    "CLUSTERDDP_WATCHDOG",
}


def _variable(node: Node) -> str:
    if isinstance(node.value, (dict, list)) or "\0" in node.text:
        raise _Wrong(f"expected text without U+0000, got {quoted(node)}")
    return node.text


def _check_option(name: str, node: Node) -> None:
    if name.startswith("-"):
        raise _Wrong("write the option without leading dashes")
    if not re.fullmatch(r"[a-z][a-z0-9-]*", name):
        raise _Wrong("expected a long option of Slurm: small letters, digits and dashes")
    if name in _INSTEAD_OF_OPTION:
        raise _Wrong(f"this option has no place here: {_INSTEAD_OF_OPTION[name]}")
    if name == "export" and (
        secret := next((word for word in _ASSIGNMENT.findall(node.text.replace(",", " ")) if is_secret(word)), None)
    ):
        raise _Wrong(f"{secret} would be in the batch script, which Slurm keeps; write it under env:")
    if name in ("gres", "tres-per-task", "tres-per-node") and "gpu" in node.text:
        raise _Wrong(f"clusterddp asks for GPUs itself: {_GPUS}")


def _check_srun_option(name: str, node: Node) -> None:
    if name in ("kill-on-bad-exit", "unbuffered"):
        raise _Wrong("clusterddp sets this option itself")
    _check_option(name, node)


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
        ("ntasks", "ntasks-per-node", "tasks-per-node", "ntasks-per-gpu"), "use gpus_per_node, gpus_per_rank"
    ),
    **dict.fromkeys(("gpus", "gpus-per-socket"), _GPUS),
    **dict.fromkeys(("gpus-per-task", "gpu-bind"), "it breaks NCCL's peer access; use gpus_per_node, gpus_per_rank"),
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

READERS: dict[str, Reader] = {
    "job_name": _field("name", _name),
    "script": _field("script", _text),
    "module": _field("module", _matching(r"[^\W\d]\w*(\.[^\W\d]\w*)*", "a module's dotted name")),
    "args": _field("args", _arguments),
    "args_on_resume": _field("args_on_resume", _arguments),
    "nodes": _nodes,
    "gpus_per_node": _gpus_per_node,
    "gpus_per_rank": _field("gpus_per_rank", _whole(1)),
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
    "python": _field("python", _matching(r"[^-].*", "an interpreter's path or name")),
    "sbatch": _table("sbatch", _check_option, _option),
    "srun": _table("srun", _check_srun_option, _option),
    "steps": _field("steps", _whole(1)),
    "seed": _field("seed", _whole(0)),
    "global_batch": _field("global_batch", _whole(1)),
    "checkpoint": _section("checkpoint", Checkpointing, {"every": _every, "keep": _keep}),
    "timeouts": _section(
        "timeouts", Timeouts, {name: _field(name, _positive("seconds")) for name in ("start_s", "step_s", "notice_s")}
    ),
    "watchdog": _watchdog,
    "limits": _section(
        "limits",
        Limits,
        {"attempts": _field("attempts", _whole(1)), "gpu_hours": _field("gpu_hours", _positive("hours"))},
    ),
    "policy": _field("policy", _choice("requeue", "resubmit")),
    "lift_hold": _field("lift_hold", _truth),
    "backend": _field("backend", _backend),
    "share": _field("share", _choice("private", "group")),
}
