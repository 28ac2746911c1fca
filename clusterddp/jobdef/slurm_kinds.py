"""The kinds of values that are Slurm's: nodes, GPUs, memory, times, and the other options of sbatch and srun."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence

from clusterddp.jobdef.kinds import ASSIGNMENT
from clusterddp.jobdef.masking import is_secret
from clusterddp.keys.kinds import Schema, Table, Value, Wrong, count_schema, either, matching, read_text, text_schema
from clusterddp.keys.node import Node

# --- resources

_MOST_NODES = 65536


def _nodes(node: Node) -> tuple[int, int | None]:
    """A number, or a range as sbatch takes it: the maximum, and the minimum if it is another one."""
    match = re.fullmatch(r"([1-9][0-9]{0,5})-([1-9][0-9]{0,5})", node.text, re.ASCII)
    if match and int(match[1]) <= int(match[2]) <= _MOST_NODES:
        least, most = int(match[1]), int(match[2])
        return most, least if least < most else None
    if isinstance(node.value, bool) or not isinstance(node.value, int) or not 1 <= node.value <= _MOST_NODES:
        raise Wrong(f"expected a whole number from 1 to {_MOST_NODES}, or a range such as 2-4, got {node.quoted}")
    return node.value, None


NODES = Value(
    _nodes,
    either(count_schema(maximum=_MOST_NODES), {"type": "string", "pattern": "^[1-9][0-9]{0,5}-[1-9][0-9]{0,5}$"}),
    writer=lambda most, least: most if least is None else f"{least}-{most}",
)


def _gpus(node: Node) -> tuple[int, str | None]:
    """The number of GPUs, and their type."""
    match = re.fullmatch(r"(?:([A-Za-z0-9][\w.-]*):)?([1-9][0-9]{0,5})", node.text, re.ASCII)
    if not match:
        instead = ". Without GPUs, write device: cpu and the number of ranks here" if node.text == "0" else ""
        raise Wrong(
            f"expected a whole number of at least 1, or TYPE:NUMBER such as a100:4, got {node.quoted}" + instead
        )
    return int(match[2]), match[1]


GPUS = Value(
    _gpus,
    either(count_schema(maximum=999999), {"type": "string", "pattern": r"^([A-Za-z0-9][\w.-]*:)?[1-9][0-9]{0,5}$"}),
    writer=lambda number, kind: f"{kind}:{number}" if kind else number,
)
MEMORY = matching(
    r"[0-9]+([KMGTkmgt][Bb]?)?|none",
    "memory such as 64G, without a space (a number alone is in megabytes), or none",
    either(count_schema(0), {"type": "string", "pattern": "^([0-9]+([KMGTkmgt][Bb]?)?|none)$"}),
)

_TIME = re.compile(r"(?:(\d{1,9})-)?(\d{1,9})(?::(\d{1,9}))?(?::(\d{1,9}))?", re.ASCII)


def _time(node: Node) -> int:
    """A time in one of Slurm's formats, in seconds."""
    match = _TIME.fullmatch(node.text)
    if not match:
        raise Wrong(
            "expected a time in sbatch's format (minutes, M:S, H:M:S, D-H, D-H:M or D-H:M:S), such as 30, 1:30:00 or "
            f"2-12, got {node.quoted}"
        )
    days, *parts = (int(part or 0) for part in match.groups())
    hours, minutes, seconds = parts if match[1] or match[4] else (0, *parts[:2])  # minutes, or M:S
    total = ((days * 24 + hours) * 60 + minutes) * 60 + seconds
    if total <= 0:
        raise Wrong(
            f"expected a time limit above 0, got {node.quoted}. Without the key, the partition's default applies"
        )
    return total


def time_text(seconds: int | None) -> str | None:
    """A time limit as D-HH:MM:SS, or None."""
    if seconds is None:
        return None
    minutes, seconds = divmod(seconds, 60)
    return f"{minutes // 1440}-{minutes // 60 % 24:02}:{minutes % 60:02}:{seconds:02}"


