"""Has processes of multiprocessing's method "spawn" protect their saves and note their first step, as a rank does.

Scripts may start one such process per GPU. They inherit no hooks, as a forked process does.
"""

from __future__ import annotations

from multiprocessing import spawn
from typing import Any

from clusterddp.rundir.run_directory import RunDirectory
from clusterddp.worker import optimizer_hook, rank_process

#: If clusterddp cannot be imported, the child saves as it would elsewhere.
_IN_CHILD = """\
try:
    from clusterddp.worker.spawned_children import begin_child
except ImportError:
    pass
else:
    begin_child({run!r}, {attempt}, {protect}, {steps})
"""


def prepare_children(run: str, attempt: int, *, protect: bool, steps: bool) -> None:
    """Has each process that this one spawns call ``begin_child`` first."""
    command_line = spawn.get_command_line
    code = _IN_CHILD.format(run=run, attempt=attempt, protect=protect, steps=steps)

    def with_hooks(**values: Any) -> list[str]:
        command = command_line(**values)
        if "-c" in command[:-1]:  # not of a frozen program
            place = command.index("-c") + 1
            command[place] = code + command[place]
        return command

    spawn.get_command_line = with_hooks


def begin_child(run: str, attempt: int, protect: bool, steps: bool) -> None:
    """In such a process, before it runs code of the script."""
    if protect:
        rank_process.begin().saves.protect(run, attempt, lambda: False)
    if steps:
        optimizer_hook.note_first_step(RunDirectory(run).child_step_file(attempt).absolute())
    prepare_children(run, attempt, protect=protect, steps=steps)
