"""``clusterddp rehearse`` names the bug of a broken script, and finds nothing in the repaired one."""

from __future__ import annotations

import json

import jsonschema
import pytest

from clusterddp.errors import FAULT_FOUND
from tests.rehearsal.known_bugs import KNOWN_BUGS
from tests.rehearsal.rehearsals import REPOSITORY, rehearsed

BUGS = {bug.name: bug for bug in KNOWN_BUGS}


@pytest.mark.parametrize("name", ["exits_as_completed", "half_written", "optimizer"])
def test_the_first_finding_on_a_broken_script_is_its_bug(name: str) -> None:
    """With one rank and one disturbance. ``make rehearsals`` rehearses all scripts with all disturbances."""
    judged = rehearsed(BUGS[name], broken=True, only=BUGS[name].shown_by, ranks=1)
    assert (judged.code, judged.causes[:1]) == (FAULT_FOUND, [BUGS[name].cause]), judged.output
    assert judged.certificate["verdict"] == BUGS[name].rank.value


def test_a_repaired_script_survives_and_continues_at_the_step_of_the_notice() -> None:
    judged = rehearsed(BUGS["optimizer"], broken=False, only="step", ranks=1)
    assert (judged.code, judged.causes) == (0, []), judged.output
    schema = json.loads((REPOSITORY / "docs/reference/rehearsal.schema.json").read_text())
    assert list(jsonschema.Draft202012Validator(schema).iter_errors(judged.certificate)) == []
    (step,) = judged.certificate["disturbances"]
    assert (step["resumed_from"], step["repeated_steps"], step["result"]) == ("checkpoint.pt", 0, "same")