TIME = Value(
    _time,
    either(count_schema(), {"type": "string", "pattern": r"^([0-9]{1,9}-)?[0-9]{1,9}(:[0-9]{1,9}){0,2}$"}),
    writer=time_text,
)


# --- options of sbatch and srun

_USE_GPUS = "use the key gpus_per_node"
#: Options that bind GPUs to tasks. Sites with AMD GPUs (LUMI, Frontier) document them for srun.
ONE_GPU_PER_TASK = ("gpus-per-task", "gpu-bind")
_STOPS = "clusterddp stops and requeues the run itself. Set the notice before the time limit with `timeouts.notice_s`"
_LOGS = "the outputs are in the run directory, below logs/"
_SUBMITS = "clusterddp parses the output of sbatch. Remove the option"
#: What to use instead of the options of sbatch and srun that clusterddp sets or relies on and that have no key.
INSTEAD_OF_OPTION = {
    "nodefile": "use the key nodelist",
    "array": "use `clusterddp submit --sweep`, which submits many runs as a job array",
    **dict.fromkeys(
        ("ntasks", "ntasks-per-node", "tasks-per-node", "ntasks-per-gpu"), "use gpus_per_node and gpus_per_rank"
    ),
    **dict.fromkeys(("gpus", "gpus-per-socket"), _USE_GPUS),
    **dict.fromkeys(
        ONE_GPU_PER_TASK,
        "use gpus_per_node and gpus_per_rank. If your site requires one visible GPU per task, as with AMD GPUs, set "
        "the option under srun:, with NVIDIA GPUs together with gres-flags: allow-task-sharing",
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
    **dict.fromkeys(("grid", "members"), "use `clusterddp submit --sweep`, or name the file of a sweep"),
    **dict.fromkeys(("time_limit", "walltime"), "use the key time"),
    **dict.fromkeys(("runs_dir", "targets"), "write it into a configuration file, below defaults: or a cluster's name"),
    "on": "use `clusterddp submit --on TARGET`",
}


def _option(node: Node) -> str | bool:
    """The value of a Slurm option. True or false for one that takes no value."""
    return node.value if isinstance(node.value, bool) else read_text(node)


def slurm_options(keys: Callable[[], Iterable[str]], allowed: Sequence[str] = ()) -> Table:
    """Long options of sbatch, or of srun, which also takes those ``allowed``. ``keys``: all keys of a job definition,
    which come before an option of the same name."""

    def check(name: str, node: Node) -> None:
        if name.startswith("-"):
            raise Wrong(f"write the option without dashes: {name.lstrip('-')}")
        if not re.fullmatch(r"[a-z][a-z0-9-]*", name):
            raise Wrong("expected a long Slurm option with lower-case letters, digits and dashes")
        if name in allowed:
            return
        key = name.replace("-", "_")
        if instead := f"use the key {key}" if key in keys() else INSTEAD_OF_OPTION.get(name):
            raise Wrong(f"not allowed here: {instead}")
        words = ASSIGNMENT.findall(node.text.replace(",", " ")) if name == "export" else []
        if secret := next(filter(is_secret, words), None):
            raise Wrong(f"{secret} would be stored in the batch script, which Slurm keeps. Set it under env:")
        if name == "export" and allowed and node.text.partition(",")[0] != "ALL":
            raise Wrong("the ranks need the job's environment. Write ALL,NAME=VALUE, or set variables under env:")
        if name in ("gres", "tres-per-task", "tres-per-node") and "gpu" in node.text:
            raise Wrong("clusterddp requests the GPUs itself. Use the key gpus_per_node")

    def schema() -> Schema:
        refused = {*INSTEAD_OF_OPTION, *(key.replace("_", "-") for key in keys())} - {*allowed}
        return {
            "type": "object",
            "propertyNames": {"pattern": "^[a-z][a-z0-9-]*$", "not": {"enum": sorted(refused)}},
            "additionalProperties": text_schema(),
        }

    return Table(check, _option, schema)
