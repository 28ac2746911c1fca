"""Who takes part: the script, how it is submitted, and what its documentation promises."""

from __future__ import annotations

import io
import tokenize
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

SCRIPTS = Path(__file__).parent / "scripts"
#: Lines that are there for the benchmark alone.
_OURS = ("from steplog import", "from common import", "steplog(", "finish(")


@dataclass(frozen=True)
class Peer:
    """One row of the matrix."""

    name: str
    files: tuple[str, ...]
    """The script, and the batch script or job definition."""
    packages: tuple[str, ...]
    promise: str

    def submission(self, scripts: Path, python: Path, folder: Path, environment: Mapping[str, str]) -> list[str]:
        """The command that submits it; it prints the job id."""
        last = scripts / self.files[-1]
        if last.suffix == ".sbatch":
            return ["sbatch", "--parsable", "--output=job.log", "--open-mode=append", str(last)]
        if last.suffix == ".yaml":
            where = ["-p", environment["SBATCH_PARTITION"], "-t", environment["SBATCH_TIMELIMIT"]]
            own = [f"--set=env.{name}={value}" for name, value in environment.items() if "SBATCH" not in name]
            return [str(python), "-m", "clusterddp.submit", str(last), "--run-dir", str(folder / "run"), *where, *own]
        return [str(python), str(last)]

    def versions(self) -> str:
        return ", ".join(f"{package} {version(package)}" for package in self.packages)

    def lines(self) -> dict[str, int]:
        """Lines of each file: see `count`."""
        return {name: count((SCRIPTS / name).read_text(), name.endswith(".py")) for name in self.files}


def count(text: str, python: bool) -> int:
    """Lines with code: not blank, not comments, not docstrings, and not those of the benchmark itself."""
    if python:
        rows = _code_rows(text)
        lines = [line for number, line in enumerate(text.splitlines(), 1) if number in rows]
    else:
        lines = [line for line in text.splitlines() if not line.startswith("# ")]
    return sum(1 for line in lines if line.strip() and not any(mark in line for mark in _OURS))


def _code_rows(text: str) -> set[int]:
    rows: set[int] = set()
    alone = True
    skipped = {tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.COMMENT, tokenize.ENCODING}
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type in skipped or token.type == tokenize.ENDMARKER:
            alone = alone or token.type == tokenize.NEWLINE
        elif token.type == tokenize.STRING and alone:
            alone = False  # a docstring: a string that begins a statement
        else:
            rows.update(range(token.start[0], token.end[0] + 1))
            alone = False
    return rows


LIMIT = Peer("limit", ("limit.py", "limit.sbatch"), ("torch",), "")
PEERS = {
    peer.name: peer
    for peer in (
        Peer(
            "clusterddp",
            ("with_clusterddp.py", "with_clusterddp.yaml"),
            ("clusterddp",),
            "preemption, time limit, dead node, killed and hung ranks: continues by itself, bit-exactly",
        ),
        Peer(
            "handwritten",
            ("handwritten.py", "handwritten.sbatch"),
            ("torch",),
            "a checkpoint that can be loaded; nothing about Slurm",
        ),
        Peer(
            "torchrun",
            ("with_torchrun.py", "with_torchrun.sbatch"),
            ("torch",),
            "restarts all ranks from the last snapshot when one fails; nothing about preemption",
        ),
        Peer(
            "submitit",
            ("with_submitit.py",),
            ("submitit",),
            "requeues with checkpoint() when it is preempted or times out, if Slurm sends its signal beforehand",
        ),
        Peer(
            "Lightning",
            ("with_lightning.py", "with_lightning.sbatch"),
            ("lightning",),
            "saves and requeues on SIGUSR1 before the time limit; SIGTERM: stops",
        ),
        Peer(
            "accelerate",
            ("with_accelerate.py", "with_accelerate.sbatch"),
            ("accelerate",),
            "save_state and load_state; nothing about Slurm",
        ),
        Peer(
            "Trainer",
            ("with_transformers.py", "with_transformers.sbatch"),
            ("transformers", "accelerate"),
            "resume_from_checkpoint=True continues from the last save; with enable_jit_checkpoint: saves on SIGTERM",
        ),
    )
}
BY_NAME = {**PEERS, LIMIT.name: LIMIT}
