"""What the surrounding job of ``submit --here`` has requested, so that the next job of its run requests the same.

sbatch took its options from the `#SBATCH` header of the user's script, from variables, and from its command line. Slurm
keeps the script. The job's variables and its record show what is in force. They take precedence over the header, but
lack most options.
"""

from __future__ import annotations

import dataclasses
import re
import shlex
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from clusterddp.errors import SlurmError, SlurmMissing, SlurmUnavailable
from clusterddp.jobdef.job import KEYS, Job
from clusterddp.jobdef.kinds import Sbatch
from clusterddp.reporter import show
from clusterddp.rundir.files import write_atomically
from clusterddp.rundir.run_directory import RunDirectory
from clusterddp.slurm import commands as slurm
from clusterddp.slurm.sbatch_variables import SAME

#: Options by name. True: an option without a value.
Options = dict[str, str | bool]

#: sbatch's short options, each with the long one.
_SHORT = """
    A account  a array  B extra-node-info  b begin  C constraint  c cpus-per-task  D chdir  d dependency  e error
    F nodefile  G gpus  H hold  i input  J job-name  k no-kill  L licenses  M clusters  m distribution  N nodes
    n ntasks  O overcommit  o output  p partition  q qos  S core-spec  s oversubscribe  t time  W wait  w nodelist
    x exclude
""".split()
_LONG = dict(zip(_SHORT[::2], _SHORT[1::2], strict=True))
#: Options that the batch script of the next job states in its own way, and options that were for this job alone.
_OWN = {
    *("chdir", "error", "input", "job-name", "nodes", "ntasks", "ntasks-per-node", "open-mode", "output", "signal"),
    *("array", "begin", "clusters", "dependency", "export", "get-user-env", "hold", "no-requeue", "requeue", "wait"),
    *("ntasks-per-gpu", "parsable", "wrap"),
}
#: The variables of a job that have the values of options.
_VARIABLES = {
    "partition": "SLURM_JOB_PARTITION",
    "account": "SLURM_JOB_ACCOUNT",
    "qos": "SLURM_JOB_QOS",
    "reservation": "SLURM_JOB_RESERVATION",
    "cpus-per-task": "SLURM_CPUS_PER_TASK",
    "cpus-per-gpu": "SLURM_CPUS_PER_GPU",
    "mem": "SLURM_MEM_PER_NODE",
    "mem-per-cpu": "SLURM_MEM_PER_CPU",
    "mem-per-gpu": "SLURM_MEM_PER_GPU",
    "gpus": "SLURM_GPUS",
    "gpus-per-node": "SLURM_GPUS_PER_NODE",
    "gpus-per-socket": "SLURM_GPUS_PER_SOCKET",
    "gpus-per-task": "SLURM_GPUS_PER_TASK",
    "hint": "SLURM_HINT",
}
#: The fields of ``scontrol show job`` that show those of others.
_FIELDS = {
    "time": "TimeLimit",
    "constraint": "Features",
    "nodelist": "ReqNodeList",
    "exclude": "ExcNodeList",
    "licenses": "Licenses",
    "network": "Network",
}
_EXCLUSIVE: Mapping[str, str | bool] = {"NO": True, "USER": "user", "MCS": "mcs"}
#: What a site may choose by itself, and may refuse if a user names it.
_CHOSEN = ("partition", "account", "qos", "constraint")


def as_allocated(job: Job, environ: Mapping[str, str]) -> tuple[Job, Job]:
    """The job with the options of the surrounding one in place of those of its definition.

    The second one leaves what the site may have chosen, such as the partition, to the header of the user's script.
    """
    job_id = environ["SLURM_JOB_ID"]
    record = slurm.patiently(lambda: slurm.run("scontrol", "show", "job", "-o", job_id))
    header, info = header_of(_script(job_id)), slurm.parse_job(record)
    options = requested(header, environ, record)
    as_in_header = {name: value for name, value in options.items() if name not in _CHOSEN}
    as_in_header |= {name: header[name] for name in _CHOSEN if name in header}
    none: dict[str, Any] = {field: None for entry in KEYS.values() if entry.mark(Sbatch) for field in entry.fields}
    allocated = dataclasses.replace(
        job,
        **none,
        name=environ.get("SLURM_JOB_NAME", job.name),
        time_s=int(info.time_limit_s) or None if info else None,
        cpus_per_task=None,
        gpu_request="none",
    )
    export = {"export": "ALL"}  # this shell may have loaded modules
    shown = dataclasses.replace(allocated, sbatch={**options, **export})
    return shown, dataclasses.replace(allocated, sbatch={**as_in_header, **export})


