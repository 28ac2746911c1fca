"""Interrupts the scripts of known bugs as plain Slurm does: ``python -m tests.rehearsal.plain FOLDER [NAME...]``.

Each script runs once undisturbed, and once interrupted and started again until the job counts as completed. A line
of JSON per bug has the damage to both scripts. Ranks are forked, so that torch is imported once.
"""

from __future__ import annotations

import faulthandler
import io
import json
import os
import runpy
import signal
import sys
import time
import traceback
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch._dynamo  # the first optimizer of each rank would import it, in two seconds
import torch.distributed
from torch.optim.optimizer import register_optimizer_step_post_hook

from clusterddp.process import descendants
from clusterddp.worker.rank import reserve_port
from tests.rehearsal.known_bugs import KNOWN_BUGS, Damage, Interruption, KnownBug, Moment

#: After a rank has failed, srun ends the others.
KILL_ON_BAD_EXIT_S = 5
#: A start that takes longer hangs.
LONGEST_S = 90
MOST_STARTS = 3
#: Sums over another number of ranks are rounded otherwise.
TOLERANCE_AFTER_OTHER_RANKS = 1e-9


@dataclass(frozen=True)
class Outcome:
    """What a run came to."""

    #: The last start's, by rank; negative for a signal.
    exit_codes: tuple[int, ...]
    #: Rank 0's steps in each start.
    steps: tuple[int, ...]
    #: The content of the newest file with the result.
    result: Any


def damage(bug: KnownBug, script: Path, folder: Path) -> Damage | None:
    """What the interruption does to a run of the script, None for nothing.

    Raises:
        RuntimeError: the script fails undisturbed, or ends before the interruption.
    """
    undisturbed = _run(bug, script, folder / "undisturbed", None)
    if any(undisturbed.exit_codes) or len(undisturbed.steps) > 1:
        raise RuntimeError(f"{script} fails undisturbed: see {folder}")
    interrupted = _run(bug, script, folder / "interrupted", bug.interruption)
    done, needed = sum(interrupted.steps), sum(undisturbed.steps)
    story = f"steps {undisturbed.steps}, interrupted {interrupted.steps}, at last exit codes {interrupted.exit_codes}"
    print(f"{bug.name}/{script.name}: {story}", file=sys.stderr, flush=True)
    if any(interrupted.exit_codes) or done < needed:
        return Damage.UNFINISHED
    tolerance = 0.0 if bug.ranks_afterwards == 2 else TOLERANCE_AFTER_OTHER_RANKS
    if not _same(undisturbed.result, interrupted.result, tolerance):
        return Damage.DIFFERENT
    noticed = bug.interruption.notice_s is not None  # else every script repeats the steps since its last save
    return Damage.REPEATED if noticed and done > needed else None


def _run(bug: KnownBug, script: Path, folder: Path, interruption: Interruption | None) -> Outcome:
    """Runs the script as a job of two ranks, which Slurm requeues until all of them exit with 0."""
    work = folder / "work"
    work.mkdir(parents=True)
    ranks, steps = 2, list[int]()
    while True:
        start = _Start(script, folder, len(steps) + 1, ranks, interruption if not steps else None)
        codes = start.exit_codes()
        steps.append(len(start.steps_file.read_text()) if start.steps_file.exists() else 0)
        if not any(codes) or len(steps) == MOST_STARTS:
            break
        ranks = bug.ranks_afterwards
    files = sorted(work.glob(bug.result), key=lambda path: path.stat().st_mtime_ns)
    return Outcome(codes, tuple(steps), torch.load(files[-1], weights_only=True) if files else None)


