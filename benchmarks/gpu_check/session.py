"""One call of the GPU check: measures the machine, carries the cases out within the budget, keeps the results."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any

from benchmarks import common
from benchmarks.gpu_check.case import REPOSITORY, SCRIPTS, SMALL, STORY, Case, Lab, Result, Sizes, Speeds, carry_out
from benchmarks.gpu_check.plan import ASSUMED, cases
from clusterddp.process import adopt_orphans, descendants, signal_ranks
from clusterddp.rundir.files import write_atomically
from tests.markdown import table

#: The name that the tests' pretend devices have.
STAND_IN = "Stand-in GPU"
#: Seconds that the measurement of the machine may take, and that killed processes get to be gone.
PROBE_S, GONE_S = 120.0, 30.0


@dataclass
class Session:
    """What all cases of this call share. ``facts``: what the probe found."""

    facts: dict[str, Any]
    speeds: Speeds
    sizes: Sizes
    ranks: int
    backend: str
    folder: Path
    deadline: float

    @property
    def stand_in(self) -> bool:
        return bool(self.facts["gpu"] == STAND_IN)

    @property
    def on(self) -> str:
        return "stand-in" if self.stand_in else str(self.facts["gpu"])


def main(options: argparse.Namespace, started: float) -> int:
    """The exit code: 1 if a case failed, 2 if none could be tried."""
    if options.list:
        for case in cases(options.ranks or 1):
            print(f"{case.name:24} at most {case.bound_s(ASSUMED, Sizes()):4.0f} s  {case.shows}")
        return 0
    unknown = set(options.only or ()) - {case.name for case in cases(options.ranks or 8)}
    if unknown:
        sys.exit(f"no case {', '.join(sorted(unknown))}; --list prints them")
    adopt_orphans()  # all that a killed case leaves behind becomes this process's child
    signal.signal(signal.SIGTERM, _end)
    with _folder(options.folder) as folder:
        try:
            facts = probe(folder, REPOSITORY)
        except subprocess.SubprocessError as error:
            said = getattr(error, "stderr", None) or str(error)
            print(f"this machine's GPU cannot be used (without one: --stand-in):\n{said[-1500:]}", file=sys.stderr)
            return 2
        small = facts["gpu"] == STAND_IN
        sizes = sized(SMALL if small else Sizes(), options.size)
        backend = options.backend or ("aot_eager" if small else "inductor")
        session = Session(
            facts, Speeds(**facts["speeds"]), sizes, options.ranks or (1 if small else facts["gpus"]), backend,
            folder, started + options.budget,
        )  # fmt: skip
        results = kept(options.out, session)
        print(f"{session.on}: {json.dumps(facts)}", flush=True)
        for case in left(options, results, session.ranks):
            result = attempt(case, session)
            results[case.name] = result.as_json()
            print(f"{case.name}: {result.state}: {result.words} ({result.seconds:.1f} s)", flush=True)
            if result.story:
                print(result.story, flush=True)
            if options.out:
                keep(options.out, session, results)
    return summary(results)


def left(options: argparse.Namespace, results: Mapping[str, Mapping[str, Any]], ranks: int) -> list[Case]:
    """The cases that were asked for, and have no result yet."""
    done = {name for name, result in results.items() if result["state"] in ("passed", "failed")}
    asked = [case for case in cases(ranks) if not options.only or case.name in options.only]
    return [case for case in asked if options.again or case.name not in done]


def summary(results: Mapping[str, Mapping[str, Any]]) -> int:
    """Prints how many cases there are of each state; returns the exit code."""
    states = [result["state"] for result in results.values()]
    print(", ".join(f"{states.count(state)} {state}" for state in ("passed", "failed", "not run")), flush=True)
    return int("failed" in states)


def sized(sizes: Sizes, asked: Sequence[str]) -> Sizes:
    """With ``NAME=VALUE`` of the command line."""
    for text in asked:
        name, _, value = text.partition("=")
        if name not in asdict(sizes):
            sys.exit(f"--size {text}: expected one of {', '.join(asdict(sizes))}")
        sizes = replace(sizes, **{name: type(getattr(sizes, name))(value)})
    return sizes


@contextlib.contextmanager
def _folder(asked: Path | None) -> Iterator[Path]:
    """The folder of runs; a temporary one is deleted."""
    if asked is not None:
        asked.mkdir(parents=True, exist_ok=True)
        yield asked
        return
    with tempfile.TemporaryDirectory(prefix="gpu-check-", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


def probe(folder: Path, cwd: Path) -> dict[str, Any]:
    """The device and the machine's speeds; a SubprocessError without a GPU that works."""
    out = folder / "speeds.json"
    small = "STANDIN_CUDA_DEVICES" in os.environ
    command = [
        sys.executable,
        str(SCRIPTS / "gpu_pieces.py"),
        "speeds",
        str(out),
        str(folder),
        "16" if small else "1024",
    ]
    subprocess.run(
        [*command, str(time.time())], check=True, cwd=cwd, stderr=subprocess.PIPE, text=True, timeout=PROBE_S
    )
    facts: dict[str, Any] = json.loads(out.read_text())
    return facts


