"""``python -m tests [PYTEST ARGUMENTS]``: all tests, as ``make test`` runs them; the exit code says whether they pass.

Tests mostly wait, those on Slurm above all. So these run in two parts, each with a separate cluster, beside two parts
of the tests that need no cluster. Once a part on Slurm ends, another part of the other tests takes its place.
Output appears as it is written, each line after the name of its part. Each test's cost and one JUnit file,
``junit.xml``, go to ``build/tests``.

The parts keep two CPUs busier than any user's, and now and then a test does not find in time what it waits for. So
tests that fail, if they are few, run once more with nothing beside them; they are reported as such at the end, because
each of them is a race that somebody should look at.
"""

from __future__ import annotations

import compileall
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import xml.etree.ElementTree as ElementTree
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from tests.cluster import unavailable
from tests.cluster.state import ROOT
from tests.plugin import costs

RESULTS = Path("build", "tests")
LAST_RUN = RESULTS / "costs.jsonl"
#: The same of a typical run, its longer tests alone: without it the first run in a clone has unequal parts.
TYPICAL = Path(__file__).with_name("costs.jsonl")
#: If more tests fail than these, they do not run again.
FEW = 4
#: Parts of the tests on Slurm, each with a cluster, and parts of the others that run from the beginning.
CLUSTERS, OTHERS = 2, 2
#: pytest's exit codes.
PASSED, FAILED, NO_TESTS = 0, 1, 5
#: A network, a /var/lib ($1) and freezer cgroups ($2) of its own, so that a cluster finds nothing of another one.
APART = f"""
    set -e
    ip link set lo up
    ! mountpoint -q {ROOT} || umount --recursive --lazy {ROOT}
    mount --bind "$1" /var/lib
    freezer=/sys/fs/cgroup/freezer
    ! [ -d $freezer ] || {{ mkdir -p $freezer/$2; mount --bind $freezer/$2 $freezer; }}
    shift 2
    "$@"
    exit $?  # bash stays as the namespace's init process, which reaps orphans
"""
#: With a process namespace, too: the kernel ends all of its processes with the runner, however that ends.
UNSHARE = "setpriv --pdeathsig KILL unshare --mount --net --pid --fork --kill-child --mount-proc bash -c".split()


@dataclass(frozen=True)
class Part:
    """The tests that ``-m`` selects, shared with the other parts of the queue; ``number``: that of its cluster.

    It begins with the runner, or once the part ``after`` has ended.
    """

    name: str
    select: str
    folder: Path
    queue: Path | None = None
    number: int = 0
    after: str | None = None

    def command(self, *options: str) -> list[str]:
        pytest = [sys.executable, "-u", "-m", "pytest", "-p", "tests.plugin", "-m", self.select, "--durations=15"]
        share = [f"--queue={self.queue}", f"--before={LAST_RUN}"] if self.queue else []
        files = [f"--costs={self.costs}", f"--junitxml={self.junit}", "-o", f"cache_dir={self.folder}"]
        return [*pytest, *share, *files, *options]

    @property
    def costs(self) -> Path:
        return self.folder / "costs.jsonl"

    @property
    def junit(self) -> Path:
        return self.folder / "junit.xml"

    def start(self, *options: str) -> subprocess.Popen[str]:
        """pytest on these tests, apart from the other parts if it starts a cluster."""
        command, environment = self.command(*options), dict(os.environ)
        environment.pop("PYTHONDONTWRITEBYTECODE", None)  # what one part has compiled, the others need not
        if self.number:
            folder = self.folder / "var-lib"
            folder.mkdir(mode=0o755, exist_ok=True)
            arguments = [str(folder), f"clusterddp-tests-{self.number}", *command]
            command = [*UNSHARE, APART, "bash", *arguments, "--apart"]
            environment["CLUSTERDDP_TEST_USER"] = f"ddpuser{self.number}"
        else:
            command = ["nice", "-n", "5", *command]
        return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    def code(self, process: subprocess.Popen[str]) -> int:
        """pytest's exit code; a crash after the last test is shown, and is none of them."""
        code = process.wait()
        if code < 0 and (written := self.folder / "exit-code").exists():
            print(f"{self.name}: signal {-code} ended pytest while it exited, after its tests", flush=True)
            return int(written.read_text())
        return code

    def failed(self) -> list[str]:
        """The tests that failed when it was last run."""
        try:
            return sorted(json.loads((self.folder / "v/cache/lastfailed").read_text()))
        except FileNotFoundError:
            return []


def main(arguments: Sequence[str] | None = None) -> int:
    options = list(sys.argv[1:] if arguments is None else arguments)
    # A process that may not write bytecode, as those of the clusters' users, would compile what it imports each time.
    for package in ("clusterddp", "tests"):
        compileall.compile_dir(Path(__file__).parents[1] / package, quiet=1)
    RESULTS.mkdir(parents=True, exist_ok=True)
    if not LAST_RUN.exists():
        shutil.copy(TYPICAL, LAST_RUN)
    with tempfile.TemporaryDirectory() as folder:
        parts = make_parts(Path(folder))
        print(expected(parts), flush=True)
        try:
            return run(parts, options)
        finally:
            keep_results(parts)