def _same(one: Any, other: Any, tolerance: float) -> bool:
    """Whether two results are equal, tensors to the bit or to a tolerance."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        if tolerance and one.is_floating_point():
            return torch.allclose(one, other, rtol=tolerance, atol=tolerance)
        return torch.equal(one, other)
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(_same(one[key], other[key], tolerance) for key in one)
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(_same(a, b, tolerance) for a, b in zip(one, other, strict=True))
    return bool(one == other)


class _Start:
    """One start of all ranks."""

    def __init__(self, script: Path, folder: Path, number: int, ranks: int, interruption: Interruption | None) -> None:
        self.steps_file = folder / f"steps-{number}"
        self._script, self._folder, self._interruption = script, folder, interruption
        self._reached, self._noticed = folder / "reached", folder / "noticed"
        self._held = reserve_port(None)  # until the ranks have ended: other tests choose ports from the same range
        port = self._held.getsockname()[1]
        self._codes: dict[int, int | None] = {}
        for rank in range(ranks):
            process = os.fork()
            if process == 0:
                _as_rank(self, rank, ranks, port, folder / f"start-{number}.rank-{rank}.txt")
            self._codes[process] = None

    def exit_codes(self) -> tuple[int, ...]:
        """Interrupts the ranks if asked to, and waits until all of them have ended."""
        try:
            if self._interruption is not None:
                self._interrupt(self._interruption)
            self._wait(LONGEST_S)
        finally:
            self._signal(signal.SIGKILL)
        self._wait(LONGEST_S)
        self._held.close()
        return tuple(code for code in self._codes.values() if code is not None)

    def _interrupt(self, interruption: Interruption) -> None:
        deadline = time.monotonic() + LONGEST_S
        while not self._reached.exists():
            if self._ended() or time.monotonic() > deadline:
                raise RuntimeError(f"{self._script} has not come to {interruption}: see {self._folder}")
            time.sleep(0.005)
        if interruption.moment is Moment.STEP:
            while not self._others_wait() and time.monotonic() < deadline:
                pass
        if interruption.notice_s is not None:
            workers = [child for rank in self._codes for child in descendants(rank)]
            self._signal(signal.SIGTERM)
            while not all(map(_ended_or_ignores, workers)) and time.monotonic() < deadline:
                time.sleep(0.005)
            self._noticed.touch()
            self._wait(interruption.notice_s, kill_on_bad_exit=False)
        self._signal(signal.SIGKILL)

    def _others_wait(self) -> bool:
        """Whether the other ranks have slept for a while: in a collective, where no handler of Python runs."""
        threads = [Path(f"/proc/{rank}/task/{rank}") for rank in list(self._codes)[1:]]
        before = [(thread / "schedstat").read_text() for thread in threads]
        time.sleep(0.2)
        asleep = all((thread / "stat").read_text().rsplit(")", 1)[1].split()[0] == "S" for thread in threads)
        return asleep and before == [(thread / "schedstat").read_text() for thread in threads]

    def _wait(self, timeout_s: float, kill_on_bad_exit: bool = True) -> None:
        deadline = time.monotonic() + timeout_s
        while not self._ended() and time.monotonic() < deadline:
            if kill_on_bad_exit and any(self._codes.values()):
                deadline = min(deadline, time.monotonic() + KILL_ON_BAD_EXIT_S)
                kill_on_bad_exit = False
            time.sleep(0.005)

    def _ended(self) -> bool:
        for process, code in self._codes.items():
            if code is None:
                ended, status = os.waitpid(process, os.WNOHANG)
                self._codes[process] = os.waitstatus_to_exitcode(status) if ended else None
        return None not in self._codes.values()

    def _signal(self, number: signal.Signals) -> None:
        """To each rank and the processes that it started."""
        for process in self._codes:
            with suppress(ProcessLookupError):
                os.killpg(process, number)

    def run_rank(self, rank: int) -> None:
        """Runs the script in this process. Rank 0 counts the steps, and waits at the interruption for the signal."""
        seen = dict.fromkeys(Moment, 0)

        def at(moment: Moment) -> bool:
            seen[moment] += 1
            wanted = self._interruption
            return wanted is not None and wanted.moment is moment and seen[moment] == wanted.number

        def wait_here() -> None:
            self._reached.touch()
            while not self._noticed.exists():
                time.sleep(0.002)

        def after_step(*_: Any) -> None:
            with self.steps_file.open("a") as steps:
                steps.write(".")
            if at(Moment.STEP):
                wait_here()

        def evaluating(model: torch.nn.Module) -> torch.nn.Module:
            model = model.train(False)
            if at(Moment.EVALUATION):
                wait_here()
            return model

        def save(content: Any, file: Any, **options: Any) -> None:
            if isinstance(file, (str, Path)) and at(Moment.SAVE):
                whole = io.BytesIO()
                torch_save(content, whole, **options)
                Path(file).write_bytes(whole.getvalue()[: whole.tell() // 2])
                wait_here()
            torch_save(content, file, **options)

        torch_save = torch.save
        if rank == 0:
            register_optimizer_step_post_hook(after_step)
            torch.nn.Module.eval = evaluating  # type: ignore[assignment,method-assign]
            torch.save = save  # type: ignore[assignment]
        sys.argv[:] = [str(self._script)]
        sys.path.insert(0, str(self._script.parent))
        runpy.run_path(str(self._script), run_name="__main__")


def _ended_or_ignores(process: int) -> bool:
    """Whether SIGTERM has ended the process, or it ignores the signal.

    Its parent learns of the end when its last thread has gone. The main thread can be a zombie before.
    """
    try:
        status = Path(f"/proc/{process}/status").read_text()
        if "\nState:\tZ" in status:
            return len(os.listdir(f"/proc/{process}/task")) == 1
    except OSError:
        return True
    return bool(int(status.split("SigIgn:")[1].split()[0], 16) & 1 << signal.SIGTERM - 1)


def _as_rank(start: _Start, rank: int, ranks: int, port: int, output: Path) -> NoReturn:
    """What a forked process does."""
    code = 1
    try:
        os.setsid()
        written = os.open(output, os.O_WRONLY | os.O_CREAT)
        os.dup2(written, 1)
        os.dup2(written, 2)
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE=str(ranks))
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        os.chdir(output.parent / "work")
        torch.set_num_threads(1)
        faulthandler.dump_traceback_later(LONGEST_S - 10, file=written)
        start.run_rank(rank)
        code = 0
    except SystemExit as exit_:
        code = exit_.code if isinstance(exit_.code, int) else int(exit_.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)


def main() -> None:
    """Runs the bugs named, or all."""
    top, *names = sys.argv[1:]
    for bug in KNOWN_BUGS:
        if bug.name in names or not names:
            line: dict[str, str | None] = {"name": bug.name}
            folder = Path(top).absolute() / bug.name
            for script in (bug.write_broken(folder / "scripts"), bug.repaired):
                done = damage(bug, script, folder / script.stem)
                line[script.stem] = done.value if done else None
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
