"""The JSON Schema of a job definition, for editors: made from the fields of ``Job`` and their docstrings.

It accepts all that the reader accepts. Only the reader checks what depends on several keys or on files.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import textwrap
from collections.abc import Mapping
from itertools import pairwise
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from clusterddp.jobdef import configuration_files
from clusterddp.jobdef.job import (
    Job,
    Keep,
    Mlflow,
    Resume,
    Wandb,
    Watchdog,
    written,
)
from clusterddp.jobdef.load import RUN_FORMAT
from clusterddp.jobdef.schema import INSTEAD_OF_OPTION, ONE_GPU_PER_TASK, PROJECT, READERS, SET_FOR_RANKS, WORDS

#: A JSON Schema, or a part of one.
Schema = dict[str, Any]
#: YAML keys whose field has another name.
_FIELDS = {"job_name": "name", "time": "time_s"}


def job_schema() -> Schema:
    """The schema, in draft 7, which editors support."""
    hints, texts, values = get_type_hints(Job), _docstrings(Job), written(Job(name="", module=""))
    properties: Schema = {"format": {"const": RUN_FORMAT, "description": "Only in the job.yaml of a run."}}
    for key in READERS:
        name = _FIELDS.get(key, key)
        described = {"description": f"As in sbatch: --{key}." if key in WORDS else texts[name]}
        if (default := values.get(key)) not in (None, "", (), {}):
            described["default"] = default
        properties[key] = described | _or_null(_OF_KEY.get(key) or _of_type(hints[name]))
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "Job definition of clusterddp",
        "type": "object",
        "properties": properties,
        "additionalProperties": False,
        "oneOf": [_has("script"), _has("module")],
    }


def _has(key: str) -> Schema:
    return {"required": [key], "properties": {key: {"not": {"type": "null"}}}}


# --- from a field's type


def _of_type(hint: Any) -> Schema:
    """The values of a field of this type: a number, a boolean, a choice, text, or a section."""
    if get_origin(hint) in (Union, UnionType):
        hint, *others = (part for part in get_args(hint) if part is not NoneType)
        if others:
            return _either(*map(_of_type, (hint, *others)))
    if get_origin(hint) is Literal:
        return {"enum": list(get_args(hint))}
    return _section(hint) if dataclasses.is_dataclass(hint) else dict(_OF_TYPE[hint])


def _section(owner: Any, **properties: Schema) -> Schema:
    """A mapping with fixed keys: the fields of a dataclass, or ``properties``."""
    texts, hints = _docstrings(owner), get_type_hints(owner)
    properties = properties or {item.name: _of_type(hints[item.name]) for item in dataclasses.fields(owner)}
    described = {
        key: ({"description": texts[key]} if key in texts else {}) | _or_null(schema)
        for key, schema in properties.items()
    }
    return {"type": "object", "properties": described, "additionalProperties": False}


def _or_null(schema: Schema) -> Schema:
    """The same, or null, which leaves the built-in default."""
    if "enum" in schema:
        return schema | {"enum": [*schema["enum"], None]}
    if "type" not in schema:
        return schema | {"anyOf": [*schema["anyOf"], {"type": "null"}]}
    types = [schema["type"]] if isinstance(schema["type"], str) else schema["type"]
    return schema | {"type": [*types, "null"]}


def _docstrings(owner: type) -> Mapping[str, str]:
    """The string below each field of a dataclass, by the field's name."""
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(owner))).body
    body = tree.body if isinstance(tree, ast.ClassDef) else []
    return {
        ast.unparse(item.target): " ".join(below.value.value.replace("``", "`").split())
        for item, below in pairwise(body)
        if isinstance(item, ast.AnnAssign)
        and isinstance(below, ast.Expr)
        and isinstance(below.value, ast.Constant)
        and isinstance(below.value.value, str)
    }


# --- values that the type alone does not describe

#: Text: also what YAML reads as a number or a boolean.
_SCALAR = ["string", "number", "boolean"]


def _text(pattern: str = "", **more: Any) -> Schema:
    return {"type": _SCALAR, "minLength": 1, **({"pattern": f"^(?:{pattern})$"} if pattern else {}), **more}


def _list(**more: Any) -> Schema:
    return {"type": "array", "items": {"type": [*_SCALAR, "null"]}, **more}


def _either(*schemas: Schema) -> Schema:
    return {"anyOf": list(schemas)}


def _count(least: int = 1, **more: Any) -> Schema:
    return {"type": "integer", "minimum": least, **more}


_OF_TYPE: Mapping[Any, Schema] = {
    bool: {"type": "boolean"},
    int: _count(),
    float: {"type": "number", "exclusiveMinimum": 0},
    str: _text(),
    tuple[str, ...]: _list(),
}
_EVERY = r"[0-9][0-9.e+-]* (steps?|seconds?|minutes?|hours?)"
_OPTION_NAMES = sorted({*INSTEAD_OF_OPTION, *(key.replace("_", "-") for key in READERS)})


