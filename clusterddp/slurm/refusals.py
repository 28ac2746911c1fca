"""What Slurm says when it refuses a request. Every other failure of a command may pass, and the request is repeated.

The texts are those of ``slurm_errtab`` (src/common/slurm_errno.c) in 22.05, 24.11 and 26.05, as far as a decision of
slurmctld about a request of ours can have them. What a busy, restarting or unreachable controller says has no end: a
lost connection is described in dozens of ways, an overloaded munge fails as `Protocol authentication error`, and
wrappers of sites add their own words.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

#: Of any request.
_REFUSED = r"""
Access/permission denied
Invalid job id specified
Invalid node name specified
Invalid partition name specified
\b(Job|Node|Partition|Reservation) \S+ not found
# of a command that this release does not know. It did not ask the controller
[Uu]nrecognized option
[Ii]nvalid option
invalid keyword
requires an argument
# sacctmgr where there is no accounting
not running a supported accounting_storage plugin
Only 'accounting_storage/slurmdbd' is supported
Slurm accounting storage is disabled
"""
#: Of sbatch, scancel, `scontrol requeue` and `scontrol update`. Not among them is what the controller says will pass:
#: `Job can not be altered now, try again later`, `Requested nodes are busy`, `I/O error writing script/environment to
#: file`, `Slurm internal error`, or a full job table (`Resource temporarily unavailable`, since 26.05 `MaxJobCount
#: limit reached`).
_CHANGE_REFUSED = r"""
No partition specified or system default partition
User's group not permitted to use this partition
Requested nodes not in this partition
More processors requested than permitted
(Node|CPU|Task) count specification invalid
Task distribution specification invalid
Current SwitchType does not permit arbitrary task distribution
Requested more tasks than available processors
Job size specification needs to be provided
Job script not specified
Pathname of a file, directory or other parameter too long
Requested (node|topology) configuration is not available
Requested partition configuration not available now
Required node not available
Required partition not available
Job/step already completing or completed
Job is pending execution
Job is no longer pending execution
Job is not pending nor running
Job has already (started|finished)
Job is not (running|finished|suspended)
Job is current suspended
Requested operation not supported on this system
Requested operation is presently disabled
Operation not permitted on individual component of heterogeneous job
Job dependency problem
Circular job dependency
Only batch jobs are accepted or processed
Memory required by task is not available
Invalid account or account/partition combination specified
Invalid or unknown association
Invalid (qos|QOS|wckey|license|feature|preferred feature|extra constraints|job array) specification
Invalid (cluster feature|generic resource \(gres\)|GRES|Trackable RESource \(TRES\)|time-min) specification
Invalid (--nice value|mcs_label specified|container id specified|JobDefaults specification|cluster name)
Invalid (time specified|configuration for external job|KNL configuration)
Duplicate generic resource
Requested GRES option unsupported
Job violates accounting/QOS policy
Requested account has breached requested QOS usage threshold
Requested time limit is invalid
Time limit specification required
Access denied to requested reservation
Requested reservation (is invalid|is in use|not usable now)
Burst Buffer (permission denied|resource limit exceeded|request invalid)
System submissions disabled
X11 forwarding not available
Job --batch option is invalid
Multiple KNL NUMA and/or MCDRAM constraints
Multiple partition job request not supported
Cannot request more threads per core than the job allocation
Container support is not configured
Environment is missing in job
Job cannot be submitted without the current working directory
Cannot (modify|cancel) scrontab jobs
No eligible clusters for federated job
RestrictedCoresPerGPU:
# a site's job_submit plugin, which may return any number
(Batch job submission failed|allocation failure): (Unspecified error|Unknown error|Operation not permitted)
# sbatch itself, before it asks the controller
^sbatch: (error|fatal): (?!.*(credential|Protocol))(?=.*\b[Ii]nvalid\b)
^sbatch: error: Unable to open file
^sbatch: error: (This does not look like a batch script|Batch script )
cli_filter plugin terminated with error
Plugin stack post-option processing failed
"""


#: Of sbatch, on a node whose partition has AllocNodes, or where a site's wrapper says in its own words that it only
#: works on login nodes.
_FORBIDDEN = re.compile(r"Access/permission denied|(?i:\b(compute|login|submit|submission|head) ?-?(node|host)s?\b)")


def _any_of(texts: str) -> re.Pattern[str]:
    return re.compile("|".join(text for text in texts.splitlines() if text and not text.startswith("#")))


_OF_ANY, _OF_A_CHANGE = _any_of(_REFUSED), _any_of(_CHANGE_REFUSED)


def is_refusal(command: Sequence[str], lines: Sequence[str]) -> bool:
    """Whether these lines, which a command of Slurm printed before it failed, say that Slurm refuses the request."""
    if is_forbidden(command, lines):
        return True
    changes = command[0] in ("sbatch", "scancel") or command[:2] in (("scontrol", "requeue"), ("scontrol", "update"))
    return any(_OF_ANY.search(line) or (changes and _OF_A_CHANGE.search(line)) for line in lines)


def is_forbidden(command: Sequence[str], lines: Sequence[str]) -> bool:
    """Whether these lines of a command that failed say that no job may be submitted from this host."""
    return command[0] == "sbatch" and any(map(_FORBIDDEN.search, lines))
