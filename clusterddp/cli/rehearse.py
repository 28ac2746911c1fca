"""``clusterddp rehearse``: starts a script several times, disturbs it, and says whether it survives."""

from __future__ import annotations

import argparse
import json
import re
import shutil
import signal
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from clusterddp.errors import FAULT_FOUND, NOT_REPEATABLE, UsageError
from clusterddp.rehearsal.certificate import VERDICTS, Subject, as_json, page, place, rows
from clusterddp.rehearsal.confinement import is_available
from clusterddp.rehearsal.disturbances import Disturbance
from clusterddp.rehearsal.facts import Place
from clusterddp.rehearsal.preemption_job import Observed, observe
from clusterddp.rehearsal.rehearsal import Rehearsal, rehearse
from clusterddp.rehearsal.supervised import SupervisedConductor
from clusterddp.rehearsal.trial import Stimulus
from clusterddp.rehearsal.under_slurm import SlurmConductor
from clusterddp.rehearsal.workspace import program_of, workspace_of
from clusterddp.reporter import counted, put, show
from clusterddp.rundir.files import write_atomically
from clusterddp.runs.local import without_clusterddp
from clusterddp.runs.submission import check, describe
from clusterddp.slurm.commands import scrub_job_variables

#: A socket's path has at most 107 bytes (unix(7)).
_LONGEST_FOLDER = 95
_SIGNALS = {name: signal.Signals[f"SIG{name}"] for name in ("TERM", "USR1", "USR2", "INT")}
SLURM, CLUSTERDDP = "slurm", "clusterddp"
_NAMES = [one.value for one in Disturbance if one is not Disturbance.AT]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``rehearse``. What follows ``--`` goes to the script."""
    parser.add_argument("target", metavar="SCRIPT.py | JOB.yaml", nargs="?", help="what to rehearse")
    parser.add_argument(
        "-p", "--partition", help="also submit a small job to this partition, which tests the signal of a preemption, "
        "Slurm's commands on the nodes, and a requeue",
    )  # fmt: skip
    parser.add_argument("-q", "--qos", help="with -p: quality of service, as in sbatch")
    parser.add_argument("-N", "--nodes", type=int, default=1, help="with -p: number of nodes (default: 1)")
    parser.add_argument(
        "--under", choices=(SLURM, CLUSTERDDP), metavar="NAME",
        help="what starts the script again: slurm, so that it must resume by its own means, or clusterddp (default: "
        "clusterddp for a JOB.yaml, or a script that uses clusterddp)",
    )  # fmt: skip
    parser.add_argument("--gpus", type=int, default=2, metavar="N", help="number of ranks (default: 2)")
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), default="cpu", metavar="NAME",
        help="with --under clusterddp: cpu or cuda, as for submit (default: cpu)",
    )  # fmt: skip
    parser.add_argument("--only", metavar="NAME,NAME", help=f"try only these disturbances: {', '.join(_NAMES)}")
    parser.add_argument(
        "--at", metavar="MOMENT",
        help="try only a notice at a moment of your own: after a step (120), after seconds (2.5s), or once a rank "
        "prints a line that matches a regular expression",
    )  # fmt: skip
    parser.add_argument(
        "--notice", type=float, default=20.0, metavar="SECONDS", help="time from the signal to SIGKILL (default: 20)"
    )
    parser.add_argument(
        "--signal", default="TERM", choices=list(_SIGNALS), metavar="NAME",
        help="the signal of a notice: TERM, or USR1 or USR2 as with sbatch --signal (default: TERM)",
    )  # fmt: skip
    parser.add_argument("--steps", type=int, default=60, metavar="N", help="the most steps of a start (default: 60)")
    parser.add_argument(
        "--limit", type=float, default=300.0, metavar="SECONDS", help="the longest start (default: 300)"
    )
    parser.add_argument(
        "-o",
        "--output",
        default=".",
        metavar="DIR",
        help="where to write rehearsal.json and rehearsal.html (default: .)",
    )


def run(arguments: argparse.Namespace, script_arguments: Sequence[str] | None) -> int:
    """Rehearses the script, prints the table and writes the certificate. Returns 0 if nothing was found."""
    wanted, at = _wanted(arguments)
    _check(arguments)
    if arguments.target is None:
        return _rehearse_partition(arguments)
    output = Path(arguments.output)
    if not output.is_dir():
        raise UsageError(f"--output {output}: there is no such folder")
    values = {} if script_arguments is None else {"args": list(script_arguments)}
    job = describe(
        arguments.target, {**values, "gpus_per_node": arguments.gpus, "nodes": 1, "device": arguments.device}, {}
    )
    under = arguments.under or (SLURM if arguments.target.endswith(".py") and without_clusterddp(job) else CLUSTERDDP)
    if under == CLUSTERDDP:
        if arguments.signal != "TERM":
            raise UsageError(
                f"--signal {arguments.signal} applies with --under slurm. clusterddp sends the script the signal that "
                "the key `stop` of its job definition names"
            )
        scrub_job_variables()
        check(job, None, place="--local")
    workspace = workspace_of(job)
    code = workspace.digest()
    folder = Path(tempfile.mkdtemp(prefix="rehearse-"))
    if len(str(folder)) > _LONGEST_FOLDER:
        folder.rmdir()
        raise UsageError(f"TMPDIR is {folder.parent}, which is too long for the path of a socket. Set a shorter one")
    try:
        command = [*program_of(job, workspace.root), *job.args]
        given = (folder, workspace, command, arguments.steps, arguments.limit)
        conductor = (
            SupervisedConductor(*given, job=job)
            if under == CLUSTERDDP
            else SlurmConductor(*given, notice=_SIGNALS[arguments.signal], variables=job.env)
        )
        ranks = counted(arguments.gpus, "rank")
        show(f"Rehearsing {arguments.target} under {under} on {ranks}, in a copy of {workspace.root}")
        if not is_available():
            show("This kernel cannot refuse writes outside the copy (Landlock, Linux 6.2 or newer)")
        found = rehearse(conductor, wanted, ranks=arguments.gpus, notice_s=arguments.notice, at=at, tell=show)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    subject = Subject(
        script=arguments.target,
        program=" ".join(program_of(job, workspace.root)),
        arguments=job.args,
        root=workspace.root,
        commit=workspace.commit,
        code=code,
        ranks=arguments.gpus,
        notice_s=arguments.notice,
        confined=is_available(),
        mode=under,
    )
    observed = None
    if arguments.partition:
        observed = observe(arguments.partition, arguments.qos, arguments.nodes, show)
        observed = replace(observed, save_s=found.script.save_s or None)
    _print(subject, found, observed)
    certificate = json.dumps(as_json(subject, found, observed), indent=1)
    write_atomically(output / "rehearsal.json", certificate.encode() + b"\n")
    write_atomically(output / "rehearsal.html", page(subject, found, observed).encode())
    show(f"Certificate: {output / 'rehearsal.json'}, {output / 'rehearsal.html'}")
    if found.findings or (observed and observed.problem):
        return FAULT_FOUND
    return 0 if found.unlike is None else NOT_REPEATABLE


def _rehearse_partition(arguments: argparse.Namespace) -> int:
    """Without a script, only the job in the partition is run. There is no certificate then."""
    if not arguments.partition:
        raise UsageError("name a script to rehearse, or a partition to test with -p")
    observed = observe(arguments.partition, arguments.qos, arguments.nodes, show)
    _put_rows(observed.rows())
    put(observed.problem or f"a run in {observed.preemption.partition} survives a preemption if its script does")
    return FAULT_FOUND if observed.problem else 0


def _check(arguments: argparse.Namespace) -> None:
    if arguments.gpus < 1:
        raise UsageError(f"--gpus {arguments.gpus}: expected a number of at least 1")
    if not 0 < arguments.notice <= 3600:
        raise UsageError(f"--notice {arguments.notice:g}: expected seconds, more than 0 and at most 3600")
    if arguments.steps < 4:
        raise UsageError(f"--steps {arguments.steps}: expected at least 4, so that there is a step to disturb")
    if (arguments.qos or arguments.nodes != 1) and not arguments.partition:
        raise UsageError("-q and -N apply to the job that -p submits. Add -p PARTITION")
    if not arguments.limit > 0:
        raise UsageError(f"--limit {arguments.limit:g}: expected seconds, more than 0")


def _wanted(arguments: argparse.Namespace) -> tuple[list[Disturbance], Stimulus | None]:
    """The disturbances that the options name, and the moment of ``--at``."""
    if arguments.at is not None:
        if arguments.only is not None:
            raise UsageError("--at cannot be combined with --only, because it is the only disturbance then")
        return [Disturbance.AT], replace(_moment(arguments.at), notice_s=arguments.notice)
    if arguments.only is None:
        return [one for one in Disturbance if one is not Disturbance.AT], None
    names = [name.strip() for name in arguments.only.split(",")]
    if unknown := [name for name in names if name not in _NAMES]:
        raise UsageError(f"--only {', '.join(unknown)}: no such disturbance. Available: {', '.join(_NAMES)}")
    return [Disturbance(name) for name in dict.fromkeys(names)], None


def _moment(text: str) -> Stimulus:
    if text.isdigit():
        return Stimulus(Place.STEP, int(text))
    if re.fullmatch(r"\d+(\.\d+)?s", text):
        return Stimulus(seconds=float(text[:-1]))
    try:
        return Stimulus(line=re.compile(text))
    except re.error as error:
        raise UsageError(
            f"--at {text!r}: expected a step such as 120, seconds such as 2.5s, or a regular expression: {error}"
        ) from None


def _put_rows(lines: Sequence[tuple[str, str, str]]) -> None:
    width = max((len(what) for what, _, _ in lines), default=0)
    for what, outcome, how in lines:
        put(f"{what:<{width}}  {outcome:<12}  {how}".rstrip())


def _print(subject: Subject, found: Rehearsal, observed: Observed | None) -> None:
    if found.unlike is not None:
        put(
            f"{subject.script} is not repeatable: two undisturbed runs differ in step {found.unlike}. Weights and "
            "losses were not compared. Seed all random generators, so that they can be"
        )
    _put_rows([*rows(found), *(observed.rows() if observed else ())])
    for finding, _ in found.findings:
        put(f"{finding.rank.words}: {finding.detail}{place(finding.file, finding.line)}")
    if observed and observed.problem:
        put(f"{observed.preemption.partition}: {observed.problem}")
    put(f"{subject.script} {VERDICTS[found.verdict]} ({counted(found.starts, 'start')}, {found.seconds:.0f} s)")