# --- one case


def attempt(case: Case, session: Session) -> Result:
    """The case in a process of its own, within its bound and the budget."""
    expected, bound = (find(session.speeds, session.sizes) for find in (case.expected_s, case.bound_s))
    left = session.deadline - time.monotonic()
    if left < expected:
        words = f"the budget leaves {max(left, 0):.0f} s, and it needs about {expected:.0f} s"
        return described(Result(case.name, "not run", words), session, bound)
    print(f"{case.name}: about {expected:.0f} s, at most {min(bound, left):.0f} s ...", flush=True)
    began, folder = time.monotonic(), session.folder / case.name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    shared = session.folder / "shared"
    shared.mkdir(exist_ok=True)
    lab = Lab(session.sizes, session.ranks, session.stand_in, folder, shared, session.backend)
    result = in_child(case, lab, min(bound, left))
    if result is None:
        cut = left < bound
        words = f"not done within {min(bound, left):.0f} s{', when the budget was over' if cut else ''}"
        result = Result(case.name, "not run" if cut else "failed", words, story=found_in(folder))
    result.seconds = time.monotonic() - began
    shutil.rmtree(folder, ignore_errors=True)
    return described(result, session, bound)


def described(result: Result, session: Session, bound: float) -> Result:
    """With what it was measured on."""
    reduced = session.sizes.reduced()
    counts = not session.stand_in and not reduced and result.state != "not run"
    return replace(result, bound_s=bound, on=session.on, reduced=reduced, counts=counts)


def in_child(case: Case, lab: Lab, seconds: float) -> Result | None:
    """What the case gives in a forked process; None, and nothing of it left, if it takes longer."""
    out = lab.folder / "result.json"
    sys.stdout.flush()
    pid = os.fork()  # torch is imported once, here; no process of these uses a device itself
    if pid == 0:
        code = 1
        try:
            os.setsid()
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            write_atomically(out, json.dumps(carry_out(case, lab).as_json()).encode())
            code = 0
        finally:
            os._exit(code)
    deadline = time.monotonic() + seconds
    while os.waitpid(pid, os.WNOHANG) == (0, 0):
        if time.monotonic() > deadline:
            break
        time.sleep(0.05)
    end_all()
    return Result(**json.loads(out.read_text())) if out.exists() else None


def end_all() -> None:
    """Kills every process that this one has started, directly or not, and waits until they are gone.

    The children of a killed process become this one's.
    """
    deadline = time.monotonic() + GONE_S
    while time.monotonic() < deadline:
        signal_ranks(os.getpid(), signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(0.02)
    print(f"still there {GONE_S:g} s after a SIGKILL: {descendants(os.getpid())}", flush=True)


def _end(signum: int, _: FrameType | None) -> None:
    """On TERM: nothing is left."""
    end_all()
    os._exit(128 + signum)


def found_in(folder: Path) -> str:
    """The ends of the logs of a case that was killed."""
    logs = [
        path for path in sorted(folder.rglob("*")) if path.suffix in (".log", ".err", ".out") and path.stat().st_size
    ]
    return "\n".join(f"--- {path.relative_to(folder)}\n{path.read_text(errors='replace')[-1500:]}" for path in logs)[
        -STORY:
    ]


# --- the file of results


def kept(out: Path | None, session: Session) -> dict[str, Any]:
    """The results of earlier calls; those of another device are an error."""
    if out is None or not out.exists():
        return {}
    found = json.loads(out.read_text())
    if found.get("on") != session.on:
        sys.exit(f"{out} has results of {found.get('on')}, and this is {session.on}: choose another --out")
    cases: dict[str, Any] = found["cases"]
    return cases


def keep(out: Path, session: Session, results: Mapping[str, Mapping[str, Any]]) -> None:
    """The results, with a page beside them. ``rows`` has those that count."""
    rows = [row for result in results.values() if result["counts"] for row in result["figures"].get("rows", [])]
    record = {
        "on": session.on,
        "date": time.strftime("%Y-%m-%d"),
        "machine": common.machine(),
        "facts": session.facts,
        "sizes": asdict(session.sizes),
        "rows": rows,
        "cases": results,
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(out, (json.dumps(record, indent=1) + "\n").encode())
    out.with_suffix(".md").write_text(page(record))


def page(record: Mapping[str, Any]) -> str:
    """The table of cases. ``record``: the file of ``--out``."""
    facts, lines = record["facts"], []
    for result in record["cases"].values():
        state = result["state"] + (f" (reduced: {', '.join(result['reduced'])})" if result["reduced"] else "")
        lines.append([result["name"], state, " ".join(result["words"].split()).replace("|", "/"), result["seconds"]])
    where = f"{facts['gpus']} x {facts['gpu']}, CUDA {facts['cuda']}, NCCL {facts['nccl']}, torch {facts['torch']}"
    speeds = ", ".join(f"{name} {value:.3g}" for name, value in facts["speeds"].items())
    return f"""# What needs a GPU

Measured on {record["date"]} on {where}. Before the cases: {speeds}.

{table(["case", "result", "finding", "seconds"], lines)}
"""
