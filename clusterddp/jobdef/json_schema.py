"""The JSON Schema of a job definition, for editors.

It accepts all that the reader accepts. Only the reader checks what depends on several keys or on files.
"""

from __future__ import annotations

from clusterddp.jobdef.job import KEYS, Job, written
from clusterddp.jobdef.load import RUN_FORMAT
from clusterddp.keys.kinds import Schema
from clusterddp.keys.table import properties


def job_schema() -> Schema:
    """The schema, in draft 7, which editors support."""
    run_format = {"const": RUN_FORMAT, "description": "Only in the job.yaml of a run."}
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "Job definition of clusterddp",
        "type": "object",
        "properties": {"format": run_format, **properties(KEYS, written(Job(name="", module="")))},
        "additionalProperties": False,
        "oneOf": [_has("script"), _has("module")],
    }


def _has(key: str) -> Schema:
    return {"required": [key], "properties": {key: {"not": {"type": "null"}}}}
