"""A crash at any moment loses nothing that was promised: the checkpoints, and the run directory's own files.

Kills and errors come from strace, at every call that changes the run directory; a machine crash is replayed from
the recorded calls.
"""

from __future__ import annotations

import itertools
import os
import random
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from clusterddp.checkpoint.store import Checkpoints
from clusterddp.errors import CheckpointError
from clusterddp.jobdef.job import Keep
from clusterddp.rundir.run_directory import RunDirectory
from tests.checkpoint_files import save
from tests.crash.disk import Disk, Tree
from tests.crash.recovery import Promised, problem, write_tree
from tests.crash.subject import ATTEMPTS, content, saver_of
from tests.crash.tracing import Call, Moment, Played, Promise, Subject, available, moments

ERRORS = ("ENOSPC", "EDQUOT", "EIO")
FULL = "CLUSTERDDP_TEST_PRODUCT" in os.environ
pytestmark = pytest.mark.timeout(1800 if FULL else 300)


@pytest.fixture(scope="module")
def subject() -> Iterator[Subject]:
    """The server that runs the scenario under strace. In CI a missing strace is a failure, elsewhere a skip."""
    reason = available()
    if reason is not None:
        (pytest.fail if "CI" in os.environ else pytest.skip)(reason)
    subject = Subject("tests.crash.subject")
    yield subject
    subject.close()