def make_parts(folder: Path) -> list[Part]:
    """Where there is no Slurm the tests that need it are skipped, or fail in CI, in one part."""
    on_slurm = [Part("slurm", "slurm", folder / "slurm")]
    if unavailable() is None:
        on_slurm = sharing("slurm", "slurm", folder, CLUSTERS, clusters=True)
    others = sharing("others", "not slurm", folder, OTHERS + len(on_slurm))
    followers = [replace(part, after=first.name) for part, first in zip(others[OTHERS:], on_slurm, strict=True)]
    parts = [*on_slurm, *others[:OTHERS], *followers]
    for part in parts:
        part.folder.mkdir()
    return parts


def sharing(name: str, select: str, folder: Path, count: int, *, clusters: bool = False) -> list[Part]:
    """Parts that take their tests from one queue, so that they end at about the same time."""
    queue = folder / f"{name}-queue"
    queue.mkdir()
    return [
        Part(f"{name} {number}", select, folder / f"{name}-{number}", queue, number if clusters else 0)
        for number in range(1, count + 1)
    ]


def expected(parts: Sequence[Part]) -> str:
    """What each part took before."""
    totals: dict[str, float] = defaultdict(float)
    for line in costs(LAST_RUN):
        totals[line["part"]] += line["seconds"]
    words = [f"{part.name} {totals[part.name] / 60:.0f} min" for part in parts if part.name in totals]
    return f"expected from earlier runs: {', '.join(words)}"


def run(parts: Sequence[Part], options: Sequence[str]) -> int:
    """All parts side by side, then what failed."""
    interrupted = threading.Event()

    def attend(part: Part, process: subprocess.Popen[str]) -> dict[str, int]:
        show(part.name, process)
        codes = {part.name: part.code(process)}
        for following in parts:
            if following.after == part.name and not interrupted.is_set():
                codes |= attend(following, following.start(*options))
        return codes

    with ThreadPoolExecutor(len(parts)) as threads:
        attended = [threads.submit(attend, part, part.start(*options)) for part in parts if part.after is None]
        try:
            by_part = {name: code for one in attended for name, code in one.result().items()}
        except KeyboardInterrupt:  # which the parts got, too: they take their clusters down
            interrupted.set()
            raise
    codes = set(by_part.values())
    for name, code in by_part.items():
        if code not in (PASSED, NO_TESTS):
            print(f"{name}: pytest exited with code {code}", flush=True)
    failed = [test for part in parts for test in part.failed()]
    if codes <= {PASSED, NO_TESTS}:
        return min(codes)
    if not failed or len(failed) > FEW or codes - {PASSED, FAILED, NO_TESTS}:
        print(f"\nfailed: {', '.join(failed) or 'no test'}", flush=True)
        return 1
    print(f"\nonce more, with nothing beside: {', '.join(failed)}\n", flush=True)
    again = [run_again(part, options) for part in parts if part.failed()]
    still = [test for part in parts for test in part.failed()]
    for verdict, tests in (
        ("passed only at the second try", sorted(set(failed) - set(still))),
        ("failed again", still),
    ):
        if tests:
            print(f"\n{verdict}: {', '.join(tests)}", flush=True)
    return int(any(again))


def run_again(part: Part, options: Sequence[str]) -> int:
    part.junit.replace(part.folder / "junit-first.xml")
    running = replace(part, queue=None).start("--last-failed", *options)
    show(part.name, running)
    return part.code(running)


def show(name: str, running: subprocess.Popen[str]) -> None:
    """Each line as it is written."""
    assert running.stdout is not None
    for line in running.stdout:
        print(f"{name} | {line}", end="", flush=True)


def keep_results(parts: Sequence[Part]) -> None:
    """One JUnit file, and the costs that the next run expects; tests that this run did not select keep theirs."""
    suites = ElementTree.Element("testsuites")
    for part in parts:
        for tries in sorted(part.folder.glob("junit*.xml")):
            for suite in ElementTree.parse(tries).getroot():
                suite.set("name", part.name)
                suites.append(suite)
    ElementTree.ElementTree(suites).write(RESULTS / "junit.xml", encoding="utf-8", xml_declaration=True)
    lines = [*costs(LAST_RUN), *({**line, "part": part.name} for part in parts for line in costs(part.costs))]
    newest = {line["test"]: line for line in lines if Path(line["test"].partition("::")[0]).exists()}
    LAST_RUN.write_text("".join(json.dumps(line) + "\n" for line in newest.values()))
    for folder in Path("/sys/fs/cgroup/freezer").glob("clusterddp-tests-*"):
        with contextlib.suppress(OSError):
            folder.rmdir()


if __name__ == "__main__":
    sys.exit(main())
