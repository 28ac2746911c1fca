"""Slurm's commands as a site's users see them: ``sinfo``, ``scontrol``, ``sacctmgr`` and ``sbatch``.

``install`` puts them into a folder for PATH. They answer from the files of the site's folder. sbatch refuses what Slurm
itself refuses, and what the site's module says.
"""

from __future__ import annotations

import importlib
import re
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

SITES = Path(__file__).parent
#: sbatch's long options by their letters.
_LONG = {
    "A": "account", "C": "constraint", "J": "job-name", "N": "nodes", "S": "core-spec", "c": "cpus-per-task",
    "e": "error", "n": "ntasks", "o": "output", "p": "partition", "q": "qos", "t": "time",
}  # fmt: skip
#: What an sbatch command line, or the ``#SBATCH`` lines of a script, request: long options and their values.
Options = Mapping[str, str]


def options_of(words: Iterable[str]) -> dict[str, str]:
    """The options of a command line, as ``--nodes=2``, ``--nodes 2`` or ``-N 2``. Without a value: an empty one."""
    found: dict[str, str] = {}
    name = ""
    for word in words:
        if word.startswith("--"):
            name, _, found[name] = word[2:].partition("=")
        elif word.startswith("-"):
            name, value = _LONG[word[1]], word[2:]
            found[name] = value
        elif name:
            found[name], name = word, ""
        if name and found[name]:
            name = ""
    return found


def options_in(script: str) -> dict[str, str]:
    """The options in the ``#SBATCH`` lines of a script."""
    lines = re.findall(r"^#SBATCH (.*)$", script, re.MULTILINE)
    return options_of(word for line in lines for word in shlex.split(line))


@dataclass(frozen=True)
class Node:
    """A node of ``nodes.txt``."""

    line: str

    def __getitem__(self, field: str) -> str:
        found = re.search(rf"(?<!\S){field}=(\S*)", self.line)
        return found[1].replace("(null)", "") if found else ""

    @property
    def gpus(self) -> str:
        """Such as ``gpu:a100:4``, or empty."""
        return re.sub(r"\(.*\)", "", self["Gres"])

    def fits(self, options: Options) -> bool:
        """Whether it has what a job requests of each node."""
        kind, _, gpus = requested_gpus(options).rpartition(":")
        have_kind, _, have = self.gpus.removeprefix("gpu:").rpartition(":")
        threads = int(self["ThreadsPerCore"])
        cores_only = options.get("hint") == "nomultithread" or options.get("threads-per-core") == "1"
        tasks = int(options.get("ntasks-per-node") or 1)
        cpus = tasks * int(options.get("cpus-per-task") or 1) * (threads if cores_only else 1)
        memory = _mib(options.get("mem", "0"))
        features = set(filter(None, re.split("[&,]", options.get("constraint", ""))))
        return (
            kind in ("", have_kind)
            and int(gpus or 0) <= int(have or 0)
            and cpus <= int(self["CPUEfctv"])
            and memory <= int(self["RealMemory"])
            and features <= set(self["AvailableFeatures"].split(","))
        )


def requested_gpus(options: Options) -> str:
    """GPUs of a node as ``a100:4`` or ``4``, or empty."""
    gres = next((item for item in options.get("gres", "").split(",") if item.startswith("gpu:")), "")
    return options.get("gpus-per-node") or gres.removeprefix("gpu:")


def _mib(text: str) -> int:
    return int(text.rstrip("MGmg")) * (1024 if text[-1] in "Gg" else 1)


class Site:
    """A site by the name of its folder."""

    def __init__(self, name: str) -> None:
        self.folder = SITES / name
        self.module = importlib.import_module(f"tests.sites.{name}")
        self.nodes = [Node(line) for line in self.text("nodes").splitlines()]
        self.partitions = {line.split()[0].partition("=")[2]: line for line in self.text("partitions").splitlines()}

    def text(self, name: str) -> str:
        """The text of a file."""
        return (self.folder / f"{name}.txt").read_text()

    @property
    def default(self) -> str:
        """The default partition, or empty."""
        return next((name for name, line in self.partitions.items() if " Default=YES " in line), "")

    def refusal(self, options: Options) -> str | None:
        """Why sbatch refuses the job: a rule of the site, or no node that it could ever run on."""
        if why := self.module.refusal(options):
            return str(why)
        if requested_gpus(options) and not any(node.gpus for node in self.nodes):
            return "Invalid generic resource (gres) specification"
        route = getattr(self.module, "route", lambda options: options.get("partition") or self.default)
        names = set(route(options).split(","))
        if not names <= self.partitions.keys():
            return "invalid partition specified"
        reached = [node for node in self.nodes if names & set(node["Partitions"].split(","))]
        if sum(node.fits(options) for node in reached) < int(options.get("nodes", "1").split("-")[0]):
            return "Requested node configuration is not available"
        return None


def install(name: str, folder: Path) -> None:
    """Puts the commands of a site into a folder."""
    for command in ("sinfo", "scontrol", "sacctmgr", "sbatch", "srun"):
        file = folder / command
        file.write_text(
            f"#!{sys.executable} -SE\nimport sys\nsys.path.append({str(SITES.parents[1])!r})\n"
            f"from tests.sites.slurm import answer\nsys.exit(answer({name!r}, {command!r}, sys.argv[1:]))\n"
        )
        file.chmod(0o755)


def answer(name: str, command: str, words: Sequence[str]) -> int:
    """Prints what a command prints, and returns its exit code."""
    site = Site(name)
    if command == "sinfo":
        return _sinfo(site, words)
    if command == "scontrol":
        return _scontrol(site, words)
    if command == "sacctmgr":
        wanted = next((word.removeprefix("name=") for word in words if word.startswith("name=")), None)
        rows = [line.split("|", 1) for line in site.text("qos").splitlines()]
        print("\n".join(row[1] for row in rows if row[0] == wanted))
        return 0
    script = Path(words[-1]).read_text()
    if why := site.refusal({**options_in(script), **options_of(words[:-1])}):
        print(f"sbatch: error: {why}\nsbatch: error: Batch job submission failed: {why}", file=sys.stderr)
        return 1
    print(41)
    return 0


def _sinfo(site: Site, words: Sequence[str]) -> int:
    form = words[-1]
    for name in site.partitions:
        starred = f"{name}*" if name == site.default else name
        nodes = [node for node in site.nodes if name in node["Partitions"].split(",")]
        for node in nodes if "-N" in words else nodes[:1]:
            values = {"R": name, "P": starred, "N": node["NodeName"], "G": node["Gres"] or "(null)", "T": "idle"}
            values |= {"D": str(len(nodes)), "f": node["AvailableFeatures"] or "(null)"}
            print(re.sub("%(.)", lambda match, values=values: values[match[1]], form))  # type: ignore[misc]
    return 0


def _scontrol(site: Site, words: Sequence[str]) -> int:
    match [word for word in words if not word.startswith("-")]:
        case ["show", "config"]:
            print(site.text("config"))
        case ["show", "node"]:
            print(site.text("nodes"))
        case ["show", "partition"]:
            print(site.text("partitions"))
        case ["show", "partition", name] if name in site.partitions:
            print(site.partitions[name])
        case _:
            print(f"scontrol: error: not found: {' '.join(words)}", file=sys.stderr)
            return 1
    return 0
