"""Values of the keys of a job definition, as YAML: some that are valid, and some that are refused.

Those of choices, numbers, booleans and lists of text follow from the JSON Schema, and those of a mapping from the keys
inside. The table has the others. A new key needs a row only if neither gives it any.
"""

from __future__ import annotations

from dataclasses import dataclass

from clusterddp.jobdef.kinds import SHELL_LINES
from clusterddp.keys.kinds import REGEX, TEXT, WORD, Kind, Schema
from clusterddp.keys.table import Entry, OrOff, Section, Short, Switch


@dataclass(frozen=True)
class Examples:
    """Values of a key."""

    valid: list[str]
    wrong: list[str]


_SLURM = Examples(
    ["{comment: first try, exclusive: true, delay-boot: 5}", "{}"],
    ["{nodes: 2}", "{gpus-per-node: 2}", "{output: x}", "{--x: y}", "{Comment: x}", "[a]", "{comment: [a]}"],
)
_TIME = Examples(["30", "1:30:00", "2-12", "1-00:00:30"], ["soon", "-5", "1:2:3:4", "[1]"])

#: By key, inside a mapping with its name before it.
BY_KEY = {
    "job_name": Examples(["digits", "1", "é.x"], ["a b", "-x", "[a]", "a/b"]),
    "script": Examples(["train.py"], ["[train.py]", "{a: b}", '""']),
    "module": Examples(["package.train"], ["1a", "a b", "a/b", "[a]"]),
    "resume": Examples(
        [
            "timm",
            "{checkpoint: out/*.pth}",
            "{checkpoint: [a, '{run_dir}/b'], args: [--resume, '{checkpoint}']}",
            "{preset: mae, checkpoint: a.pt}",
            "{checkpoint: a.pt, replace: []}",
            "{checkpoint: a.pt, args: null, replace: [a]}",
        ],
        [
            *("tim", "[timm]", "{checkpoint: []}", "{checkpoint: {a: b}}", "{check: a.pt}", "{preset: x}", "true"),
            "{checkpoint: a.pt, args: [a], replace: []}",
        ],
    ),
    "done": Examples(
        ["out/epoch_90.pt", "'{run_dir}/*.done'", "{log: epochs completed}"], ["[a]", '""', "{}", "{log: }", "{x: 1}"]
    ),
    "nodes": Examples(["2", "2-4"], ["0", "two", "2.5", "70000", "2-"]),
    "gpus_per_node": Examples(["8", "a100:8", '"4"'], ["0", "a100", "-1", "[8]"]),
    "gpus_per_rank": Examples(["1"], ["0", "x"]),
    "time": _TIME,
    "time_min": _TIME,
    "mem": Examples(["64G", "0", "500", "none"], ["64 G", "much", "[1]"]),
    "snapshot": Examples(["true", "false", "500M", "2G"], ["500", "2 G", "no", "[2G]"]),
    "hook": Examples(["[python, notify.py]", "echo done"], ["[]", "{a: b}", '""', "[[a]]"]),
    "env": Examples(["{A: 1, B: , C: text}", "{}"], ["[a]", "{1A: x}", "{RANK: 1}", "{A: [1]}"]),
    "stage": Examples(["/tmp", "$SLURM_TMPDIR"], ["tmp", "[a]"]),
    "python": Examples(["/opt/python"], ["-x", "[a]"]),
    "sbatch": _SLURM,
    "srun": Examples([*_SLURM.valid, "{gpus-per-task: 1}", "{gpu-bind: 1}"], _SLURM.wrong),
    "steps": Examples(
        ["1", "8", "off", r"{log: 'iter (\d+)'}", "{}"],
        ["0", "-1", "2.5", "x", '"8"', "true", "{log: iter}", "{log: 5}", "{every: 3}"],
    ),
    "checkpoint.every": Examples(["500 steps", "[500 steps, 5 minutes]", "never", "auto"], ["5", "5 days", "true"]),
    "checkpoint.keep.best": Examples(["f1 max"], ["-f1 max", "f1", "5"]),
    "interface": Examples(["ib0", "[ib0, hsn0]"], ["a b", "{a: b}", "[[a]]", "^lo", "=ib0"]),
    "backend": Examples(["gloo"], ["mpi", "none"]),
    "wandb.project": Examples(["digits", "my project"], ["a/b", "'a:b'", '""']),
}
BY_KIND: dict[Kind, Examples] = {
    TEXT: Examples(["digits", "5", "my project"], ["[a]", "{a: b}", '""']),
    WORD: Examples(["gpu", "5", "no", '"1e3"'], ["a b", "[a]", '"it\'s"', '""']),
    SHELL_LINES: Examples(
        ["[module load cuda]", "module load cuda", "|\n  a\n  b", "{replace: [module load cuda]}"],
        ["{a: b}", "[[a]]", '""', "{replace: {a: b}}"],
    ),
    REGEX: Examples(["epochs completed", r"'iter (\d+)'"], ["[a]", '""']),
}


def examples(entry: Entry, prefix: str = "") -> Examples:
    """Those of a key. ``prefix``: the keys around it."""
    name = f"{prefix}{entry.name}"
    return BY_KEY.get(name) or _of_kind(entry.kind, name)


def _of_kind(kind: Kind, name: str) -> Examples:
    if isinstance(kind, OrOff):
        inner = _of_kind(kind.inner, name)
        return Examples(["off", *inner.valid], ["on", "false", *inner.wrong])
    if not isinstance(kind, Section):
        return BY_KIND.get(kind) or _of_schema(kind.schema())
    inside = {key: examples(entry, f"{name}.") for key, entry in kind.table.items()}
    valid = ["{}", *(f"{{{key}: {text}}}" for key, those in inside.items() for text in (*those.valid, "null"))]
    wrong = ["[a]", "{x: 1}", *(f"{{{key}: {text}}}" for key, those in inside.items() for text in those.wrong)]
    if isinstance(kind, Switch):
        words = [text for text in inside[kind.name].valid if not text.isdigit()]
        return Examples(["true", "false", *words, *valid], ["3", "2.5", *inside[kind.name].wrong, *wrong])
    if isinstance(kind, Short):
        return Examples([*inside[kind.name].valid, *valid], [*inside[kind.name].wrong, *wrong])
    return Examples(valid, wrong)


def _of_schema(schema: Schema) -> Examples:
    if choices := schema.get("enum"):
        return Examples(choices, ["neither", "true", f"[{choices[0]}]"])
    if schema["type"] == "integer":
        least = schema["minimum"]
        return Examples([str(least), "8"], [str(least - 1), "2.5", "x", '"8"', "true"])
    return {
        "boolean": Examples(["true", "false"], ["no", "on", "0", "1", "[true]"]),
        "number": Examples(["2.5", "60"], ["0", "-1", "x", "true"]),
        "array": Examples(["[--lr, 1e-3]", "[]", "[~]"], ["--lr", "[[a]]", "{a: b}"]),
    }[schema["type"]]