def write_script(run: RunDirectory, script: str, as_in_header: str) -> None:
    """Writes the script from which the run's next job is submitted: the first one, unless Slurm refuses that and
    accepts the second."""
    write_atomically(run.batch_script, script)
    if script == as_in_header or (refused := _refused(run)) is None:
        return
    write_atomically(run.batch_script, as_in_header)
    if _refused(run) is None:
        show(f"the run's next job will leave {', '.join(_CHOSEN)} to the site, which refuses its own choice: {refused}")
    else:
        write_atomically(run.batch_script, script)


def _refused(run: RunDirectory) -> str | None:
    """Why Slurm would not accept the run's batch script. None if it would, or if that is unknown."""
    try:
        slurm.run("sbatch", "--test-only", str(run.batch_script))
    except (SlurmMissing, SlurmUnavailable):
        return None
    except SlurmError as error:
        return str(error)
    return None


def _script(job_id: str) -> str:
    """The batch script that the job was submitted with. Empty for salloc."""
    with suppress(SlurmError):  # the job's record shows the most important options
        return slurm.run("scontrol", "write", "batch_script", job_id, "-")
    return ""


def header_of(script: str) -> Options:
    """The options of a batch script, without those for one job alone. They end at its first command."""
    options: Options = {}
    for line in script.splitlines():
        if line.strip() and not line.startswith("#"):
            break
        if re.match(r"#SBATCH\s", line):
            with suppress(ValueError):  # a quotation mark without its pair, which sbatch refuses, too
                options |= _options(shlex.split(line.removeprefix("#SBATCH"), comments=True))
    return {name: value for name, value in options.items() if name not in _OWN}


def _options(words: list[str]) -> Options:
    options: Options = {}
    name = None
    for word in words:
        if word.startswith("--"):
            name, equals, value = word.removeprefix("--").partition("=")
            options[name] = value if equals else True
        elif word.startswith("-"):
            name = _LONG.get(word[1:2])
            if name:
                options[name] = word[2:] or True
        elif name and options[name] is True:
            options[name] = word
    return options


def requested(header: Options, environ: Mapping[str, str], record: str) -> Options:
    """The options of a job: those of its script's header, and in place of them what its variables and its record show.

    A time limit that Slurm has chosen, as with ``--time-min``, is not what the header asks for.
    """
    # After Slurm's own fields comes text of the user's, which may imitate them, and then the GPUs.
    own, _, rest = record.partition(" Command=")
    fields = dict(re.findall(r"(\w+)=(\S*)", own))
    shown: Options = {name: fields[field] for name, field in _FIELDS.items() if field in fields}
    shown |= {name: environ[variable] for name, variable in _VARIABLES.items() if environ.get(variable)}
    shown = {name: value for name, value in shown.items() if value not in ("(null)", "N/A", "0")}
    if exclusive := _EXCLUSIVE.get(fields.get("OverSubscribe", "")):
        shown["exclusive"] = exclusive
    if gres := re.findall(r" TresPerNode=(\S+)", rest):
        shown |= _gres(re.sub(r"(^|,)gres[:/]", r"\1", gres[-1]), {**header, **shown})
    if "time-min" in header:
        shown.pop("time", None)
    replaced = {name for same in (*SAME, *({name} for name in shown)) if same & shown.keys() for name in same}
    return {**{name: value for name, value in header.items() if name not in replaced}, **shown}


def _gres(shown: str, options: Options) -> Options:
    """The generic resources per node that the record shows, in the form in which they were requested, if possible."""
    stated: Options = {name: str(options[name]) for name in ("gpus-per-node", "gres") if name in options}
    as_gres = [f"gpu:{stated['gpus-per-node']}"] if "gpus-per-node" in stated else []
    as_gres += str(stated["gres"]).split(",") if "gres" in stated else []
    return stated if sorted(as_gres) == sorted(shown.split(",")) else {"gres": shown}