@pytest.fixture(scope="module")
def place() -> Iterator[Path]:
    """A folder on a disk that lives in memory, where there is one: thousands of syncs are made here."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else None) as name:
        yield Path(name).resolve()


class Replay:
    """What a machine that died may leave of a recording, each different state looked at once."""

    def __init__(self, root: Path, scratch: Path, problem: Callable[[Path, Promised], str | None] = problem) -> None:
        self._root, self._scratch, self._problem = root, scratch, problem
        self._known: dict[tuple[frozenset[tuple[str, bytes | None]], Promised], str | None] = {}
        self.points = 0

    @property
    def states(self) -> int:
        """How many different states were looked at."""
        return len(self._known)

    def problems(self, recording: Sequence[Call | Promise], before: Sequence[Call | Promise] = ()) -> Iterator[str]:
        """The states that cannot continue, each with the moment of the crash; no crash comes in what was ``before``."""
        disk, promised, changed = Disk(str(self._root)), Promised(), True
        for item in before:
            if isinstance(item, Promise):
                promised = promised.and_(item.what)
            else:
                disk.apply(item)
        for item, following in itertools.zip_longest(recording, recording[1:]):
            if isinstance(item, Promise):
                promised, changed = promised.and_(item.what), True
            else:
                changed = disk.apply(item) or changed
            if not changed or isinstance(following, Promise):
                continue
            self.points += 1
            changed = False
            for tree in disk.states():
                if found := self._look(tree, promised):
                    yield f"after {item}: {found}"

    def _look(self, tree: Tree, promised: Promised) -> str | None:
        key = frozenset(tree.items()), promised
        if key not in self._known:
            self._scratch.mkdir()
            write_tree(tree, self._scratch, self._root)
            self._known[key] = self._problem(self._scratch / "runs" / "run", promised)
            shutil.rmtree(self._scratch)
        return self._known[key]


class Stories:
    """The same scenario repeatedly, each time with one fault, in a folder that is deleted before the next."""

    def __init__(self, subject: Subject, place: Path) -> None:
        self._subject = subject
        #: Where it is run.
        self.place = place
        played = self._play(0)
        assert played.code == 0, played.errors + played.strace
        #: The calls without any fault.
        self.recording = played.recording
        #: The moments at which something changes, or is made safe.
        self.moments = list(moments(self.recording, set(changing(self.recording, place))))
        self._paths = sorted({path for call in self.recording if isinstance(call, Call) for path in call.touched})

    def kill(self, moment: Moment) -> Played:
        """Kills the process that is about to make a call."""
        return self._play(moment.promises, f"{moment.name}:signal=KILL:when={moment.count}", [moment.path])

    def fail(self, moment: Moment, error: str) -> Played:
        """Answers one call with an error."""
        inject = f"{moment.name}:error={error}:when={moment.count}"
        return self._play(moment.promises, inject, [moment.path], once=True)

    def fail_from(self, promises: int, name: str, error: str) -> Played:
        """Answers all calls of a name with an error, from so many promises on."""
        return self._play(promises, f"{name}:error={error}", self._paths)

    def fail_and_record(self, moment: Moment, error: str) -> tuple[list[Call | Promise], list[Call | Promise]]:
        """What happens before an error is answered, and with it. For calls made in the run directory alone."""
        played = self._play(moment.promises, f"{moment.name}:error={error}:when={moment.of_all}")
        promises = [number for number, item in enumerate(self.recording, start=1) if isinstance(item, Promise)]
        return self.recording[: [0, *promises][moment.promises]], played.recording

    def _play(
        self, stop_after: int, inject: str | None = None, paths: Sequence[str] = (), once: bool = False
    ) -> Played:
        shutil.rmtree(self.place, ignore_errors=True)
        return self._subject.play(self.place, stop_after, inject, paths, once)


def changing(recording: Sequence[Call | Promise], place: Path) -> list[Call]:
    """The calls of a recording that change the run directory, or make a change safe."""
    disk = Disk(str(place))
    return [item for item in recording if isinstance(item, Call) and disk.apply(item)]


def ordered(recording: list[Call | Promise], call: Call, before: Call) -> list[Call | Promise]:
    """The recording with ``call`` moved to just before another one."""
    rest = [item for item in recording if item is not call]
    at = rest.index(before)
    return [*rest[:at], call, *rest[at:]]


@pytest.fixture(scope="module")
def stories(subject: Subject, place: Path) -> Stories:
    """Runs the scenario, with or without a fault."""
    return Stories(subject, place / "story")


@pytest.fixture(scope="module")
def replay(place: Path) -> Replay:
    """Looks at what a machine may leave that dies in the story."""
    return Replay(place / "story", place / "scratch")


def test_a_machine_crash_at_any_call_loses_nothing_that_was_promised(stories: Stories, replay: Replay) -> None:
    """Unsynced data and names are lost, kept or torn, each independently."""
    assert list(itertools.islice(replay.problems(stories.recording), 20)) == []
    print(f"{replay.points} moments, {replay.states} states")


def test_the_replay_fails_for_each_fsync_that_is_left_out(stories: Stories, replay: Replay) -> None:
    """None is there in vain, and the replay can fail."""
    recording = stories.recording
    syncs = [call for call in changing(recording, stories.place) if call.name == "fsync"]
    left_out = some([*enumerate(syncs)], 2)
    harmless = [
        f"{number}: {sync}"
        for number, sync in left_out
        if not any(replay.problems([item for item in recording if item is not sync]))
    ]
    print(f"{len(left_out)} of {len(syncs)} left out")
    # Those of the first attempt's claim and resume record: until the claim is seen, that of the submission counts, and
    # that the attempt began at step 0 is in the history, too.
    needed = [words for words in harmless if not words.endswith("/private/attempt-0")]
    assert len(syncs) > 30 and needed == [] and len(harmless) <= 2


def test_the_replay_fails_for_each_swapped_order(stories: Stories, replay: Replay) -> None:
    """Sync before rename, metrics before checkpoint, commit before deleting."""
    calls = changing(stories.recording, stories.place)
    harmless, turned = [], 0
    for rename in (call for call in calls if call.name == "rename"):
        at = calls.index(rename)
        syncs = [call for call in calls[:at] if call.name == "fsync" and call.at == rename.paths[0]]
        folder = next(call for call in calls[at:] if call.name == "fsync")
        pairs = [(rename, sync) for sync in syncs]  # none: an empty file
        if "/checkpoints/" in rename.paths[0]:
            metrics = next(call for call in reversed(calls[:at]) if call.name == "fsync" and "metrics" in str(call.at))
            pairs.append((folder, metrics))
            pairs += [(call, first) for call in only_other(calls, rename) for first in (rename, folder)]
        for late, early in pairs:
            turned += 1
            if not any(replay.problems(ordered(stories.recording, late, early))):
                harmless.append(f"{late} before {early}")
    print(f"{turned} turned round")
    assert turned > 20 and harmless == []


def only_other(calls: list[Call], rename: Call) -> list[Call]:
    """The call that deletes the newest older checkpoint, after the commit of an attempt that keeps the newest alone."""
    attempt = int(rename.paths[1].split(".attempt-")[1].split(".")[0])
    following = itertools.takewhile(lambda call: call.name != "rename", calls[calls.index(rename) + 1 :])
    deleted = [call for call in following if call.name == "unlink" and "/checkpoints/" in call.paths[0]]
    return sorted(deleted, key=lambda call: call.paths)[-1:] if ATTEMPTS[attempt][1] == 1 else []


def test_a_kill_at_any_call_loses_nothing_that_was_promised(stories: Stories) -> None:
    """SIGKILL of the rank, or of its writer, before each call that changes something or makes a change safe."""
    wrong = []
    cases = some(stories.moments, 9)
    for moment in cases:
        played = stories.kill(moment)
        if "killed by SIGKILL" not in played.trace:
            wrong.append(f"{moment}: never reached")
        elif found := problem(played.run, Promised.all(played.promises)):
            wrong.append(f"{moment}: {found}")
    print(f"{len(cases)} moments")
    assert wrong == []


def test_an_error_of_any_call_stops_no_training_and_loses_nothing(stories: Stories) -> None:
    """Each call, answered with each error: at most one save fails, and the next one succeeds."""
    wrong = []
    cases = some(list(itertools.product(stories.moments, ERRORS)), 30)
    for moment, error in cases:
        played = stories.fail(moment, error)
        if "(INJECTED)" not in played.trace:
            wrong.append(f"{error} at {moment}: never reached")
        failed = [what["not_saved"] for what in played.promises if "not_saved" in what]
        if len(failed) > 1:
            wrong.append(f"{error} at {moment}: several saves failed: {failed}")
        if found := stopped_training(played) or problem(played.run, Promised.all(played.promises)):
            wrong.append(f"{error} at {moment}: {found}")
    print(f"{len(cases)} cases")
    assert wrong == []


def test_an_error_that_stays_stops_no_training_and_loses_nothing(stories: Stories) -> None:
    """From each promise on, all calls of a kind, with each error."""
    wrong = []
    last = {moment.name: moment.promises for moment in stories.moments}
    starts = [(promises, name) for name in sorted(last) for promises in range(last[name] + 1)]
    cases = some([(*start, error) for start in starts for error in ERRORS], 66)
    for promises, name, error in cases:
        played = stories.fail_from(promises, name, error)
        if found := stopped_training(played) or problem(played.run, Promised.all(played.promises)):
            wrong.append(f"{error} of {name} after {promises} promises: {found}")
    print(f"{len(cases)} cases")
    assert wrong == []


@pytest.mark.product  # the tests above have errors of any call, and machines that crash
def test_what_a_failed_sync_has_lost_is_written_again(stories: Stories, replay: Replay) -> None:
    """The kernel marks data as written although fsync failed, and the next fsync does not report it.

    Some failed syncs of the metrics, and all of the folder after an outcome was renamed into it, are among the cases.
    """
    wrong = []
    syncs = [moment for moment in stories.moments if moment.name == "fsync"]
    cases = some(syncs, 120)
    always = some([sync for sync in syncs if "metrics" in sync.path], 10)
    always += [folder for file, folder in itertools.pairwise(syncs) if "outcome" in file.path]
    for moment in [*cases, *(sync for sync in always if sync not in cases)]:
        before, recording = stories.fail_and_record(moment, "EIO")
        wrong += [f"{moment}: {found}" for found in itertools.islice(replay.problems(recording, before), 3)]
    print(f"{replay.points} moments, {replay.states} states")
    assert wrong == []


def some(cases: list[Any], each: int) -> list[Any]:
    """Every so many-th case, from a random one on; all of them where CLUSTERDDP_TEST_PRODUCT is set."""
    return cases if FULL else cases[random.randrange(each) :: each]


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    **{f"cut at {size >> 10} KiB": lambda data, size=size: data[:size] for size in range(0, 10_000, 4096)},  # type: ignore[misc]
    "a byte short": lambda data: data[:-1],
    "a flipped bit in the header's length": lambda data: flipped(data, 3),
    "a flipped bit in the header": lambda data: flipped(data, 100),
    "a flipped bit in the state": lambda data: flipped(data, data.index(b"progress")),
    "a flipped bit in the first tensor": lambda data: flipped(data, header_end(data)),
    "a flipped bit in the last tensor": lambda data: flipped(data, len(data) - 9),
    "a flipped bit in the first check sum": lambda data: flipped(data, len(data) - 8),
    "a flipped bit in the last check sum": lambda data: flipped(data, len(data) - 1),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_reported_and_skipped(tmp_path: Path, damage: str) -> None:
    """The previous one is restored; if that is damaged, too, the run does not restart from step 0."""
    run = RunDirectory(tmp_path / "run")
    run.create()
    first = run.create_attempt()
    Checkpoints(run, first, Keep()).record_resume(None)
    files = [save(run, first, step, content(step)).path for step in (4, 8)]
    told: list[str] = []
    saver = saver_of(run, run.create_attempt(), lambda event: told.append(f"{event.name} {event.at_step}"))
    for newest in (8, 4):
        found = saver.restore()
        assert found is not None and found[1] == (first, newest) and len(told) == (newest == 4)
        path = files.pop()
        path.write_bytes(DAMAGES[damage](path.read_bytes()))
    with pytest.raises(CheckpointError):
        saver.restore()
    saver.close()
    assert told == ["checkpoint_damaged 8", "checkpoint_damaged 8", "checkpoint_damaged 4"]


def flipped(data: bytes, place: int) -> bytes:
    """The data with one bit of a byte turned round."""
    return data[:place] + bytes([data[place] ^ 4]) + data[place + 1 :]


def header_end(data: bytes) -> int:
    """Where a checkpoint's tensors begin."""
    return 8 + int.from_bytes(data[:8], "little")


def stopped_training(played: Played) -> str | None:
    """That an attempt which had begun to train did not come to the end of it."""
    trained = [what["trained"] for what in played.promises if "trained" in what]
    started = [what["resumed"] for what in played.promises if "resumed" in what]
    if started == trained:
        return None
    return f"the training of attempt {started[-1]} ended: {played.errors.splitlines()[-1]}"
