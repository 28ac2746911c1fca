"""Words that events and their readers share."""

from __future__ import annotations

from collections.abc import Mapping

#: What follows most failures.
RESTARTING = "restarting all ranks in place"
#: ``then`` of an attempt that is ``stopped`` while Slurm is requeueing its job by itself.
BY_SLURM = "requeued by Slurm"
#: The same, where the job definition says that the run ends with its job.
NOT_CONTINUED = "not continued (`continue: false`) until it is submitted again"
#: How a run can end; also the "state" in outcome.json.
RUN_ENDS = ("completed", "failed", "cancelled")
#: After these an attempt has no ranks.
ATTEMPT_ENDS = ("restarted", "requeued", "resubmitted", "stopped", *RUN_ENDS)
#: What rank 0 can be doing outside of saves: ``report/booking.py`` books the time by it.
PHASES: Mapping[str, str] = {
    "importing": "the script's imports, and all else that it does before its loop, such as building the model",
    "rendezvous": "clusterddp.init() waits for all ranks",
    "restoring": "ctx.run() checks its parts and restores the newest checkpoint",
    "first_step": "the first step of the attempt: compilation, the first collectives, the first batch",
    "repeating": "steps that an earlier attempt completed, but did not save",
    "training": "steps",
    "after_loop": "what the script does after its loop, other than evaluations",
    "ending": "the script has ended",
}
#: The events that call the hook of a job definition.
HOOK_EVENTS: Mapping[str, str] = {
    "preempted": "the job is being preempted, and the run continues: it is requeued or resubmitted",
    "resumed": "an attempt continues from a checkpoint",
    "stopped": "the run is stopped until you continue it",
    "completed": "all ranks finished",
    "failed": "the run failed",
    "cancelled": "the run was cancelled while an attempt ran",
}


def at_step(step: int | None) -> str:
    """`` at step 7``, or nothing if no step was recorded, as with a script that does not use clusterddp."""
    return "" if step is None else f" at step {step}"