def _options(refused: list[str]) -> Schema:
    return {
        "type": "object",
        "propertyNames": {"pattern": "^[a-z][a-z0-9-]*$", "not": {"enum": refused}},
        "additionalProperties": _text(),
    }


_OF_SRUN = [name for name in _OPTION_NAMES if name not in ONE_GPU_PER_TASK]
_KEEP = _section(Keep, last=_count(), every=_count(), best={"type": "string", "pattern": r"^[^\s-]\S* (max|min)$"})
_WORD = r"""[^\s"'\\]+"""
_WANDB = _section(
    Wandb, project=_text(PROJECT), entity=_text(_WORD), group=_text(), mode={"enum": ["online", "offline"]}
)
_MLFLOW = _section(Mlflow, experiment=_text(), tracking_uri=_text(_WORD))

_EVERY_TEXT = (
    "`500 steps`, `5 minutes`, both as a list, `auto` (from the cost of a save and the time between interruptions), or "
    "`never`. A checkpoint is also saved at every stop."
)
_KEEP_TEXT = "The number of newest checkpoints that are kept, or rules: `{last: 3, every: 5000, best: f1 max}`."
_PRESET = "A preset, for the keys that are not given here."
_STEP_LOG = "A regular expression whose group is the step, in a line that rank 0 prints."
_DONE_LOG = "A regular expression that matches a line of a rank's output once the training is done."

_OF_KEY: Mapping[str, Schema] = {
    "job_name": _text(r"[^\s/.-][^\s/]*", maxLength=200),
    "module": {"type": "string", "pattern": r"^[^\s\d./-][^\s/-]*$"},
    "nodes": _either(_count(maximum=65536), {"type": "string", "pattern": "^[1-9][0-9]{0,5}-[1-9][0-9]{0,5}$"}),
    "spare_nodes": _count(0),
    "gpus_per_node": _either(
        _count(maximum=999999), {"type": "string", "pattern": r"^([A-Za-z0-9][\w.-]*:)?[1-9][0-9]{0,5}$"}
    ),
    "time": _either(_count(), {"type": "string", "pattern": r"^([0-9]{1,9}-)?[0-9]{1,9}(:[0-9]{1,9}){0,2}$"}),
    **dict.fromkeys(WORDS, _text(_WORD)),
    "mem": _either(_count(0), {"type": "string", "pattern": "^[0-9]+([KMGTkmgt][Bb]?)?$"}),
    "resume": _either(
        {"enum": configuration_files.preset_names()},
        _section(
            Resume,
            preset={"description": _PRESET, "enum": configuration_files.preset_names()},
            checkpoint=_either(_text(), {"type": "array", "items": _text(), "minItems": 1}),
            args=_list(),
            replace=_list(),
        )
        | {"not": {"required": ["args", "replace"], "properties": dict.fromkeys(("args", "replace"), _list())}},
    ),
    "snapshot": _either({"type": "boolean"}, {"type": "string", "pattern": "^[1-9][0-9]{0,5}[MG]$"}),
    "hook": _either(_list(minItems=1), _text()),
    "setup": _either(_list(), _text()),
    "env": {
        "type": "object",
        "propertyNames": {"pattern": "^[A-Za-z_][A-Za-z0-9_]*$", "not": {"enum": sorted(SET_FOR_RANKS)}},
        "additionalProperties": {"type": [*_SCALAR, "null"]},
    },
    "python": _text("[^-].*"),
    "sbatch": _options(_OPTION_NAMES),
    "srun": _options(_OF_SRUN),
    "steps": _either(
        _count(),
        {"const": "off"},
        {
            "type": "object",
            "properties": {"log": {"description": _STEP_LOG, **_text(r".*\(.*\).*"), "type": "string"}},
            "additionalProperties": False,
        },
    ),
    "seed": _count(0),
    "checkpoint": {
        "type": "object",
        "properties": {
            "every": {"description": _EVERY_TEXT}
            | _or_null(
                _either(
                    {"enum": ["auto", "never"]},
                    {"type": "string", "pattern": f"^{_EVERY}$"},
                    {"type": "array", "items": {"type": "string", "pattern": f"^{_EVERY}$"}, "maxItems": 2},
                )
            ),
            "keep": {"description": _KEEP_TEXT} | _or_null(_either(_count(), _KEEP)),
        },
        "additionalProperties": False,
    },
    "wandb": _either({"type": "boolean"}, {**_text(PROJECT), "type": "string"}, _WANDB),
    "mlflow": _either({"type": "boolean"}, {**_text(), "type": "string"}, _MLFLOW),
    "watchdog": _either({"const": "off"}, _section(Watchdog)),
    "progress_interval": _either({"const": "off"}, _OF_TYPE[float]),
    "done": _either(
        _text(),
        {
            "type": "object",
            "properties": {"log": {"description": _DONE_LOG} | _text()},
            "required": ["log"],
            "additionalProperties": False,
        },
    ),
}
