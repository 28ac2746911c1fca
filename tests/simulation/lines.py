"""Which lines of the product histories have executed."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from tests.simulation.world import Thread

#: Functions and classes whose lines do not count: what a model or `product.py` replaces, the command line with its
#: messages, local runs and a user's own allocation, scripts that do not use clusterddp, and requests that change
#: nothing in the life of a run (stacks).
LEFT_OUT = {
    "runs/request_client.py": {"_through_a_step", "check_trains", "step_command", "_reachable_name", "relay", "ask"},
    "slurm/commands.py": {
        *("submission_cluster", "require", "default_partition", "read_cluster", "parse_nodes", "parse_gres"),
        *("scrub_job_variables", "scrub", "for_parsing", "NodeShape", "cluster_name", "unix_time", "node_address"),
    },
    "slurm/configuration.py": {
        *("sentence", "_continuation", "Configuration", "Partition", "Association", "parse_configuration"),
        *("parse_partitions", "parse_gpus", "parse_associations", "read_configuration", "read_partitions"),
        *("read_associations", "read_default_account"),
    },
    "slurm/queue.py": {"_of_limit", "_by_beginning", "_changed"},
    "slurm/slurmd.py": {"unanswering", "addresses", "_is_down"},
    "slurm/run_states.py": {"_of_process", "_recorded"},
    "supervisor/attempt.py": {"_tell_of_missing_steps", "_record_later", "last_line", "_on_new_nodes", "_run_began"},
    "supervisor/controller.py": {
        *("batch_step_began", "give_notice", "Controller", "AllocationController", "LocalController", "_stop_said"),
    },
    "supervisor/lease.py": {
        *("let_go_unreachable", "loop_started", "loop_ended", "loop_here", "local_loop_alive", "_process_holder"),
    },
    "supervisor/attempt_progress.py": {"doubt", "_script_s", "_interrupted"},
    "supervisor/main.py": {
        *("supervise_slurm", "load_trusted", "with_snapshot", "as_debugged", "supervise_local", "prepare_process"),
        *("main", "_open_own_log", "without_spares", "conclude"),
    },
    "supervisor/user_requests.py": {
        *("_stacks", "_on_stacks", "_wanted", "_stacks_answer", "_child"),
    },
    "runs/sweep_submission.py": {"run_all", "_run", "_loop_ended", "scripts", "check_marks", "_check_same"},
    "supervisor/step_log.py": {"StepLog"},
    "supervisor/verdict.py": {
        *("added_arguments", "failure_text", "end_of_file", "_who_waited", "_different_calls", "_other_ends"),
        "_other_end",
    },
    "supervisor/completion_marker.py": {"_why_not", "_line", "_printed", "_matching"},
    "supervisor/script_checkpoints.py": {
        *("_match", "_files", "why_incomplete", "_why_file", "_why_safetensors", "_content", "_what_is_missing"),
        *("_continues_from", "_without_numbers", "beside", "saved"),
    },
    "failures/node_memory.py": {"letter", "_counts"},
    "failures/exclusion.py": {"letter", "letter_about", "unchecked"},
}
ROOT = Path(__file__).resolve().parents[2] / "clusterddp"


class Lines:
    """Records the lines of these modules, given as patterns below clusterddp/, that are executed."""

    def __init__(self, patterns: Iterable[str]) -> None:
        self.files = {str(path) for pattern in patterns for path in ROOT.glob(pattern)}
        self.executed: dict[str, set[int]] = {file: set() for file in self.files}
        #: Of each function, the lines that were not executed so far.
        self._left: dict[CodeType, set[int]] = {}

    def _trace(self, frame: FrameType, event: str, _: Any) -> Callable[..., Any] | None:
        code = frame.f_code
        if code.co_filename not in self.files:
            return None
        seen = self.executed[code.co_filename]
        if (left := self._left.get(code)) is None:
            left = self._left[code] = {line for _, _, line in code.co_lines() if line is not None}
        if not left:
            return None

        def line(frame: FrameType, event: str, _: Any) -> Callable[..., Any]:
            seen.add(frame.f_lineno)
            left.discard(frame.f_lineno)
            return line

        return line(frame, event, None)

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """While the block runs, in all threads of simulated processes."""
        run = Thread._run

        def traced(thread: Thread, value: object = None) -> None:
            sys.settrace(self._trace)
            run(thread, value)

        Thread._run = traced  # type: ignore[method-assign, assignment]
        sys.settrace(self._trace)
        try:
            yield
        finally:
            sys.settrace(None)
            Thread._run = run  # type: ignore[method-assign]

    def report(self) -> Iterator[str]:
        """A line per module: how many lines of its functions were executed, and which were not."""
        every = executed = 0
        for file in sorted(self.files):
            left_out = LEFT_OUT.get(str(Path(file).relative_to(ROOT)), set())
            lines = _lines_of(compile(Path(file).read_text(), file, "exec"), left_out)
            if missed := sorted(lines - self.executed[file]):
                share = 100 - 100 * len(missed) / len(lines)
                yield f"{Path(file).relative_to(ROOT)}: {share:.0f}% of {len(lines)}; not {', '.join(map(str, missed))}"
            else:
                yield f"{Path(file).relative_to(ROOT)}: 100% of {len(lines)}"
            every, executed = every + len(lines), executed + len(lines) - len(missed)
        yield f"{100 * executed / every:.1f}% of {every:,}"


def _lines_of(code: CodeType, left_out: Collection[str], inside: bool = False) -> set[int]:
    """The lines of all other functions in a module. What it does when it is imported does not count."""
    found = {line for _, _, line in code.co_lines() if line is not None and line != code.co_firstlineno}
    own = found if inside else set()
    for constant in code.co_consts:
        if isinstance(constant, CodeType) and constant.co_name not in left_out:
            is_function = constant.co_flags & 0x02  # CO_NEWLOCALS: no class body
            own = own | _lines_of(constant, left_out, bool(is_function))
    return own
