"""``python -m tests.repositories.rehearsals FOLDER [NAME ...]``: rehearses those whose checkouts the folder has.

The certificate of each is kept in ``certificates/NAME.MODE.json``. A call makes those that are missing, or those of the
repositories that it names. It writes ``docs/measurements/rehearsals.md``.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from clusterddp.errors import FAULT_FOUND, NOT_REPEATABLE
from clusterddp.jobdef.presets import preset_text
from tests.ddp import REPOSITORY
from tests.repositories import rehearsals_page
from tests.repositories.disturbances import environment
from tests.repositories.entries import Copy, Repository, Unusable, prepare, read_all

CERTIFICATES = Path(__file__).with_name("certificates")
WORK = REPOSITORY / "build" / "rehearsals"
#: The options of the command for each way to run a repository.
MODES: Mapping[str, Sequence[str]] = {mode: ("--under", mode) for mode in ("slurm", "clusterddp")}
DISTURBANCES = ("step", "save", "first-steps", "kill")
STEPS = 24
LIMIT_S = 5400
#: What a batch script does that passes the option to resume as soon as there is a checkpoint, without looking into it.
_REQUEUED = '''\
"""Continues from the newest checkpoint, if there is one."""

import glob
import os
import runpy
import sys

found = sorted((path for pattern in {patterns!r} for path in glob.glob(pattern)), key=os.path.getmtime)
sys.argv[0] = {script!r}
if found:
    sys.argv += [one.replace("{{checkpoint}}", found[-1]) for one in {arguments!r}]
runpy.run_path({script!r}, run_name="__main__")
'''


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.repositories.rehearsals", description=__doc__)
    parser.add_argument("checkouts", type=Path, help="the folder of checkouts; nothing is downloaded")
    parser.add_argument("names", nargs="*", help="these repositories, again; default: those without a certificate")
    parser.add_argument("--python", type=Path, default=Path(sys.executable), help="that has the repositories' packages")
    parser.add_argument("--mode", nargs="+", choices=MODES, default=list(MODES), help="what starts it again")
    options = parser.parse_args(arguments)
    entries = read_all()
    if unknown := set(options.names) - {entry.name for entry in entries}:
        parser.error(f"{', '.join(sorted(unknown))}: not among {', '.join(entry.name for entry in entries)}")
    missing = 0
    for entry in entries:
        for mode in options.mode:
            kept = certificate_file(entry, mode)
            if entry.name in options.names or not (options.names or kept.exists()):
                missing += not rehearse(entry, mode, options.checkouts.resolve(), options.python, kept)
                rehearsals_page.write(entries, {entry.name: kept_certificates(entry) for entry in entries})
    return 1 if missing else 0


def certificate_file(entry: Repository, mode: str) -> Path:
    return CERTIFICATES / f"{entry.name}.{mode}.json"


def kept_certificates(entry: Repository) -> dict[str, dict[str, Any]]:
    """Those of the entry's commit, by mode."""
    found = {}
    for mode in MODES:
        file = certificate_file(entry, mode)
        certificate = json.loads(file.read_text()) if file.exists() else {}
        if certificate.get("commit") == entry.commit:
            found[mode] = certificate
    return found


def rehearse(entry: Repository, mode: str, checkouts: Path, python: Path, kept: Path) -> bool:
    """Rehearses one repository, and keeps its certificate. Returns whether there is one."""
    root = WORK / entry.name
    try:
        copy = prepare(entry, checkouts, root)
    except Unusable as error:
        print(f"{entry.name}: not rehearsed: {error}", flush=True)
        return False
    definition = _job(copy, mode)
    _make_repository(root / "code")
    command = [python, "-m", "clusterddp", "rehearse", definition, *MODES[mode], "--only", ",".join(DISTURBANCES)]
    if mode == "clusterddp" and entry.device == "stand-in":
        command += ["--device", "cuda"]
    print(f"{entry.name}: {mode}", flush=True)
    done = subprocess.run(
        [*map(str, command), "--steps", str(STEPS), "-o", str(root)],
        cwd=copy.code,
        env={**_environment(copy), "TMPDIR": tempfile.gettempdir()},
        timeout=LIMIT_S,
    )
    if done.returncode not in (0, FAULT_FOUND, NOT_REPEATABLE):
        print(f"{entry.name}: not rehearsed: exit code {done.returncode}", flush=True)
        return False
    written = (root / "rehearsal.json").read_text().replace(str(root), "{copy}")
    certificate = {**json.loads(written), "repository": entry.url, "commit": entry.commit}
    kept.parent.mkdir(exist_ok=True)
    kept.write_text(json.dumps(certificate, indent=1) + "\n")
    return True


def _job(copy: Copy, mode: str) -> Path:
    """A job definition that trains the repository, and resumes it with its preset, or by its own means."""
    own = copy.repository
    job = {**own.job, **own.rehearsal}
    if mode == "clusterddp":
        job |= own.resume
    else:
        _add_own_means(copy, job)
    if "script" in job:
        job["script"] = str(copy.code / job["script"])
    definition = copy.code / "rehearsed.yaml"
    definition.write_text(yaml.safe_dump(job).replace("{data}", str(copy.data)))
    return definition


def _add_own_means(copy: Copy, job: dict[str, Any]) -> None:
    """The options of the repository with which a batch script resumes it."""
    preset = _preset(copy.repository)
    job["args"] = [*job["args"], *(one.replace("{run_dir}", "out") for one in preset.get("args", ()))]
    resume = preset.get("resume", {})
    if resume.get("args"):
        patterns = resume["checkpoint"] if isinstance(resume["checkpoint"], list) else [resume["checkpoint"]]
        text = _REQUEUED.format(
            patterns=[one.replace("{run_dir}", "out") for one in patterns],
            arguments=resume["args"],
            script=job["script"],
        )
        (copy.code / "requeued.py").write_text(text)
        job["script"] = "requeued.py"


def _preset(entry: Repository) -> dict[str, Any]:
    """What makes it resume: options, a checkpoint, variables."""
    found: dict[str, Any] = yaml.safe_load(preset_text(entry.preset)) if entry.preset else entry.resume
    return found


def _environment(copy: Copy) -> dict[str, str]:
    """As for the other runs of the repository, but its modules come from the copy that a run works in."""
    own, given = copy.repository, environment(copy)
    preset = _preset(own)
    here = os.path.relpath(copy.root / "code", copy.code)
    path = [one for one in given["PYTHONPATH"].split(os.pathsep) if not one.startswith(str(copy.root))]
    quiet = {**own.job.get("env", {}), **preset.get("env", {})}
    # The cache of Hugging Face's libraries is in the folder that a run works in, as it may write there.
    return {**given, **quiet, "HF_HOME": "hub", "PYTHONPATH": os.pathsep.join([".", here, *path])}


def _make_repository(folder: Path) -> None:
    """A rehearsal works in a copy of the script's git repository."""
    git = ["git", "-C", str(folder), "-c", "user.name=test", "-c", "user.email=test@localhost"]
    for words in (["init", "--quiet"], ["add", "."], ["commit", "--quiet", "--message", "copy"]):
        subprocess.run([*git, *words], check=True, stdout=subprocess.DEVNULL)


if __name__ == "__main__":
    sys.exit(main())
